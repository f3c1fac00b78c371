"""LLM endpoints over HTTP: one, or several equal ones, that speak the protocol of a codec."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from gateway.backends.llm.codec import Codec, Encoded
from gateway.backends.llm.engine_metrics import load_in
from gateway.backends.llm.http_client import CONNECT_TIMEOUT_US, HttpClient
from gateway.backends.llm.http_connection import Connection, HttpError, Trouble
from gateway.backends.llm.openai_faults import Waiting
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFigures
from gateway.core.texts import logged
from gateway.core.types import STREAMED, BackendCall, BackendEvent, EngineLoad, OpenAIPayload, Place, Speech

PROBE_TIMEOUT_US: Final = 1_000_000
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024  # Triton's OpenAI front end bounds bodies by the same
MAX_ERROR_BYTES: Final = 64 * 1024
ERROR_BODY_S: Final = 1.0  # how long a refusal's body may stay silent
MAX_METRICS_BYTES: Final = 4 * 1024 * 1024
METRICS_PAUSE_S: Final = 1.5  # so every other second: llama.cpp notices that a caller left after one without work
METRICS_AGAIN_S: Final = 60.0  # when a server that has no readable metrics is asked again
LOAD_VALID_S: Final = 5.0  # how long what a server said of its load counts
SETTLE_S: Final = 0.02  # how long to wait after a stream's end for the end of the body, to keep the connection
_OK: Final = 200
_SERVER_ERROR: Final = 500
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

_FAULTS: Final[Mapping[Trouble, Callable[[str], Fault]]] = {
    Trouble.UNREACHABLE: lambda text: Fault(kind=FaultKind.UNREACHABLE, message=text, is_server=True),
    Trouble.HUNG_UP: lambda text: Fault(kind=FaultKind.UNREACHABLE, message=text),
    Trouble.CUT: lambda text: Fault(kind=FaultKind.BROKEN, message=text),
    Trouble.TIMED_OUT: lambda text: Fault(kind=FaultKind.TIMEOUT, message=text),
    Trouble.SILENT: lambda text: Fault(kind=FaultKind.TIMEOUT, message=text, is_own_limit=True),
    Trouble.GARBLED: lambda text: Fault(kind=FaultKind.BROKEN, message=text),
    Trouble.TOO_LARGE: lambda text: Fault(kind=FaultKind.BROKEN, message=text),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long an endpoint may take, in microseconds, within the time of a call.

    Attributes:
        connect_us: until a connection stands, name look-up and TLS included.
        first_token_us: from the request to a streamed answer's first part; None = as long as the call.
        idle_us: without a byte, once a stream has begun, or a whole answer's head has come.
    """

    connect_us: int = CONNECT_TIMEOUT_US
    first_token_us: int | None = None
    idle_us: int = 60_000_000


class LLMBackend:
    """Generative calls, relayed as bytes. No header of the upstream's answer leaves this class.

    Args:
        name: as the configuration calls it.
        codec: the protocol that the endpoints speak.
        base_urls: of equal endpoints; several are replicas, named `host:port`.
        api_key: never logged, never shown.
        headers: sent with every request.
        models: the endpoint's own name of a model, by its name in calls, where they differ.
        is_hosted: somebody else's API: not probed, not asked for metrics.
        tls: how https is checked; default: by the system's authorities.
        server_name: whose certificate it must be; by default the URL's host.

    Raises ValueError for URLs and headers that cannot be used. The constructor does no I/O.
    """

    speaks: Final[Speech] = "openai"

    def __init__(  # noqa: PLR0913 - an endpoint's settings, each by its name
        self,
        name: str,
        *,
        codec: Codec,
        base_urls: Sequence[str],
        api_key: str | None = None,
        headers: Mapping[str, str] = _NOTHING,
        models: Mapping[str, str] = _NOTHING,
        limits: Limits | None = None,
        is_hosted: bool = False,
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
    ) -> None:
        self.name = name
        self.is_probed = not is_hosted
        self._codec = codec
        self._models = models
        self._limits = limits or Limits()
        self._secret = (api_key or "").encode()
        given = {**codec.headers(api_key), **headers}
        fixed = {"user-agent": "hybrid-inference-gateway", "accept": "*/*"} | {k.lower(): v for k, v in given.items()}
        self._clients = {
            replica: HttpClient(
                url, headers=fixed, connect_timeout_us=self._limits.connect_us, tls=tls, server_name=server_name
            )
            for replica, url in _replicas(base_urls).items()
        }
        self._replicas = () if len(self._clients) == 1 else tuple(self._clients)
        self._loads: dict[str, tuple[float, EngineLoad]] = {}  # by replica, with the instant
        self._ask_at: dict[str, float] = {}

    async def infer(self, call: BackendCall, *, timeout_us: int) -> AsyncGenerator[BackendEvent, None]:
        """One `Message`, or `Delta`s, `Deltas` and `Metered` usage as they come.

        Status and content type are settled before the first event. A stream that ends early, is cut, or turns into an
        error raises at that point. Closing the iterator closes the connection at once. While nobody takes the next
        event the upstream is not read, so that it has to wait.
        """
        payload = call.payload
        if not isinstance(payload, OpenAIPayload):
            raise BackendError(Fault(kind=FaultKind.UNSUPPORTED, message="a tensor call to a generative backend"))
        request = self._codec.encode(payload, self._models.get(call.model, call.model))
        client = self._client(call.replica)
        sent = _written(client, call, request)
        begin_within_us = self._limits.first_token_us if request.stream else None
        try:
            response = await client.send(sent, timeout_us=timeout_us, begin_within_us=begin_within_us)
            try:
                if response.status != _OK:
                    raise BackendError(await self._fault(response))
                if request.stream is None:
                    response.limit_silence(self._limits.idle_us / 1e6)
                    body = await response.read_all(MAX_ANSWER_BYTES)
                else:
                    await _refuse_unless_stream(response, request)
                    stream, has_begun = request.stream(), False
                    while not stream.is_done and (read := await response.read()) is not None:
                        for event in stream.feed(read):
                            if not has_begun:
                                has_begun = self._begin(response, event)
                            yield event
                    for event in stream.end():
                        yield event
                    await _settle(response)
                    return
            finally:
                client.release(response)
        except HttpError as error:
            raise _translated(error) from error
        yield request.message(body)

    def _begin(self, response: Connection, event: BackendEvent) -> bool:
        """Whether the answer has begun, with the first event that the caller sees: only pauses count from here on."""
        if not isinstance(event, STREAMED):
            return False
        response.limit_silence(self._limits.idle_us / 1e6)
        return True

    def engine_load(self, replica: str) -> EngineLoad | None:
        """What the last `figures` found, unless that is too long ago."""
        at, load = self._loads.get(replica, (0.0, None))
        return load if time.monotonic() - at <= LOAD_VALID_S else None

    def replicas(self) -> Sequence[str]:
        """Fixed by the configuration."""
        return self._replicas

    async def probe(self, place: Place) -> None:
        """Any answer that is no server error means that the endpoint is there; requests tell the rest."""
        try:
            async with self._client(place.replica).exchange(
                "GET", self._codec.probe_path, timeout_us=PROBE_TIMEOUT_US
            ) as response:
                if response.status >= _SERVER_ERROR:
                    raise BackendError(await self._fault(response))
        except HttpError as error:
            raise _translated(error) from error

    async def figures(self) -> Sequence[ModelFigures]:
        """Empty: the protocol does not tell of models. What servers say of their load is kept for `engine_load`."""
        if self.is_probed:
            await asyncio.gather(*(self._ask_load(replica) for replica in self._clients))
        return ()

    async def close(self) -> None:
        """Close all connections; calls in flight end as UNREACHABLE."""
        for client in self._clients.values():
            await client.close()

    def _client(self, replica: str) -> HttpClient:
        """A replica's; where none is chosen, or one that is not known, the first."""
        return self._clients.get(replica) or next(iter(self._clients.values()))

    async def _ask_load(self, replica: str) -> None:
        """Never raises: a server without metrics is a server like any other."""
        now = time.monotonic()
        if now < self._ask_at.get(replica, 0.0):
            return
        load = None
        try:
            async with self._clients[replica].get_from_root("/metrics", timeout_us=PROBE_TIMEOUT_US) as response:
                if response.status == _OK:
                    load = load_in(await response.read_all(MAX_METRICS_BYTES))
        except HttpError as error:
            if error.trouble not in (Trouble.GARBLED, Trouble.TOO_LARGE):
                return  # it is away, or busy: probes see to that
        self._ask_at[replica] = now + (METRICS_AGAIN_S if load is None else METRICS_PAUSE_S)
        if load is not None:
            self._loads[replica] = (time.monotonic(), load)

    async def _fault(self, response: Connection) -> Fault:
        """The fault behind a status. That alone says enough where its body does not come or cannot be read."""
        body = b""
        response.limit_silence(ERROR_BODY_S)
        with contextlib.suppress(HttpError):
            body = await response.read_all(MAX_ERROR_BYTES)
        if self._secret:  # some repeat the key that they refuse
            body = body.replace(self._secret, b"***")
        waiting = Waiting(
            retry_after=response.header(b"retry-after"),
            retry_after_ms=response.header(b"retry-after-ms"),
            date=response.header(b"date"),
        )
        return self._codec.fault(response.status, body, waiting)


def _written(client: HttpClient, call: BackendCall, request: Encoded) -> bytes:
    """The request as it is sent. Raises `BackendError` where a model's name, which may stand in a path, cannot."""
    # The request id and the trace are safe in a header: the door lets no other through.
    trace = "".join([f"{name}: {value}\r\n" for name, value in call.trace]) if call.trace else ""
    extra = f"content-type: application/json\r\nx-request-id: {call.request_id}\r\n{trace}".encode("ascii")
    try:
        return client.post(request.path, extra=extra, body=request.body)
    except ValueError:
        text = "no path can be made of the model's name"
        raise BackendError(Fault(kind=FaultKind.UNKNOWN_MODEL, message=text)) from None


async def _refuse_unless_stream(response: Connection, request: Encoded) -> None:
    """Raise `BackendError` unless a stream of events follows."""
    found = (response.header(b"content-type") or "").partition(";")[0].strip().lower()
    if found != "text/event-stream":
        request.message(await response.read_all(MAX_ANSWER_BYTES))  # an error in disguise says more than its type
        text = f"asked for a stream, got {logged(found) or 'no content type'}"
        raise BackendError(Fault(kind=FaultKind.BROKEN, message=text))


def _replicas(base_urls: Sequence[str]) -> Mapping[str, str]:
    """The endpoints' URLs by their names; the only one has none. ValueError where two would have the same."""
    if len(base_urls) == 1:
        return {"": base_urls[0]}
    named: dict[str, str] = {}
    for url in base_urls:
        parts = urlsplit(url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        name = f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
        if name in named:
            raise ValueError(f"two endpoints at {name}")
        named[name] = url
    if not named:
        raise ValueError("no endpoint is named")
    return named


async def _settle(response: Connection) -> None:
    """After a stream's end: read the end of the body, if it comes soon, so that the connection can be kept."""
    with contextlib.suppress(TimeoutError, HttpError):
        async with asyncio.timeout(SETTLE_S):
            while await response.read() is not None:
                pass


def _translated(error: HttpError) -> BackendError:
    return BackendError(_FAULTS[error.trouble](logged(str(error))))
