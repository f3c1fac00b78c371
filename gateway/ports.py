"""What the pipeline needs from the world, each stated by its user. Adapters fit themselves to these."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.core.breaker import Breaker
from gateway.core.rate_limit import Charge
from gateway.core.record import RequestRecord
from gateway.core.rules import Rule, RuleSet
from gateway.core.types import BackendCall, BackendEvent, Place, Verdict


class Clock(Protocol):
    """A monotonic clock in integer microseconds."""

    def __call__(self) -> int:
        """The instant now."""
        ...


class Backend(Protocol):
    """A place that can answer."""

    def infer(self, call: BackendCall, *, timeout_us: int) -> AsyncGenerator[BackendEvent, None]:
        """Answer as events; unary answers are a stream of one.

        Raises `BackendError` and nothing else; closing the iterator (or cancelling) ends the work at the
        backend too. `timeout_us` bounds the whole call.
        """
        ...

    async def probe(self, model: str, version: str) -> None:
        """Return when `model` can answer now; raise `BackendError` otherwise. Cheap; called every second."""
        ...

    async def batch_sizes(self) -> Mapping[str, Mapping[int, int]]:
        """Executions so far by model and batch size in rows; empty where the backend does not tell.

        Raises `BackendError` when it cannot be asked.
        """
        ...

    async def close(self) -> None:
        """Let go of connections; nothing may be called after."""
        ...


class Limiter(Protocol):
    """Takes charges against shared limits, all or none."""

    async def charge(self, charges: Sequence[Charge]) -> Verdict:
        """One atomic step; never raises for an unreachable store (the verdict is then `degraded`)."""
        ...


class RuleSource(Protocol):
    """The routing rules in force."""

    def current(self) -> RuleSet:
        """The newest valid rule set; never waits."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What one worker reports of itself.

    `state` is `serving`, or `refused` where the stored set is not taken.
    `revision` is the set in force there; `detail` says why a set was refused; `started` is in Unix seconds.
    """

    id: str
    pid: int
    revision: int
    started: int
    state: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """How far a revision has got: `workers` of `of` live workers run it, seen after `ms` milliseconds."""

    workers: int
    of: int
    ms: int


class RuleStore(Protocol):
    """The shared routing rules, for the control plane. Raises `RulesUnavailable` when the store cannot answer."""

    async def get(self) -> RuleSet:
        """The newest set; revision 0 and no rules where none was ever stored."""
        ...

    async def put(self, rules: Sequence[Rule], *, expected_revision: int) -> int:
        """Replace the set of `expected_revision`; returns the new revision.

        Raises `StaleRevision` when that is not the newest.
        """
        ...

    async def workers(self) -> list[WorkerState]:
        """The live data-plane workers."""
        ...

    async def applied(self, revision: int, timeout_s: float = 1.0) -> Applied:
        """Wait until all live workers run `revision` or a later one; never raises."""
        ...


class Observer(Protocol):
    """Hears of requests. A new kind of log or metric is another observer."""

    def began(self, task: str) -> None:
        """A request entered the walk."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """It left it, one way or another; called exactly once for each `began`."""
        ...

    def refused(self, record: RequestRecord) -> None:
        """A request was refused at the door, before the walk."""
        ...


class HealthObserver(Protocol):
    """Hears, about once a second, how the backends are."""

    def health(self, breakers: Mapping[Place, Breaker], revision: int) -> None:
        """Every breaker, and the revision of the rules in force."""
        ...

    def batch_sizes(self, backend: str, counts: Mapping[str, Mapping[int, int]]) -> None:
        """What `Backend.batch_sizes` told."""
        ...
