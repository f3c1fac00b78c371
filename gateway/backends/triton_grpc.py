"""Triton, or anything else that speaks the Open Inference Protocol over gRPC."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Final, TypeVar

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from gateway.backends import triton_codec
from gateway.backends.triton_faults import fault_of
from gateway.core.breaker import ANY
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFigures
from gateway.core.types import BackendCall, BackendEvent, Place, TensorPayload

_Response = TypeVar("_Response")

PROBE_TIMEOUT_US: Final = 1_000_000
STATISTICS_TIMEOUT_US: Final = 2_000_000

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # gRPC's own back-off keeps a restarted Triton away for 3 s; with these it was back in 0.14 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Triton counts pings that come more often than every 300 s as strikes and hangs up. The time-out also becomes
    # TCP_USER_TIMEOUT (gRFC A18), which is what finds a peer that vanished: the probe writes every second.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),  # Triton's own answers are bounded by protobuf's 2 GiB
    ("grpc.enable_http_proxy", 0),  # where a request goes is in the configuration, not in the environment
    ("grpc.enable_retries", 0),  # `core.attempts` decides about attempts
)


class TritonBackend:
    """Tensor calls over gRPC, which, unlike Triton's HTTP, carries a cancellation to the server.

    Args:
        name: as the configuration calls it.
        url: `host:port` or `unix:/path`. One channel is enough for one event loop (2 and 4 were no faster).
    """

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self._channel: grpc.aio.Channel | None = None
        self._stub_of_channel: pb_grpc.GRPCInferenceServiceStub | None = None

    async def infer(self, call: BackendCall, *, timeout_us: int) -> AsyncGenerator[BackendEvent, None]:
        """Exactly one `Tensors`. Cancelling the wait cancels the call at the server."""
        payload = call.payload
        if not isinstance(payload, TensorPayload):
            raise BackendError(Fault(kind=FaultKind.UNSUPPORTED, message="a chat call to a tensor backend"))
        request = triton_codec.encode(call, payload)
        response = await _answer(self._stub().ModelInfer(request, timeout=timeout_us / 1e6))
        yield triton_codec.decode(response, payload.outputs)

    def replicas(self) -> Sequence[str]:
        """One server."""
        return ()

    async def probe(self, place: Place) -> None:
        """ModelReady: false while a model loads, and for one that is not there."""
        if place.model == ANY:
            await _answer(self._stub().ServerLive(pb.ServerLiveRequest(), timeout=PROBE_TIMEOUT_US / 1e6))
            return
        request = pb.ModelReadyRequest(name=place.model, version=place.version)
        response = await _answer(self._stub().ModelReady(request, timeout=PROBE_TIMEOUT_US / 1e6))
        if not response.ready:
            raise BackendError(Fault(kind=FaultKind.UNAVAILABLE, message=f"model '{place.model}' is not ready"))

    async def figures(self) -> Sequence[ModelFigures]:
        """The server's own counters."""
        request = pb.ModelStatisticsRequest()
        response = await _answer(self._stub().ModelStatistics(request, timeout=STATISTICS_TIMEOUT_US / 1e6))
        return triton_codec.figures(response, replica="")

    async def close(self) -> None:
        """Close the connections; calls in flight end as UNAVAILABLE."""
        channel, self._channel, self._stub_of_channel = self._channel, None, None
        if channel is not None:
            await channel.close()

    def _stub(self) -> pb_grpc.GRPCInferenceServiceStub:
        """The stub; its channel is made at the first call, because it belongs to the running loop."""
        if self._stub_of_channel is None:
            self._channel = grpc.aio.insecure_channel(self.url, options=CHANNEL_OPTIONS)
            self._stub_of_channel = pb_grpc.GRPCInferenceServiceStub(self._channel)
        return self._stub_of_channel


async def _answer(call: Awaitable[_Response]) -> _Response:
    """The call's response; every other end but our own cancellation as `BackendError`."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise BackendError(fault_of(error.code().name, error.details() or "")) from error
    except asyncio.CancelledError as error:
        # A channel that closes cancels its calls by the same exception as a cancelled task: tell them apart.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BackendError(Fault(kind=FaultKind.UNAVAILABLE, message="the connection was closed")) from error
