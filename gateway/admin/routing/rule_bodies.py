"""Bodies of the paths about rules. Rules come in as plain JSON: `core.rules.parse_rules` names the faults."""

import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, StrictBool, StrictInt

from gateway.admin.access.auditing import cleaned
from gateway.admin.routing.switch_bodies import AppliedOut, SwitchOut
from gateway.core.rules import StickyBy, Strategy
from gateway.core.rules.dry_run import Sample
from gateway.core.rules.policies import DEFAULT, Cache, Idempotency, OnStoreDown, Ordering
from gateway.core.types import Caller, InferenceRequest

MAX_NOTE = 500
MAX_SAMPLES = 10_000
MAX_WORD = 64 * 1024  # as much as all headers of a request
MAX_HEADERS = 100
MAX_COUNT = 2**53  # a whole number that every JSON reader takes
FIRST, LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9998, 1, 1, tzinfo=UTC)  # so that every time zone has it

Note = Annotated[
    str,
    Field(max_length=MAX_NOTE, description="why, on one line; instead of the header X-Change-Reason"),
    AfterValidator(cleaned),
]
_Word = Annotated[str, Field(max_length=MAX_WORD)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


# --- what comes in --------------------------------------------------------------------------------


class RulesCandidate(_Body):
    """A whole set of rules."""

    rules: list[Any] = Field(description="the rules in order of precedence; each as in the answer")
    revision: int | None = Field(None, description="the revision that they were made from, instead of If-Match")
    frozen: Any = Field(None, description="as `GET /rules` has it; it is not looked at")


class RulesIn(RulesCandidate):
    """A whole set of rules that is to be in force."""

    note: Note = ""


class RulePatch(_Body):
    """What may change in a single rule."""

    enabled: StrictBool | None = None
    weights: list[StrictInt] | None = Field(None, description="of the targets of `split`, in their order")
    note: Note = ""


class RollbackIn(_Body):
    """Which set shall be in force again; by default the one before the one in force."""

    revision: int | None = None
    note: Note = ""


class SampleIn(_Body):
    """A request of which nothing is needed but what rules match on."""

    task: _Word
    tenant: _Word = ""
    key: _Word = ""
    model: _Word = ""
    version: _Word = ""
    priority: Literal["interactive", "batch"] = "interactive"
    headers: dict[_Word, _Word] = Field(default_factory=dict, max_length=MAX_HEADERS)
    input_tokens: int | None = Field(None, ge=0, le=MAX_COUNT)
    input_bytes: int = Field(0, ge=0, le=MAX_COUNT)
    session: _Word = ""
    ordering_key: _Word = ""
    stream: bool = False
    at: AwareDatetime | None = Field(None, ge=FIRST, le=LAST, description="RFC 3339; by default now")

    def sample(self) -> Sample:
        """It as the rules see it."""
        request = InferenceRequest(
            id="",
            task=self.task,
            caller=Caller(key_id=self.key, tenant=self.tenant),
            input=None,
            received_us=0,
            deadline_us=0,
            stream=self.stream,
            model=self.model,
            version=self.version,
            priority=self.priority,
            ordering_key=self.ordering_key,
            headers={name.lower(): value for name, value in self.headers.items()},
            input_bytes=self.input_bytes,
            session=self.session,
        )
        at_s = _seconds(self.at)
        return Sample(request=request, at_s=at_s, input_tokens=self.input_tokens)


class DryRunIn(RulesCandidate):
    """A set of rules, and what it is tried on: requests that are given, or the last ones."""

    last: int = Field(1000, ge=1, le=MAX_SAMPLES)
    requests: list[SampleIn] | None = Field(None, max_length=MAX_SAMPLES)


def _seconds(at: datetime | None) -> float:
    return time.time() if at is None else at.timestamp()


# --- rules as they are shown ----------------------------------------------------------------------


class TargetOut(_Body):
    """One place to send a request."""

    backend: str
    model: str
    version: str = ""
    weight: int
    parameters: dict[str, Any] = Field(default_factory=dict, exclude_if=lambda fields: not fields)
    context_tokens: int = Field(0, exclude_if=lambda tokens: not tokens)


class WindowOut(_Body):
    """A part of the week."""

    days: list[str]
    begin: str = Field(alias="from")
    end: str = Field(alias="to")
    timezone: str


class MatchOut(_Body):
    """Which requests a rule takes; `*` takes all. What is not there takes all, too."""

    task: str
    tenant: str
    model: str
    key: str = Field("*", exclude_if=lambda key: key == "*")
    priority: str = Field("*", exclude_if=lambda priority: priority == "*")
    headers: dict[str, str] = Field(default_factory=dict, exclude_if=lambda headers: not headers)
    min_input_tokens: int = Field(0, exclude_if=lambda bound: not bound)
    max_input_tokens: int = Field(0, exclude_if=lambda bound: not bound)
    min_input_bytes: int = Field(0, exclude_if=lambda bound: not bound)
    max_input_bytes: int = Field(0, exclude_if=lambda bound: not bound)
    times: list[WindowOut] = Field(default_factory=list, exclude_if=lambda times: not times)


class ShadowOut(_Body):
    """Where copies go."""

    backend: str
    model: str
    version: str = Field("", exclude_if=lambda version: not version)
    percent: float
    compare: bool


class GuardOut(_Body):
    """What a canary may not do."""

    max_error_ratio: float | None = Field(None, exclude_if=lambda bound: bound is None)
    max_violation_ratio: float | None = Field(None, exclude_if=lambda bound: bound is None)
    max_disagreement: float | None = Field(None, exclude_if=lambda bound: bound is None)
    max_p99_ms: int | None = Field(None, exclude_if=lambda bound: bound is None)
    max_first_token_ms: int | None = Field(None, exclude_if=lambda bound: bound is None)
    min_requests: int
    window_s: int


class RuleOut(_Body):
    """One rule. Of what it says beside its targets there is only what is not as usual."""

    name: str
    match: MatchOut
    split: list[TargetOut]
    strategy: Strategy
    sticky_by: StickyBy
    fallback: list[TargetOut]
    shadow: ShadowOut | None = Field(None, exclude_if=lambda shadow: shadow is None)
    guard: GuardOut | None = Field(None, exclude_if=lambda guard: guard is None)
    retries: int = Field(0, exclude_if=lambda rounds: not rounds)
    hedge: bool = Field(default=False, exclude_if=lambda hedges: not hedges)
    timeout_ms: int = Field(0, exclude_if=lambda timeout_ms: not timeout_ms)
    attempt_timeout_ms: int = Field(0, exclude_if=lambda timeout_ms: not timeout_ms)
    limits: list[dict[str, Any]] = Field(default_factory=list, exclude_if=lambda limits: not limits)
    ordering: Ordering | None = Field(None, exclude_if=lambda ordering: ordering is None)
    cache: Cache | None = Field(None, exclude_if=lambda cache: cache is None)
    on_store_down: OnStoreDown = Field(DEFAULT.on_store_down, exclude_if=lambda how: how == DEFAULT.on_store_down)
    idempotency: Idempotency = Field(DEFAULT.idempotency, exclude_if=lambda how: how == DEFAULT.idempotency)
    enabled: bool


# --- answers --------------------------------------------------------------------------------------


class RulesOut(_Body):
    """The rules in force."""

    revision: int
    rules: list[RuleOut]
    frozen: SwitchOut | None = Field(description="the switch for which they may not be changed now")


class RulesApplied(_Body):
    """The rules after a change."""

    revision: int
    rules: list[RuleOut]
    applied: AppliedOut
    warnings: list[str]


class RuleApplied(_Body):
    """One rule after a change."""

    revision: int
    rule: RuleOut
    applied: AppliedOut
    warnings: list[str]


class FieldChangeOut(_Body):
    """One field that differs; null where it is not there."""

    field: str
    before: Any
    after: Any


class RuleChangeOut(_Body):
    """What became of one rule."""

    rule: str
    change: Literal["added", "removed", "changed", "moved"]
    fields: list[FieldChangeOut]
    text: str


class RulesValid(_Body):
    """A set that would be taken, and what it would change; null where the set in force cannot be read now."""

    valid: Literal[True]
    rules: list[RuleOut]
    warnings: list[str]
    changes: list[RuleChangeOut] | None


class RevisionOut(_Body):
    """A set that was in force, by whom and why; `rules` is how many."""

    revision: int
    at: str
    by: str
    action: str
    note: str
    rules: int
    in_force: bool


class Revisions(_Body):
    """Those that are kept, the newest first."""

    items: list[RevisionOut]
    next: str | None


class RevisionRules(_Body):
    """One of them, with its rules."""

    revision: int
    at: str
    by: str
    action: str
    note: str
    rules: list[RuleOut]
    in_force: bool


class RulesDiff(_Body):
    """What turns one revision into another."""

    before: int = Field(alias="from")
    after: int = Field(alias="to")
    changes: list[RuleChangeOut]


class MoveOut(_Body):
    """Requests that would leave one place (`refused`: nobody's) for another."""

    from_place: str = Field(alias="from")
    to_place: str = Field(alias="to")
    requests: float


class RuleShareOut(_Body):
    """How many requests a rule takes now, and would take."""

    rule: str
    before: int
    after: int


class DryRunOut(_Body):
    """What a set would do to requests of before, in place of the one of `revision`."""

    revision: int
    requests: int
    moved: float
    refused_before: int
    refused_after: int
    moves: list[MoveOut]
    rules: list[RuleShareOut]
    unrecorded_headers: list[str]
    warnings: list[str]
