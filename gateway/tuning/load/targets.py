"""Who is asked: a gateway's or a model server's HTTP, or a model server by gRPC."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import orjson
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from gateway.backends.grpc.channel import GrpcChannel, GrpcError
from gateway.backends.triton import codec, documents
from gateway.core.errors import BackendError
from gateway.core.models import ModelFigures
from gateway.core.types import BackendCall, TensorPayload
from gateway.tuning.load import asks, judging, made_up
from gateway.tuning.load.asks import Ask, AskError
from gateway.tuning.load.http_wire import ANSWER_BYTES, HttpPool
from gateway.tuning.load.judging import Judge
from gateway.tuning.load.outcomes import WRONG_ANSWER, Outcome, Target
from gateway.tuning.traffic import TrafficClass

CONNECTIONS: Final = 1000  # at once, to one address
SET_UP_S: Final = 10.0
ANSWER_S: Final = 3600.0  # a call's deadline, which gRPC must have: the run's own end comes before it
_SERVICE: Final = b"/inference.GRPCInferenceService/"


class HttpTarget:
    """Prebuilt requests in turn, and a judge of what comes back."""

    def __init__(self, pool: HttpPool, requests: Sequence[bytes], judge: Judge) -> None:
        self._pool = pool
        self._requests: Iterator[bytes] = itertools.cycle(requests)
        self._judge = judge

    async def send(self, _due: float, /) -> Outcome:
        """One exchange."""
        return self._judge(await self._pool.exchange(next(self._requests)))


class GrpcTarget:
    """One prebuilt `ModelInfer`, over one connection, as the gateway itself asks Triton."""

    def __init__(self, channel: GrpcChannel, message: bytes) -> None:
        self._channel = channel
        self._message = message

    async def send(self, _due: float, /) -> Outcome:
        """One call."""
        try:
            answer = await self._channel.unary(_SERVICE + b"ModelInfer", self._message, timeout_s=ANSWER_S)
            codec.decode(answer, ())
        except GrpcError as error:
            return Outcome(code=f"grpc_{error.code.lower()}")
        except BackendError:
            return Outcome(code=WRONG_ANSWER)
        return Outcome()


class Clients:
    """Connections of a run, one pool or channel to each address, for all its classes."""

    def __init__(self, *, connections: int = CONNECTIONS) -> None:
        self._connections = connections
        self._pools: dict[tuple[str, int, bool], HttpPool] = {}
        self._channels: dict[str, GrpcChannel] = {}

    @property
    def waited(self) -> int:
        """Requests that found no connection free."""
        return sum(pool.waited for pool in self._pools.values())

    async def target(self, ask: Ask, traffic: TrafficClass, *, seed: int = 0) -> Target:
        """For a class; a model is asked for its configuration. Raises `AskError`."""
        if ask.triton:
            return await self._straight(ask, traffic, seed=seed)
        pool = self._pool(ask)
        if ask.tensor:
            config = await self._config(ask, pool)
            inputs = made_up.tensors(config, ask, rows=traffic.rows, seed=seed)
            return HttpTarget(pool, [asks.tensor_request(ask, traffic, inputs)], judging.tensors)
        if ask.chat:
            return HttpTarget(pool, [asks.chat_request(ask, traffic)], judging.chat)
        return HttpTarget(pool, asks.task_requests(ask, traffic), judging.task)

    async def figures(self, triton: str) -> list[ModelFigures]:
        """What a server by gRPC has counted of its models. Raises `AskError`."""
        answer = await self._ask(triton, b"ModelStatistics", pb.ModelStatisticsRequest(), pb.ModelStatisticsResponse)
        return documents.figures(answer, replica=triton)

    async def close(self) -> None:
        """Close all of them."""
        pools = (pool.close() for pool in self._pools.values())
        await asyncio.gather(*pools, *(channel.close() for channel in self._channels.values()))

    async def _straight(self, ask: Ask, traffic: TrafficClass, *, seed: int) -> GrpcTarget:
        request = pb.ModelConfigRequest(name=ask.tensor, version=ask.version)
        answer = await self._ask(ask.triton, b"ModelConfig", request, pb.ModelConfigResponse)
        inputs = made_up.tensors(documents.document(answer.config), ask, rows=traffic.rows, seed=seed)
        payload = TensorPayload(inputs=tuple(inputs))
        call = BackendCall(request_id="", model=ask.tensor, version=ask.version, payload=payload)
        return GrpcTarget(self._channel(ask.triton), b"".join(codec.encode(call, payload, None)))

    async def _ask(self, triton: str, method: bytes, request: Any, form: Any) -> Any:
        try:
            message = await self._channel(triton).unary(
                _SERVICE + method, request.SerializeToString(), timeout_s=SET_UP_S
            )
            return form.FromString(message)
        except (GrpcError, DecodeError) as error:
            raise AskError(f"triton: {triton}: {error}") from error

    async def _config(self, ask: Ask, pool: HttpPool) -> Mapping[str, Any]:
        path = f"{asks.model_path(ask)}/config"
        try:
            async with asyncio.timeout(SET_UP_S):
                answer = await pool.exchange(asks.head(ask, "GET", path))
        except TimeoutError:
            raise AskError(f"url: {ask.url}{path}: no answer within {SET_UP_S:g} s") from None
        if answer.status != judging.GOOD or answer.trouble:
            raise AskError(f"tensor: {ask.url}{path}: {judging.failed(answer).code}")
        try:
            config = orjson.loads(answer.body)
        except orjson.JSONDecodeError:
            config = None
        if not isinstance(config, dict) or "input" not in config:
            raise AskError(f"tensor: {ask.url}{path}: not a configuration")
        return config

    def _pool(self, ask: Ask) -> HttpPool:
        to = asks.address(ask.url)
        at = (to.host, to.port, to.is_tls)
        if at not in self._pools:
            self._pools[at] = HttpPool(to.host, to.port, is_tls=to.is_tls, limit=self._connections)
        return self._pools[at]

    def _channel(self, triton: str) -> GrpcChannel:
        if triton not in self._channels:
            try:
                self._channels[triton] = GrpcChannel(triton, max_receive_bytes=ANSWER_BYTES)
            except ValueError as error:
                raise AskError(f"triton: {error}") from error
        return self._channels[triton]


@asynccontextmanager
async def clients(*, connections: int = CONNECTIONS) -> AsyncIterator[Clients]:
    """Connections that are closed at the end."""
    made = Clients(connections=connections)
    try:
        yield made
    finally:
        await made.close()
