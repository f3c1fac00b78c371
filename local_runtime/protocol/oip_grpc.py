"""The Open Inference Protocol over gRPC: Triton's own clients work against it.

A client that cancels, or whose deadline passes, takes its request out of the queue.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2

from local_runtime.errors import ErrorCode, InferenceError
from local_runtime.protocol import oip_describe
from local_runtime.protocol.answering import INTERNAL_TEXT, infer_once, server_version
from local_runtime.protocol.error_texts import safe_text
from local_runtime.protocol.oip_codec import (
    decode_load,
    decode_request,
    decode_unload,
    encode_answer,
    encode_metadata,
    encode_statistics,
)
from local_runtime.protocol.oip_stream import UNREADABLE_TEXT, serve_stream
from local_runtime.runtime import LocalRuntime

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Call: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
_log = logging.getLogger(__name__)
_SERVICE: Any = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]

_STATUS: Mapping[ErrorCode, grpc.StatusCode] = MappingProxyType(
    {
        ErrorCode.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
        ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
        ErrorCode.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
        ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
        ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
        ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
        ErrorCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
        ErrorCode.UNKNOWN: grpc.StatusCode.UNKNOWN,
        ErrorCode.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
_NOT_OFFERED: Mapping[str, str] = MappingProxyType(
    {
        "SystemSharedMemoryRegister": "shared memory is not offered by this server: send tensors in the request",
        "SystemSharedMemoryUnregister": "shared memory is not offered by this server",
        "CudaSharedMemoryStatus": "CUDA shared memory is not offered by this server",
        "CudaSharedMemoryRegister": "CUDA shared memory is not offered by this server: send tensors in the request",
        "CudaSharedMemoryUnregister": "CUDA shared memory is not offered by this server",
        "TraceSetting": "tracing is not offered by this server",
        "LogSettings": "log settings are not offered by this server: start it with --log-level",
    }
)
_DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
# Tensors are as large as they are (Triton's own limit is 2 GiB, protobuf's). Reuse of a port that is taken would
# split requests between two servers.
_SERVER_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),
)
# grpc.health.v1.HealthCheckResponse with status SERVING (1) and NOT_SERVING (2): field 1, varint.
_SERVING = b"\x08\x01"
_NOT_SERVING = b"\x08\x02"


class InferenceService:
    """Answers the protocol's calls from one runtime."""

    def __init__(self, runtime: LocalRuntime) -> None:
        self._runtime = runtime
        self._readers: set[asyncio.Task[None]] = set()

    def calls(self) -> Mapping[str, Call]:
        """The protocol's calls that have one answer, by name.

        Each takes the message, or None for one that could not be read, and of its context asks for `time_remaining()`;
        every error is given to the context's `abort(code, text)`, which has to raise.
        """
        calls: Mapping[str, Call] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "ModelInfer": self._model_infer,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "SystemSharedMemoryStatus": self._no_regions,
            **{name: _not_offered(text) for name, text in _NOT_OFFERED.items()},
        }
        return {name: _answering(call) for name, call in calls.items()}

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """The calls for a server: the protocol's and the standard health check."""
        methods = {name: _unary(name, call) for name, call in self.calls().items()}
        methods["ModelStreamInfer"] = _stream("ModelStreamInfer", self._model_stream_infer)
        health: dict[str, Any] = {"Check": grpc.unary_unary_rpc_method_handler(self._health)}
        return (
            grpc.method_handlers_generic_handler(_SERVICE.full_name, methods),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", health),
        )

    def stop_reading(self) -> None:
        """Take nothing more from open streams; they end when what they have asked for is answered."""
        for reader in self._readers:
            reader.cancel()

    async def _server_live(self, _request: Any, _context: Context) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    async def _server_ready(self, _request: Any, _context: Context) -> Any:
        """Strict readiness, Triton's default: every model that was to be loaded is ready."""
        return service_pb2.ServerReadyResponse(ready=self._runtime.is_server_ready())

    async def _health(self, _request: bytes, _context: Context) -> bytes:
        """Of the whole server, whichever service is asked for."""
        return _SERVING if self._runtime.is_server_ready() else _NOT_SERVING

    async def _server_metadata(self, _request: Any, _context: Context) -> Any:
        return service_pb2.ServerMetadataResponse(**oip_describe.server(server_version()))

    async def _model_ready(self, request: Any, _context: Context) -> Any:
        return service_pb2.ModelReadyResponse(ready=self._runtime.is_ready(request.name, request.version))

    async def _model_metadata(self, request: Any, _context: Context) -> Any:
        return encode_metadata(self._runtime.model_metadata(request.name, request.version))

    async def _model_config(self, request: Any, _context: Context) -> Any:
        config = self._runtime.model_config(request.name, request.version)
        return service_pb2.ModelConfigResponse(config=config)

    async def _model_statistics(self, request: Any, _context: Context) -> Any:
        """Of one model, or of all if none is named."""
        return encode_statistics(self._runtime.statistics(request.name, request.version))

    async def _model_infer(self, request: Any, context: Context) -> Any:
        asked = decode_request(request, timeout_us=_timeout_us(context))
        answer = await infer_once(self._runtime, asked.request, counts=asked.classes, decoupled=_DECOUPLED)
        return encode_answer(answer, request_id=request.id)

    async def _model_stream_infer(self, requests: Any, context: Context) -> None:
        error = await serve_stream(self._runtime, requests, context, readers=self._readers)
        if error is not None:
            await context.abort(_STATUS[error.code], safe_text(error.message))

    async def _repository_index(self, request: Any, _context: Context) -> Any:
        statuses = self._runtime.index(ready_only=request.ready)
        return service_pb2.RepositoryIndexResponse(models=oip_describe.index(statuses))

    async def _load(self, request: Any, _context: Context) -> Any:
        wanted = decode_load(request)
        await self._runtime.load(wanted.model, config=wanted.config, files=wanted.files or None)
        return service_pb2.RepositoryModelLoadResponse()

    async def _unload(self, request: Any, _context: Context) -> Any:
        await self._runtime.unload(request.model_name, unload_dependents=decode_unload(request))
        return service_pb2.RepositoryModelUnloadResponse()

    async def _no_regions(self, _request: Any, _context: Context) -> Any:
        return service_pb2.SystemSharedMemoryStatusResponse()


class GrpcServer:
    """A running server. `port` is the one that was bound (0 for a Unix socket)."""

    def __init__(self, server: "grpc.aio.Server", service: InferenceService, *, port: int) -> None:
        self._server = server
        self._service = service
        self.port = port

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new calls, finish those in flight for at most `grace_s`, then cut them off."""
        stopping = asyncio.ensure_future(self._server.stop(grace_s))
        await asyncio.sleep(0)  # let it refuse new calls first, or a stream could still come in behind us
        self._service.stop_reading()
        await stopping


async def start_server(runtime: LocalRuntime, address: str) -> GrpcServer:
    """A running server on `HOST:PORT` or `unix:/path`. Raises OSError if the address cannot be bound."""
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    service = InferenceService(runtime)
    server.add_generic_rpc_handlers(service.handlers())
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}") from error
    await server.start()
    return GrpcServer(server, service, port=0 if address.startswith("unix:") else port)


def reader(name: str) -> Callable[[bytes], Any]:
    """What makes the message of the call `name` out of bytes: None out of those that are no such message."""
    return _reader(GetMessageClass(_SERVICE.methods_by_name[name].input_type))


def _timeout_us(context: Context) -> int | None:
    """What is left of the caller's deadline, in microseconds; None without one."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else int(remaining_s * 1_000_000)


def _answering(call: Call) -> Call:
    """The call with its errors turned into gRPC status codes."""

    async def answer(request: Any, context: Context) -> Any:
        if request is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, UNREADABLE_TEXT)
        try:
            return await call(request, context)
        except InferenceError as error:
            await context.abort(_STATUS[error.code], safe_text(error.message))
        except Exception:  # noqa: BLE001 - the boundary of a request: logged, and the client gets an answer
            _log.exception("a request failed in the gRPC server")
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_TEXT)

    return answer


def _unary(name: str, call: Call) -> Any:
    """A call with its messages."""
    output = GetMessageClass(_SERVICE.methods_by_name[name].output_type)
    return grpc.unary_unary_rpc_method_handler(
        call, request_deserializer=reader(name), response_serializer=output.SerializeToString
    )


def _stream(name: str, call: Call) -> Any:
    return grpc.stream_stream_rpc_method_handler(
        call,
        request_deserializer=reader(name),
        response_serializer=None,  # answers come as bytes, so that one which cannot be encoded fails alone
    )


def _reader(kind: Any) -> Callable[[bytes], Any]:
    """Messages out of bytes; None for what is no such message, which gRPC itself would log as a fault of the server."""

    def read(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError:
            return None

    return read


def _not_offered(text: str) -> Call:
    async def refuse(_request: Any, _context: Context) -> Any:
        raise InferenceError(ErrorCode.UNSUPPORTED, text)

    return refuse
