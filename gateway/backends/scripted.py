"""A backend that plays a script: for component tests of everything above the adapters."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFacts, ModelFigures
from gateway.core.types import BackendCall, BackendEvent, EngineLoad, Place, Speech
from gateway.ports import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Wait so long before the next step; cut short by the call's timeout, as a real backend's call is."""

    us: int


Step = BackendEvent | Fault | Pause | asyncio.Event
"""An event to yield, a fault to raise, a wait for a length, or a wait for the test to say go on."""


@dataclass(slots=True, kw_only=True, eq=False)
class ScriptedCall:
    """One call as it came, and how it ended.

    `is_finished`: the script ran to its end or to its fault. `is_closed_early`: the caller closed or cancelled it
    before.
    """

    call: BackendCall
    timeout_us: int
    yielded: int = 0
    is_finished: bool = False
    is_closed_early: bool = False


class ScriptedBackend:
    """Plays one script per call, in order; the last one repeats.

    `probe_fault` may be set at any time: None means that the backend is ready. `calls` and `probes` say what was
    asked.
    """

    def __init__(self, name: str, *scripts: Sequence[Step], probe_fault: Fault | None = None) -> None:
        if not scripts:
            raise ValueError("a scripted backend needs at least one script")
        self.name = name
        self.scripts: list[Sequence[Step]] = list(scripts)
        self.probe_fault = probe_fault
        self.calls: list[ScriptedCall] = []
        self.probes: list[Place] = []
        self.replica_names: Sequence[str] = ()
        self.speaks: Speech = "tensors"
        self.is_probed = True
        self.engine_loads: dict[str, EngineLoad] = {}
        self.counts: Sequence[ModelFigures] = ()
        self.is_closed = False

    async def infer(self, call: BackendCall, *, timeout_us: int) -> AsyncGenerator[BackendEvent, None]:
        """The next script."""
        entry = ScriptedCall(call=call, timeout_us=timeout_us)
        self.calls.append(entry)
        script = self.scripts[min(len(self.calls), len(self.scripts)) - 1]
        deadline = asyncio.get_running_loop().time() + timeout_us / 1e6
        try:
            for step in script:
                if isinstance(step, Fault):
                    entry.is_finished = True
                    raise BackendError(step)
                if isinstance(step, Pause | asyncio.Event):
                    await self._wait(step, deadline, entry)
                else:
                    entry.yielded += 1
                    yield step
            entry.is_finished = True
        finally:
            entry.is_closed_early = not entry.is_finished

    def engine_load(self, replica: str) -> EngineLoad | None:
        """What the test put into `engine_loads`."""
        return self.engine_loads.get(replica)

    def replicas(self) -> Sequence[str]:
        """What the test put into `replica_names`."""
        return self.replica_names

    async def probe(self, place: Place) -> None:
        """Raise `probe_fault` if there is one."""
        self.probes.append(place)
        if self.probe_fault is not None:
            raise BackendError(self.probe_fault)

    async def figures(self) -> Sequence[ModelFigures]:
        """What the test put into `counts`."""
        return self.counts

    async def close(self) -> None:
        """Note it."""
        self.is_closed = True

    @staticmethod
    async def _wait(step: Pause | asyncio.Event, deadline: float, entry: ScriptedCall) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await (step.wait() if isinstance(step, asyncio.Event) else asyncio.sleep(step.us / 1e6))
        except TimeoutError as error:
            entry.is_finished = True
            raise BackendError(Fault(kind=FaultKind.TIMEOUT, message="scripted timeout")) from error


@dataclass(slots=True, kw_only=True)
class Told:
    """What a scripted model server tells. A `Fault` in the place of a document is raised.

    `documents` are by what is asked for: `server`, `metadata M`, `config M`, `statistics M`, `index`; with `@replica`
    behind it for one replica alone. `control_faults` are by replica.
    """

    facts: Mapping[str, ModelFacts | Fault] = field(default_factory=dict)
    documents: Mapping[str, JsonObject | list[JsonObject] | Fault] = field(default_factory=dict)
    control_faults: Mapping[str, Fault] = field(default_factory=dict)


UNKNOWN = Fault(kind=FaultKind.UNKNOWN_MODEL, message="the model is not there")


class ScriptedServer(ScriptedBackend):
    """The same with a model repository. `asked` and `changes` say what was asked for and what was to be changed."""

    def __init__(self, name: str, *scripts: Sequence[Step], told: Told | None = None) -> None:
        super().__init__(name, *scripts or ((),))
        self.told = told or Told()
        self.asked: list[str] = []
        self.changes: list[tuple[object, ...]] = []

    async def facts(self, place: Place) -> ModelFacts:
        """What the test put into `told.facts`."""
        found = self.told.facts.get(place.model, UNKNOWN)
        if isinstance(found, Fault):
            raise BackendError(found)
        return found

    async def server_metadata(self, replica: str) -> JsonObject:
        """The document `server`."""
        return self._one("server", replica)

    async def metadata(self, place: Place) -> JsonObject:
        """The document `metadata M`."""
        return self._one(f"metadata {place.model}", place.replica)

    async def config(self, place: Place) -> JsonObject:
        """The document `config M`."""
        return self._one(f"config {place.model}", place.replica)

    async def statistics(self, place: Place) -> JsonObject:
        """The document `statistics M`."""
        return self._one(f"statistics {place.model}".rstrip(), place.replica)

    async def index(self, replica: str, *, ready_only: bool = False) -> list[JsonObject]:
        """The document `index`, or `index ready`."""
        found = self._document("index ready" if ready_only else "index", replica)
        return found if isinstance(found, list) else [found]

    async def load(
        self, model: str, *, replica: str, config: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Note it, and raise the replica's fault."""
        self.changes.append(("load", model, replica, config, files))
        self._control(replica)

    async def unload(self, model: str, *, replica: str, unload_dependents: bool = False) -> None:
        """The same."""
        self.changes.append(("unload", model, replica, unload_dependents))
        self._control(replica)

    def _control(self, replica: str) -> None:
        if replica in self.told.control_faults:
            raise BackendError(self.told.control_faults[replica])

    def _one(self, name: str, replica: str) -> JsonObject:
        found = self._document(name, replica)
        if isinstance(found, list):
            raise TypeError(f"the document '{name}' is a list")
        return found

    def _document(self, name: str, replica: str) -> JsonObject | list[JsonObject]:
        self.asked.append(f"{name}@{replica}" if replica else name)
        documents = self.told.documents
        found = documents.get(f"{name}@{replica}", documents.get(name, UNKNOWN))
        if isinstance(found, Fault):
            raise BackendError(found)
        return found
