"""The Open Inference Protocol over gRPC: Triton's own clients work against it.

Only unary inference; every other call of the service answers UNIMPLEMENTED. A client that cancels, or whose
deadline passes, takes its request out of the queue.
"""

import importlib.metadata
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.messages import ModelState
from local_runtime.protocol.oip_codec import decode_request, encode_answer, encode_metadata, encode_statistics
from local_runtime.runtime import LocalRuntime

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Call: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
_SERVICE: Any = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]

_STATUS: Mapping[ErrorCode, grpc.StatusCode] = MappingProxyType(
    {
        ErrorCode.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
        ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
        ErrorCode.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
        ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
        ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
        ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
        ErrorCode.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
# Tensors are as large as they are (Triton's own limit is 2 GiB, protobuf's). Reuse of a port that is taken would
# split requests between two servers.
_SERVER_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),
)


class InferenceService:
    """Answers the protocol's calls from one runtime."""

    def __init__(self, runtime: LocalRuntime) -> None:
        self._runtime = runtime

    def handler(self) -> grpc.GenericRpcHandler:
        """The calls that are served, for a server; others get UNIMPLEMENTED from gRPC itself."""
        calls: Mapping[str, _Call] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "ModelInfer": self._model_infer,
            "RepositoryIndex": self._repository_index,
        }
        return grpc.method_handlers_generic_handler(
            _SERVICE.full_name, {name: _unary(name, call) for name, call in calls.items()}
        )

    async def _server_live(self, _request: Any, _context: Context) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    async def _server_ready(self, _request: Any, _context: Context) -> Any:
        """Strict readiness, Triton's default: every model that was to be loaded is ready."""
        states = {status.state for status in self._runtime.index()}
        return service_pb2.ServerReadyResponse(ready=ModelState.UNAVAILABLE not in states)

    async def _server_metadata(self, _request: Any, _context: Context) -> Any:
        return service_pb2.ServerMetadataResponse(
            name="local_runtime", version=_version(), extensions=["model_configuration", "statistics"]
        )

    async def _model_ready(self, request: Any, _context: Context) -> Any:
        is_ready = self._runtime.is_ready(request.name, request.version)
        return service_pb2.ModelReadyResponse(ready=is_ready)

    async def _model_metadata(self, request: Any, _context: Context) -> Any:
        return encode_metadata(self._runtime.model_metadata(request.name, request.version))

    async def _model_config(self, request: Any, _context: Context) -> Any:
        config = self._runtime.model_config(request.name, request.version)
        return service_pb2.ModelConfigResponse(config=config)

    async def _model_statistics(self, request: Any, _context: Context) -> Any:
        """Of one model, or of all if none is named."""
        if request.name:
            self._runtime.model_metadata(request.name, request.version)  # raises if it is not served
        wanted = [
            encode_statistics(statistics)
            for statistics in self._runtime.statistics()
            if request.name in ("", statistics.name)
        ]
        return service_pb2.ModelStatisticsResponse(model_stats=wanted)

    async def _model_infer(self, request: Any, context: Context) -> Any:
        remaining_s = context.time_remaining()
        timeout_us = None if remaining_s is None else int(remaining_s * 1_000_000)
        answer = await self._runtime.infer(decode_request(request, timeout_us=timeout_us))
        return encode_answer(answer, request_id=request.id)

    async def _repository_index(self, request: Any, _context: Context) -> Any:
        models = [
            service_pb2.RepositoryIndexResponse.ModelIndex(
                name=status.name, version=status.version, state=status.state.value, reason=status.reason
            )
            for status in self._runtime.index()
            if not request.ready or status.state is ModelState.READY
        ]
        return service_pb2.RepositoryIndexResponse(models=models)


async def start_server(runtime: LocalRuntime, address: str) -> "grpc.aio.Server":
    """A running server on `HOST:PORT` or `unix:/path`. Raises OSError if the address cannot be bound."""
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    server.add_generic_rpc_handlers((InferenceService(runtime).handler(),))
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}") from error
    await server.start()
    return server


def _unary(name: str, call: _Call) -> Any:
    """A call with its messages, and with its errors turned into gRPC status codes."""

    async def answer(request: Any, context: Context) -> Any:
        try:
            return await call(request, context)
        except InferenceError as error:
            await context.abort(_STATUS[error.code], error.message)

    method = _SERVICE.methods_by_name[name]
    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=GetMessageClass(method.input_type).FromString,
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


def _version() -> str:
    try:
        return importlib.metadata.version("hybrid-inference-gateway")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
