"""What the control plane needs from the world, as `ports` has it for the data plane."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Final, Protocol

from gateway.core.keys import ApiKey
from gateway.core.models import Outcomes
from gateway.core.rules import Rule, RuleSet
from gateway.core.switches import Switch, Switches
from gateway.core.watching.figures import Figures
from gateway.ports import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What one worker reports of itself.

    `state` is `serving`, or `refused` where the stored set is not taken.
    `revision` is the set in force there; `detail` says why a set was refused; `started` is in Unix seconds.
    `switches` is the revision of the switches in force there, `report` what `gateway.reports` says of the worker.
    """

    id: str
    pid: int
    revision: int
    started: int
    state: str
    detail: str = ""
    switches: int = 0
    report: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Who changes the rules, how and why: kept with the revision that comes of it.

    Attributes:
        action: `put`, `switch` (one rule on or off), `weights`, `rollback`, `rollout`, `guard`, `deploy`, `seed`.
        is_automatic: the control plane makes it by itself to take something back: it is made while changes are frozen.
    """

    by: str = ""
    action: str = "put"
    note: str = ""
    is_automatic: bool = False


NO_NAME: Final = Change()


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A rule set as it is kept; `rules` is None where only its heading was asked for. `at_ms` in Unix milliseconds."""

    revision: int
    at_ms: int
    change: Change
    count: int
    rules: tuple[Rule, ...] | None = None


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

    async def put(
        self, rules: Sequence[Rule], *, expected_revision: int, at_ms: int = 0, change: Change = NO_NAME
    ) -> int:
        """Replace the set of `expected_revision`; returns the new revision, which is kept with `change`.

        All workers put it in force at the same instant, `at_ms` (Unix milliseconds, seconds ahead at most), or, with 0,
        each as soon as it hears of it.
        Raises `StaleRevision` when that is not the newest, `Frozen` while a switch says so; one atomic step.
        """
        ...

    async def revisions(self, *, before: int = 0, size: int = 50) -> list[Revision]:
        """The headings of those that are kept, the newest first; those before revision `before`, unless that is 0."""
        ...

    async def revision(self, number: int) -> Revision:
        """One of them, with its rules. Raises `UnknownRevision`."""
        ...

    async def switches(self) -> Switches:
        """All switches that have not ended."""
        ...

    async def add_switch(self, switch: Switch) -> int:
        """Set it; returns the new revision of the switches. Raises `TooManySwitches`."""
        ...

    async def end_switch(self, switch_id: str) -> tuple[Switch, int]:
        """Take it away before its time; returns what it was, and the new revision. Raises `UnknownSwitch`."""
        ...

    async def workers(self) -> list[WorkerState]:
        """The live data-plane workers."""
        ...

    async def applied(self, revision: int, timeout_s: float = 1.0, *, of_switches: bool = False) -> Applied:
        """Wait until all live workers run `revision` or a later one, or hold it for its instant; never raises.

        `of_switches`: it is one of the switches.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Who did what. Nothing in it is a secret.

    Attributes:
        id: gives the order; empty before it is written.
        at_ms: Unix milliseconds.
        action: such as `rules.put`, `switch.add`, `key.create`, `session.begin`, `session.refused`.
        outcome: `ok`, or the error's code.
        address: from where.
    """

    actor: str
    role: str
    action: str
    at_ms: int
    outcome: str = "ok"
    target: str = ""
    before: Any = None
    after: Any = None
    reason: str = ""
    address: str = ""
    id: str = ""


class AuditLog(Protocol):
    """What was done on the control plane, append-only. Raises `RulesUnavailable`."""

    async def add(self, entry: AuditEntry) -> None:
        """Write it at the end."""
        ...

    async def page(self, *, before: str = "", size: int = 100) -> tuple[list[AuditEntry], str | None]:
        """The newest first, those before the id `before`; and what to name for those after them."""
        ...

    def all(self) -> AsyncIterator[AuditEntry]:
        """Every entry, the oldest first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A log-in of the console.

    Attributes:
        csrf: has to come with every change that is made by its cookie.
        key: of which admin key it is, by a mark that another secret of the same id would not have; empty: of none.
    """

    actor: str
    role: str
    csrf: str = field(repr=False)
    expires_s: int
    key: str = ""


class Sessions(Protocol):
    """The console's log-ins, which all control planes know. Raises `RulesUnavailable`."""

    async def begin(self, session: Session) -> str:
        """Keep it until it expires; returns what the cookie holds, which is kept nowhere itself."""
        ...

    async def find(self, cookie: str) -> Session | None:
        """The one that a cookie is for; None for none, or one that is over."""
        ...

    async def end(self, cookie: str) -> None:
        """Forget it."""
        ...


class FigureSource(Protocol):
    """What became of requests lately, as all workers counted it. Raises `RulesUnavailable`."""

    async def read(self, since_s: int, until_s: int) -> Mapping[int, Figures]:
        """By the Unix second in which the requests ended, from `since_s` to `until_s`, the last not included.

        Of what is older than two minutes five seconds may be one, under the first of them.
        """
        ...


class RequestLog(Protocol):
    """The last requests of all workers. Raises `RulesUnavailable`.

    Documents are those of `core.watching.request_documents`.
    """

    async def page(self, *, before: str = "", size: int = 100) -> tuple[list[JsonObject], str | None]:
        """The newest first, those before the cursor `before`; and the cursor for those after them."""
        ...

    async def find(self, request_id: str) -> JsonObject | None:
        """The newest of that id, or of the only one that begins so; a beginning has 8 characters at least."""
        ...


class ShadowSource(Protocol):
    """What comparisons with shadows came to, by rule. Raises `RulesUnavailable`.

    Documents are those of `core.shadows.shadow_reports`.
    """

    async def read(self) -> Sequence[JsonObject]:
        """One for each rule and pair of places."""
        ...

    async def forget(self, rule: str) -> None:
        """Begin anew."""
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
