"""A backend that plays a script: for component tests of everything above the adapters."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.models import ModelFigures
from gateway.core.types import BackendCall, BackendEvent, Place


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
