"""Triton, or anything else that speaks the Open Inference Protocol over gRPC."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping
from typing import Final, TypeVar

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from gateway.backends import triton_codec
from gateway.backends.statistics import ModelStatistics, batch_sizes
from gateway.backends.triton_faults import fault_of
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.types import BackendCall, BackendEvent, TensorPayload

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
    ("grpc.use_local_subchannel_pool", 1),  # else several channels to one address share one connection
)


class TritonBackend:
    """Tensor calls over gRPC, which, unlike Triton's HTTP, carries a cancellation to the server.

    Args:
        name: as the configuration calls it.
        url: `host:port` or `unix:/path`.
        channels: connections to use in turn. One is enough for one event loop (measured).
    """

    def __init__(self, name: str, url: str, *, channels: int = 1) -> None:
        if channels < 1:
            raise ValueError("a Triton backend needs at least one channel")
        self.name = name
        self.url = url
        self._channel_count = channels
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: Iterator[pb_grpc.GRPCInferenceServiceStub] | None = None

    async def infer(self, call: BackendCall, *, timeout_us: int) -> AsyncGenerator[BackendEvent, None]:
        """Exactly one `Tensors`. Cancelling the wait cancels the call at the server."""
        payload = call.payload
        if not isinstance(payload, TensorPayload):
            raise BackendError(Fault(kind=FaultKind.UNSUPPORTED, message="a chat call to a tensor backend"))
        request = triton_codec.encode(call, payload)
        response = await _answer(self._stub().ModelInfer(request, timeout=timeout_us / 1e6))
        yield triton_codec.decode(response, payload.outputs)

    async def probe(self, model: str, version: str) -> None:
        """ModelReady: false while a model loads, and for one that is not there."""
        request = pb.ModelReadyRequest(name=model, version=version)
        response = await _answer(self._stub().ModelReady(request, timeout=PROBE_TIMEOUT_US / 1e6))
        if not response.ready:
            raise BackendError(Fault(kind=FaultKind.UNAVAILABLE, message=f"model '{model}' is not ready"))

    async def statistics(self, model: str = "") -> tuple[ModelStatistics, ...]:
        """Counters of every served version of `model`, or of all models."""
        request = pb.ModelStatisticsRequest(name=model)
        response = await _answer(self._stub().ModelStatistics(request, timeout=STATISTICS_TIMEOUT_US / 1e6))
        return triton_codec.statistics(response)

    async def batch_sizes(self) -> Mapping[str, Mapping[int, int]]:
        """Executions so far by model and batch size in rows."""
        return batch_sizes(await self.statistics())

    async def close(self) -> None:
        """Close the connections; calls in flight end as UNAVAILABLE."""
        channels, self._channels, self._stubs = self._channels, [], None
        for channel in channels:
            await channel.close()

    def _stub(self) -> pb_grpc.GRPCInferenceServiceStub:
        """The next stub; channels are made at the first call, because they belong to the running loop."""
        if self._stubs is None:
            self._channels = [
                grpc.aio.insecure_channel(self.url, options=CHANNEL_OPTIONS) for _ in range(self._channel_count)
            ]
            self._stubs = itertools.cycle([pb_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels])
        return next(self._stubs)


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
