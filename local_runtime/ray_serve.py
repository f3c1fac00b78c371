"""The local runtime as a Ray Serve application: one replica is one runtime over the same model repository.

Serve's gRPC proxy takes the protocol's calls and gives each to one replica, where the code of our own gRPC server
answers it. Needs the extra `ray`; `deploy/ray/` has the configuration and says what does not work here.
"""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc
import ray
from ray import serve
from starlette.responses import PlainTextResponse
from tritonclient.grpc import service_pb2

from local_runtime.errors import ErrorCode, InferenceError, ModelLoadError
from local_runtime.protocol.oip_codec import encode_statistics
from local_runtime.protocol.oip_grpc import Context, InferenceService, reader
from local_runtime.protocol.oip_sums import summed
from local_runtime.runtime import LocalRuntime, RuntimeOptions

REPOSITORY: Final = "LOCAL_RUNTIME_REPOSITORY"  # the folder of models, as this node sees it
MODELS: Final = "LOCAL_RUNTIME_MODELS"  # names with commas between; all where it is empty
STATISTICS_TIMEOUT_S: Final = 2.0  # what a gateway waits for them
SERVICE: Final = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
STREAM: Final = "ModelStreamInfer"
_NO_STREAM = "streams are not offered by this application on Ray Serve: ask with ModelInfer"
_NO_LOADING = "replicas on Ray Serve load their models when they start: change the repository and deploy again"
_NO_HTTP = "this application answers the Open Inference Protocol over gRPC alone, at the gRPC port of Ray Serve\n"


def add_inference_service(servicer: Any, server: Any) -> None:
    """Offer the protocol's calls at a proxy: what `grpc_servicer_functions` names.

    Messages go to the replicas as the bytes that came: tritonclient's classes cannot be pickled.
    """
    methods: dict[str, Any] = {
        name: grpc.stream_stream_rpc_method_handler(getattr(servicer, name))
        if name == STREAM
        else grpc.unary_unary_rpc_method_handler(getattr(servicer, name))
        for name in SERVICE.methods_by_name
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, methods),))


class Replica:
    """One runtime with the protocol's calls as methods, which take bytes and Serve's context.

    Uses as many CPU threads as the replica has `num_cpus`. A model that cannot be loaded does not stop the others.
    Raises ModelLoadError where there is no repository.
    """

    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it, on the loop that the calls run on
        # Read when a model brings torch: threads that wait shall not take the cores from everything else.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        repository = os.environ.get(REPOSITORY)
        if not repository:
            raise ModelLoadError(f"{REPOSITORY} must name the folder of models, on every node of the Ray cluster")
        models = [name.strip() for name in os.environ.get(MODELS, "").split(",") if name.strip()]
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
        self._runtime = await LocalRuntime.open(
            Path(repository), models=models or None, options=RuntimeOptions(threads=max(1, int(cpus)))
        )
        self._calls = ReplicaService(self._runtime, _of_all_replicas).calls()
        # Serve awaits it before it ends the process. No method: garbage collection would call that, and await nothing.
        self.__del__ = self.close

    async def answer(self, name: str, request: bytes, grpc_context: Any) -> Any:
        """The message that answers the call `name`."""
        context: Any = _Context(grpc_context)
        return await self._calls[name](reader(name)(request), context)

    async def statistics_here(self, name: str, version: str) -> bytes:
        """This replica's own counters: a `ModelStatisticsResponse`."""
        return _bytes(encode_statistics(self._runtime.statistics(name, version)))

    async def ModelStreamInfer(self, _requests: Any, grpc_context: Any) -> AsyncGenerator[Any, None]:  # noqa: N802 - the protocol's name
        """Refused: UNIMPLEMENTED."""
        await _Context(grpc_context).abort(grpc.StatusCode.UNIMPLEMENTED, _NO_STREAM)
        yield  # a stream by its kind, though nothing is ever in it

    async def __call__(self, _request: Any) -> PlainTextResponse:
        """Any HTTP request that comes to the application: 501."""
        return PlainTextResponse(_NO_HTTP, status_code=501)

    async def close(self) -> None:
        """End what was accepted, and unload the models."""
        await self._runtime.close()


def _method(name: str) -> Callable[[Replica, bytes, Any], Awaitable[Any]]:
    async def method(self: Replica, request: bytes, grpc_context: Any) -> Any:
        return await self.answer(name, request, grpc_context)

    return method


for _name in SERVICE.methods_by_name:
    if _name != STREAM:
        setattr(Replica, _name, _method(_name))


class ReplicaService(InferenceService):
    """The protocol's calls where requests of one caller come to several runtimes, one each.

    Models that keep state between requests are not ready and refuse; so do load and unload, which would change one
    replica. Statistics are sums over the replicas that there are.
    """

    def __init__(self, runtime: LocalRuntime, of_all: Callable[[Any], Awaitable[list[bytes]]]) -> None:
        """`of_all` asks every replica for its answer to a `ModelStatisticsRequest`."""
        super().__init__(runtime)
        self._of_all = of_all
        self._stateful = _stateful(runtime)

    async def _model_ready(self, request: Any, context: Context) -> Any:
        if request.name in self._stateful:
            return service_pb2.ModelReadyResponse(ready=False)
        return await super()._model_ready(request, context)

    async def _model_infer(self, request: Any, context: Context) -> Any:
        if request.model_name in self._stateful:
            text = (
                f"model '{request.model_name}' keeps state between requests, which replicas of Ray Serve do not share"
            )
            raise InferenceError(ErrorCode.UNSUPPORTED, f"{text}: serve it from a single server")
        return await super()._model_infer(request, context)

    async def _load(self, _request: Any, _context: Context) -> Any:
        raise InferenceError(ErrorCode.UNSUPPORTED, _NO_LOADING)

    async def _unload(self, _request: Any, _context: Context) -> Any:
        raise InferenceError(ErrorCode.UNSUPPORTED, _NO_LOADING)

    async def _model_statistics(self, request: Any, context: Context) -> Any:
        await super()._model_statistics(request, context)  # raises for a model that is not served
        return summed(map(service_pb2.ModelStatisticsResponse.FromString, await self._of_all(request)))


class _Context:
    """What the protocol's code asks of a call's context, by one of Serve's.

    Serve tells no deadline. A caller that leaves, or whose deadline passes, has its call cancelled here.
    """

    def __init__(self, grpc_context: Any) -> None:
        self._of_serve = grpc_context

    def time_remaining(self) -> None:
        return

    async def abort(self, code: grpc.StatusCode, text: str) -> NoReturn:
        self._of_serve.set_code(code)
        self._of_serve.set_details(text)
        raise Refused(text)


class Refused(Exception):
    """Ends a call, whose code and text are in its context."""


def _stateful(runtime: LocalRuntime) -> frozenset[str]:
    """The models whose requests belong together, and the ensembles that such a model is part of."""
    configs = {status.name: runtime.model_config(status.name) for status in runtime.index(ready_only=True)}
    found = {name for name, config in configs.items() if config.HasField("sequence_batching")}
    grown = True
    while grown:
        parts = {
            name
            for name, config in configs.items()
            for step in config.ensemble_scheduling.step
            if step.model_name in found
        }
        grown = not parts <= found
        found |= parts
    return frozenset(found)


async def _of_all_replicas(request: Any) -> list[bytes]:
    here = serve.get_replica_context()
    handle = serve.get_deployment_handle(here.deployment, here.app_name)
    asked = handle.broadcast("statistics_here", request.name, request.version)
    return list(await asked.results_async(timeout_s=STATISTICS_TIMEOUT_S))


def _bytes(message: Any) -> bytes:
    return bytes(message.SerializeToString())


application: Final = serve.deployment(Replica, name="LocalRuntime").bind()
