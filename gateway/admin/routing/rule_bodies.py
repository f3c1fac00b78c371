"""Bodies of the paths about rules. Rules come in as plain JSON: `core.rules.parse_rules` names the faults."""

import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, Field, StrictBool, StrictInt

from gateway.admin.access.auditing import cleaned
from gateway.admin.fields import Body, Next, RulesRevision
from gateway.admin.routing.shown_rules import RuleOut
from gateway.admin.routing.switch_bodies import AppliedOut, SwitchOut
from gateway.core.rules.dry_run import Sample
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


# --- what comes in --------------------------------------------------------------------------------


class RulesCandidate(Body):
    """A whole set of rules."""

    rules: list[Any] = Field(description="the rules in order of precedence; each as in the answer")
    revision: int | None = Field(None, description="the revision that they were made from, instead of If-Match")
    frozen: Any = Field(None, description="as `GET /rules` has it; it is not looked at")


class RulesIn(RulesCandidate):
    """A whole set of rules that is to be in force."""

    note: Note = ""


class RulePatch(Body):
    """What may change in a single rule."""

    enabled: StrictBool | None = Field(None, description="on or off")
    weights: list[StrictInt] | None = Field(None, description="of the targets of `split`, in their order")
    note: Note = ""


class RollbackIn(Body):
    """Which set shall be in force again; by default the one before the one in force."""

    revision: int | None = Field(default=None, description="of the set; null: the one before the one in force")
    note: Note = ""


class SampleIn(Body):
    """A request of which nothing is needed but what rules match on."""

    task: _Word = Field(description="its name")
    tenant: _Word = Field("", description="by default the key's")
    key: _Word = Field("", description="the key's id")
    model: _Word = Field("", description="that the caller names")
    version: _Word = Field("", description="of the model, that the caller names")
    priority: Literal["interactive", "batch"] = Field("interactive", description="X-Priority")
    headers: dict[_Word, _Word] = Field(
        default_factory=dict, max_length=MAX_HEADERS, description="by name; those that rules match on"
    )
    input_tokens: int | None = Field(None, ge=0, le=MAX_COUNT, description="tokens of the prompt; null: not known")
    input_bytes: int = Field(0, ge=0, le=MAX_COUNT, description="of its body")
    session: _Word = Field("", description="X-Session-Id")
    ordering_key: _Word = Field("", description="X-Ordering-Key")
    stream: bool = Field(default=False, description="whether it asks for a streamed answer")
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

    last: int = Field(1000, ge=1, le=MAX_SAMPLES, description="how many of the last requests, where none are given")
    requests: list[SampleIn] | None = Field(None, max_length=MAX_SAMPLES, description="those to try instead")


def _seconds(at: datetime | None) -> float:
    return time.time() if at is None else at.timestamp()


# --- answers --------------------------------------------------------------------------------------


class RulesOut(Body):
    """The rules in force."""

    revision: RulesRevision
    rules: list[RuleOut] = Field(description="in order of precedence")
    frozen: SwitchOut | None = Field(description="the switch for which they may not be changed now")


class _Applied(Body):
    revision: RulesRevision
    applied: AppliedOut = Field(description="how many workers run it")
    warnings: list[str] = Field(description="what may not be meant")


class RulesApplied(_Applied):
    """The rules after a change."""

    rules: list[RuleOut] = Field(description="in order of precedence")


class RuleApplied(_Applied):
    """One rule after a change."""

    rule: RuleOut = Field(description="as it is now")


class FieldChangeOut(Body):
    """One field that differs; null where it is not there."""

    field: str = Field(description="its path in the rule, such as `split[0].weight`")
    before: Any = Field(description="its value")
    after: Any = Field(description="its value")


class RuleChangeOut(Body):
    """What became of one rule."""

    rule: str = Field(description="its name")
    change: Literal["added", "removed", "changed", "moved"] = Field(
        description="one that was changed and moved is there twice"
    )
    fields: list[FieldChangeOut] = Field(description="those that differ; of one that was moved its position, from 1")
    text: str = Field(description="the same in one line")


class RulesValid(Body):
    """A set that would be taken, and what it would change; null where the set in force cannot be read now."""

    valid: Literal[True] = Field(description="a set that is not is refused")
    rules: list[RuleOut] = Field(description="as they would be shown")
    warnings: list[str] = Field(description="what may not be meant, and models that no server has")
    changes: list[RuleChangeOut] | None = Field(description="of the set in force; null where that cannot be read now")


class _Revision(Body):
    revision: RulesRevision
    at: str = Field(description="when it was put in force: RFC 3339, UTC")
    by: str = Field(
        description="an actor's id; `guard`, `rollout`, `deploy`: the control plane itself; empty: a worker's start"
    )
    action: str = Field(
        description="put, switch (one rule on or off), weights, rollback, rollout, guard, deploy or seed"
    )
    note: str = Field(description="why")
    in_force: bool = Field(description="whether it is the newest")


class RevisionOut(_Revision):
    """A set that was in force, by whom and why."""

    rules: int = Field(description="how many")


class Revisions(Body):
    """Those that are kept, the newest first."""

    items: list[RevisionOut] = Field(description="the newest first")
    next: Next


class RevisionRules(_Revision):
    """One of them, with its rules."""

    rules: list[RuleOut] = Field(description="in order of precedence")


class RulesDiff(Body):
    """What turns one revision into another."""

    before: int = Field(alias="from", description="a revision")
    after: int = Field(alias="to", description="a revision")
    changes: list[RuleChangeOut] = Field(description="what differs")


class MoveOut(Body):
    """Requests that would leave one place (`refused`: nobody's) for another."""

    from_place: str = Field(alias="from", description="a place, or `refused`")
    to_place: str = Field(alias="to", description="a place, or `refused`")
    requests: float = Field(description="how many; a fraction, as splits are shares")


class RuleShareOut(Body):
    """How many requests a rule takes now, and would take."""

    rule: str = Field(description="its name")
    before: int = Field(description="requests that it takes now")
    after: int = Field(description="requests that it would take")


class DryRunOut(Body):
    """What a set would do to requests of before, in place of the one of `revision`."""

    revision: RulesRevision
    requests: int = Field(description="how many were tried")
    moved: float = Field(
        description="of these, those that would go elsewhere, or be refused, or no longer be: a fraction"
    )
    refused_before: int = Field(description="requests that no rule takes now")
    refused_after: int = Field(description="requests that no rule would take")
    moves: list[MoveOut] = Field(description="the largest first")
    rules: list[RuleShareOut] = Field(
        description="in the order of the set; those that take nothing in both are left out"
    )
    unrecorded_headers: list[str] = Field(
        description="that the rules match on and the requests do not have: of these nothing can be said"
    )
    warnings: list[str] = Field(description="what may not be meant")
