"""Triton, or anything else that speaks the Open Inference Protocol over gRPC: one server or several equal ones."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, Self

from tritonclient.grpc import service_pb2 as pb

from gateway.backends.triton import documents as triton_documents
from gateway.backends.triton.addresses import REFRESH_S, Addresses, Resolve
from gateway.backends.triton.channels import Compression, OpenChannel, opener, plain
from gateway.backends.triton.replica import TritonReplica
from gateway.backends.triton.shared_memory_region import is_same_host
from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFacts, ModelFigures
from gateway.core.types import ANY, BackendCall, BackendEvent, Place, TensorPayload
from gateway.ports import JsonObject
from gateway.settings import TlsSettings

PROBE_TIMEOUT_US: Final = 1_000_000
DESCRIBE_TIMEOUT_US: Final = 2_000_000
LOAD_TIMEOUT_US: Final = 600_000_000  # a large model's weights; a load that never returns is Triton's, too


class TritonBackend:
    """Tensor calls over gRPC, which, unlike Triton's HTTP, carries a cancellation to the server.

    Args:
        name: as the configuration calls it.
        url: `host:port[,host:port...]` or `unix:/path`. A name that stands for several addresses stands for several
            servers. It is looked up every 5 s: a server that has left DNS takes no new requests, a new one does.
        channel: how a server is connected to.
        resolve: how names are looked up.

    Raises ValueError for a url that is none.
    """

    speaks: Final = "tensors"
    is_probed: Final = True

    def __init__(self, name: str, url: str, *, channel: OpenChannel = plain, resolve: Resolve | None = None) -> None:
        self.name = name
        self.url = url
        self._open_channel = channel
        self._addresses = Addresses(url, resolve=resolve)
        self._names: tuple[str, ...] = ()
        self._replicas: dict[str, TritonReplica] = {}
        self._leaving: list[TritonReplica] = []
        self._watching: asyncio.Task[None] | None = None
        self._first_look: asyncio.Task[None] | None = None
        self._is_closed = False
        self.on_death: Callable[[Place, Fault], None] | None = None  # told where a model's process was found dead

    @classmethod
    async def open(
        cls, name: str, url: str, *, compression: Compression = "none", tls: TlsSettings | None = None
    ) -> Self:
        """The backend with its names looked up once, so that the first request finds its servers.

        Raises `ValueError` for a url or for certificates that cannot be used.
        """
        backend = cls(name, url, channel=opener(compression, tls))
        await backend._look()
        return backend

    def engine_load(self, replica: str) -> None:  # noqa: ARG002 - the port's
        """Nothing: it is no LLM server."""
        return

    def replicas(self) -> Sequence[str]:
        """Its servers' addresses; empty for a single Unix socket, and while no name could be looked up."""
        return self._names

    async def infer(self, call: BackendCall, *, timeout_us: int) -> AsyncGenerator[BackendEvent, None]:
        """One `Tensors`, or those of a stream. Cancelling the wait cancels the call at the server."""
        payload = call.payload
        if not isinstance(payload, TensorPayload):
            raise BackendError(Fault(kind=FaultKind.UNSUPPORTED, message="a chat call to a tensor backend"))
        replica = self._replicas.get(call.replica) or await self._replica(call.replica)
        if not payload.stream:
            yield await replica.infer(call, payload, timeout_us=timeout_us)
            return
        async with aclosing(replica.stream(call, payload, timeout_us=timeout_us)) as answers:
            async for answer in answers:
                yield answer

    async def probe(self, place: Place) -> None:
        """ModelReady: false while a model loads, and for one that is not there."""
        if place.model == ANY:
            await self._ask(place.replica, pb.ServerLiveRequest(), "ServerLive", timeout_us=PROBE_TIMEOUT_US)
            return
        request = pb.ModelReadyRequest(name=place.model, version=place.version)
        response = await self._ask(place.replica, request, "ModelReady", timeout_us=PROBE_TIMEOUT_US)
        if not response.ready:
            raise BackendError(Fault(kind=FaultKind.UNAVAILABLE, message=f"model '{place.model}' is not ready"))

    async def figures(self) -> Sequence[ModelFigures]:
        """The servers' own counters, of those that answer; raises `BackendError` where none does."""
        request = pb.ModelStatisticsRequest()
        names = self._names or ("",)
        told = await asyncio.gather(
            *(self._ask(name, request, "ModelStatistics") for name in names), return_exceptions=True
        )
        failed = [one for one in told if isinstance(one, BaseException)]
        for one in failed:
            if len(failed) == len(told) or not isinstance(one, BackendError):
                raise one
        return [
            figures
            for name, response in zip(names, told, strict=True)
            if not isinstance(response, BaseException)
            for figures in triton_documents.figures(response, replica=name)
        ]

    def died(self, place: Place, fault: Fault) -> None:
        """Somebody else has found a model's process dead there: the calls that wait for it end at once."""
        replica = self._replicas.get(place.replica)
        if replica is not None:
            replica.abort(fault, place.model)

    def _died(self, replica: str, model: str, fault: Fault) -> None:
        if self.on_death is not None:
            self.on_death(Place(backend=self.name, model=model, replica=replica), fault)

    async def close(self) -> None:
        """Close the connections; calls in flight end as UNAVAILABLE."""
        self._is_closed = True
        for task in (self._watching, self._first_look):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        replicas = (*self._replicas.values(), *self._leaving)
        self._names, self._replicas, self._leaving = (), {}, []
        await asyncio.gather(*(replica.close() for replica in replicas))

    # --- as a model server ------------------------------------------------------------------------

    async def facts(self, place: Place) -> ModelFacts:
        """See `ports.ModelServer`; what is 30 s old is asked for anew."""
        return await (await self._replica(place.replica)).facts(place.model, place.version)

    async def server_metadata(self, replica: str) -> JsonObject:
        """Name, version and extensions of the server."""
        return triton_documents.document(await self._ask(replica, pb.ServerMetadataRequest(), "ServerMetadata"))

    async def metadata(self, place: Place) -> JsonObject:
        """A model's inputs and outputs."""
        request = pb.ModelMetadataRequest(name=place.model, version=place.version)
        return triton_documents.document(await self._ask(place.replica, request, "ModelMetadata"))

    async def config(self, place: Place) -> JsonObject:
        """A model's whole configuration."""
        request = pb.ModelConfigRequest(name=place.model, version=place.version)
        return triton_documents.document((await self._ask(place.replica, request, "ModelConfig")).config)

    async def statistics(self, place: Place) -> JsonObject:
        """A model's counters; of all models with an empty model."""
        request = pb.ModelStatisticsRequest(name=place.model, version=place.version)
        return triton_documents.document(await self._ask(place.replica, request, "ModelStatistics"))

    async def index(self, replica: str, *, ready_only: bool = False) -> list[JsonObject]:
        """The models of the repository, and the state of each version."""
        request = pb.RepositoryIndexRequest(ready=ready_only)
        return list(triton_documents.index(await self._ask(replica, request, "RepositoryIndex")))

    async def load(
        self, model: str, *, replica: str, config: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load a model, or load it anew; returns when it is ready, after minutes maybe."""
        request = triton_documents.load_request(model, config=config, files=files)
        await self._change(replica, request, "RepositoryModelLoad")

    async def unload(self, model: str, *, replica: str, unload_dependents: bool = False) -> None:
        """Unload a model; returns when no new request is taken."""
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        if unload_dependents:
            request.parameters["unload_dependents"].bool_param = True
        await self._change(replica, request, "RepositoryModelUnload")

    # --- inside -----------------------------------------------------------------------------------

    async def _change(self, replica: str, request: Any, method: str) -> None:
        server = await self._replica(replica)
        try:
            await server.ask(request, method, timeout_us=LOAD_TIMEOUT_US)
        finally:
            server.forget_facts()

    async def _ask(self, replica: str, request: Any, method: str, *, timeout_us: int = DESCRIBE_TIMEOUT_US) -> Any:
        return await (await self._replica(replica)).ask(request, method, timeout_us=timeout_us)

    async def _replica(self, name: str) -> TritonReplica:
        """The server of that name; any for no name. Raises `BackendError` where it is gone, or none is known."""
        if not self._replicas and not self._is_closed:
            await self._look()
        found = self._replicas.get(name)
        if found is None and not name and self._replicas:
            found = next(iter(self._replicas.values()))
        if found is None:
            gone = f"'{name}' is no server of this backend" if name else f"no address is known for '{self.url}'"
            raise BackendError(Fault(kind=FaultKind.UNAVAILABLE, message=gone, is_server=True))
        return found

    async def _look(self) -> None:
        """Look names up now, once for all who wait, and from here on again and again."""
        if self._addresses.is_fixed:
            self._adopt()
            return
        if self._first_look is None or self._first_look.done():
            self._first_look = asyncio.create_task(self._refresh(), name=f"addresses of {self.name}")
        await asyncio.wait({self._first_look})
        if self._watching is None and not self._is_closed:
            self._watching = asyncio.create_task(self._watch(), name=f"addresses of {self.name}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await self._refresh()

    async def _refresh(self) -> None:
        await self._addresses.refresh()
        self._adopt()

    def _adopt(self) -> None:
        """Servers come and go with the addresses that are known."""
        is_alone = self._addresses.is_one_socket
        known = {"" if is_alone else target: target for target in self._addresses.known()}
        for name in [name for name in self._replicas if name not in known]:
            leaving = self._replicas.pop(name)
            leaving.retire()
            self._leaving = [one for one in self._leaving if not one.is_closed] + [leaving]
        for name, target in known.items():
            if name not in self._replicas:
                channel = self._open_channel(target, self._addresses.host_of(target))
                replica = TritonReplica(name, channel, is_on_this_host=is_same_host(target))
                replica.on_death = functools.partial(self._died, name)
                self._replicas[name] = replica
        self._names = () if is_alone else tuple(self._replicas)
