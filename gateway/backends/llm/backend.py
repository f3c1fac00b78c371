"""An OpenAI-compatible endpoint: vLLM, llama.cpp, TensorRT-LLM, or a hosted API."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from gateway.backends.llm import openai_codec
from gateway.backends.llm.http_client import HttpClient
from gateway.backends.llm.http_connection import Connection, HttpError, Trouble
from gateway.backends.llm.openai_faults import Waiting, fault_of
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFigures
from gateway.core.texts import logged
from gateway.core.types import BackendCall, BackendEvent, EngineLoad, OpenAIPayload, Place

PROBE_TIMEOUT_US: Final = 1_000_000
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024  # Triton's OpenAI front end bounds bodies by the same
MAX_ERROR_BYTES: Final = 64 * 1024
SETTLE_S: Final = 0.02  # how long to wait after [DONE] for the end of the body, to keep the connection
_OK: Final = 200
_SERVER_ERROR: Final = 500
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

_KINDS: Final[Mapping[Trouble, FaultKind]] = {
    Trouble.UNREACHABLE: FaultKind.UNAVAILABLE,
    Trouble.CUT: FaultKind.UNAVAILABLE,
    Trouble.TIMED_OUT: FaultKind.TIMEOUT,
    Trouble.GARBLED: FaultKind.BROKEN,
    Trouble.TOO_LARGE: FaultKind.BROKEN,
}


class OpenAIBackend:
    """Chat calls, relayed as bytes. No header of the upstream's answer leaves this class.

    Args:
        name: as the configuration calls it.
        base_url: up to and including `/v1`.
        api_key: sent as a bearer token; never logged, never shown.
        headers: sent with every request.
    """

    speaks: Final = "openai"

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> None:
        fixed = {"user-agent": "hybrid-inference-gateway", "accept": "*/*", **headers}
        if api_key:
            fixed["authorization"] = f"Bearer {api_key}"
        self.name = name
        self.is_probed = True
        self._client = HttpClient(base_url, headers=fixed)

    async def infer(self, call: BackendCall, *, timeout_us: int) -> AsyncGenerator[BackendEvent, None]:
        """One `Message`, or `Delta`s and `Metered` usage as they come.

        Status and content type are settled before the first event. A stream that ends without `[DONE]`, is cut, or
        turns into an error raises at that point. Closing the iterator closes the connection at once.
        """
        payload = call.payload
        if not isinstance(payload, OpenAIPayload):
            raise BackendError(Fault(kind=FaultKind.UNSUPPORTED, message="a tensor call to a chat backend"))
        request = openai_codec.encode(payload, call.model)
        try:
            async with self._client.exchange(
                "POST", "/chat/completions", body=request.body, extra=_extra(call), timeout_us=timeout_us
            ) as response:
                await _refuse_unless(response, "text/event-stream" if payload.stream else None)
                if payload.stream:
                    stream = openai_codec.ChatStream(drop_usage=request.added_usage)
                    while not stream.is_done and (read := await response.read()) is not None:
                        for event in stream.feed(read):
                            yield event
                    stream.end()
                    await _settle(response)
                    return
                body = await response.read_all(MAX_ANSWER_BYTES)
        except HttpError as error:
            raise _translated(error) from error
        yield openai_codec.message(body)

    def engine_load(self, replica: str) -> EngineLoad | None:  # noqa: ARG002 - the port's
        """Not read yet."""
        return None

    def replicas(self) -> Sequence[str]:
        """One endpoint."""
        return ()

    async def probe(self, place: Place) -> None:  # noqa: ARG002 - the port's; one list tells of all models
        """GET /models: any answer that is no server error means that the endpoint is there; requests tell the rest."""
        try:
            async with self._client.exchange("GET", "/models", timeout_us=PROBE_TIMEOUT_US) as response:
                if response.status >= _SERVER_ERROR:
                    await _refuse_unless(response, None)
        except HttpError as error:
            raise _translated(error) from error

    async def figures(self) -> Sequence[ModelFigures]:
        """Empty: this protocol does not tell."""
        return ()

    async def close(self) -> None:
        """Close all connections; calls in flight end as UNAVAILABLE."""
        await self._client.close()


def _extra(call: BackendCall) -> bytes:
    """Header lines. The request id is safe in a header: the door lets no other through."""
    return f"content-type: application/json\r\nx-request-id: {call.request_id}\r\n".encode("ascii")


async def _refuse_unless(response: Connection, media_type: str | None) -> None:
    """Raise `BackendError` unless the status is 200 and the content type, where it matters, is the one asked for."""
    if response.status != _OK:
        body = b""
        with contextlib.suppress(HttpError):  # the status says enough, even where its body cannot be read
            body = await response.read_all(MAX_ERROR_BYTES)
        waiting = Waiting(
            retry_after=response.header(b"retry-after"),
            retry_after_ms=response.header(b"retry-after-ms"),
            date=response.header(b"date"),
        )
        raise BackendError(fault_of(response.status, body, waiting))
    if media_type is None:
        return
    found = (response.header(b"content-type") or "").partition(";")[0].strip().lower()
    if found != media_type:
        body = await response.read_all(MAX_ANSWER_BYTES)
        openai_codec.message(body)  # an error in disguise says more than its content type
        text = f"asked for a stream, got {logged(found) or 'no content type'}"
        raise BackendError(Fault(kind=FaultKind.BROKEN, message=text))


async def _settle(response: Connection) -> None:
    """After `[DONE]`: read the end of the body, if it comes soon, so that the connection can be kept."""
    with contextlib.suppress(TimeoutError, HttpError):
        async with asyncio.timeout(SETTLE_S):
            while await response.read() is not None:
                pass


def _translated(error: HttpError) -> BackendError:
    return BackendError(Fault(kind=_KINDS[error.trouble], message=logged(str(error))))
