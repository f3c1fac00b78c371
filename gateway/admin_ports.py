"""What the control plane needs from the world, as `ports` has it for the data plane."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Protocol

from gateway.core.keys import ApiKey
from gateway.core.models import Outcomes
from gateway.core.rules import Rule, RuleSet
from gateway.ports import JsonObject


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

    async def put(self, rules: Sequence[Rule], *, expected_revision: int, at_ms: int = 0) -> int:
        """Replace the set of `expected_revision`; returns the new revision.

        All workers put it in force at the same instant, `at_ms` (Unix milliseconds, seconds ahead at most), or, with 0,
        each as soon as it hears of it.
        Raises `StaleRevision` when that is not the newest.
        """
        ...

    async def workers(self) -> list[WorkerState]:
        """The live data-plane workers."""
        ...

    async def applied(self, revision: int, timeout_s: float = 1.0) -> Applied:
        """Wait until all live workers run `revision` or a later one, or hold it for its instant; never raises."""
        ...


class DeployStore(Protocol):
    """What becomes of deploys, kept where a restart of the control plane does not lose it. Raises `RulesUnavailable`.

    Documents are plain JSON objects with an `id`.
    """

    async def save(self, document: JsonObject) -> None:
        """Keep it in place of the one with the same `id`; the oldest of too many are forgotten."""
        ...

    async def load(self, deploy_id: str) -> JsonObject | None:
        """The one with this id."""
        ...

    async def recent(self) -> Sequence[JsonObject]:
        """The newest first."""
        ...

    async def claim(self, model: str, owner: str) -> bool:
        """Take a model, or keep it, for a few seconds; false while another owner has it."""
        ...

    async def owner(self, model: str) -> str:
        """Who has claimed the model; empty for nobody."""
        ...

    async def release(self, model: str, owner: str) -> None:
        """Give up a claim of one's own."""
        ...


class OutcomeSource(Protocol):
    """What became of the requests to a model, as all workers saw it. Raises `RulesUnavailable`."""

    async def read(self, model: str) -> Mapping[str, Outcomes]:
        """By version; only of requests whose route named one."""
        ...


class Events(Protocol):
    """What happened to backends lately: models whose processes died, and what became of them."""

    async def read(self, limit: int) -> Sequence[JsonObject]:
        """The newest first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """What a tenant has used up of one model for one task, on one day (in UTC, the day on which requests ended).

    Attributes:
        requests: those that were answered, or used something up; `failed` of them came to no good end.
        input_tokens / output_tokens: all of them, `cached_tokens` and `reasoning_tokens` included.
        estimated_requests: those whose tokens the gateway has estimated, as the backend did not tell.
        cost_nano_usd: in 1e-9 US dollars; 0 also where no price is known.
    """

    day: date
    tenant: str
    task: str
    backend: str
    model: str
    requests: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    estimated_requests: int = 0
    cost_nano_usd: int = 0


class UsageSource(Protocol):
    """The books of what was used up, as all workers wrote them. Raises `RulesUnavailable`."""

    async def read(self, first_day: date, last_day: date) -> Sequence[UsageRow]:
        """Every row of these days, the last included, in the order of days and names."""
        ...


class KeyStore(Protocol):
    """The same for the control plane, to change them. Raises `RulesUnavailable`."""

    async def create(self, key: ApiKey) -> None:
        """Add a key. Raises `TooManyKeys`."""
        ...

    async def get(self, key_id: str) -> ApiKey:
        """One key. Raises `UnknownKey`."""
        ...

    async def page(self, *, after: str, size: int, tenant: str = "") -> tuple[list[ApiKey], str | None]:
        """At most `size` keys (of a tenant) in the order in which they were made, and what to name for those after."""
        ...

    async def change(
        self, key_id: str, change: Callable[[ApiKey], ApiKey], *, expected_revision: int | None = None
    ) -> ApiKey:
        """Put what `change` makes of it in its place; `change` may be called again where another writer was quicker.

        Raises `UnknownKey`, and `StaleRevision` where it is not the revision that was expected.
        """
        ...

    async def delete(self, key_id: str) -> None:
        """Take it away for good. Raises `UnknownKey`."""
        ...
