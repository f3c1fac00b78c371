"""Bodies of the paths about rollouts."""

from dataclasses import asdict
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from gateway.admin.access.auditing import cleaned
from gateway.admin.fields import Body, Next
from gateway.admin.instants import instant
from gateway.admin.rollouts.rollout_run import Seen
from gateway.core.rollouts.guarding import Conduct
from gateway.core.rollouts.model_move import WHOLE
from gateway.core.rollouts.progressive import STEPS, Course, Status
from gateway.core.rules import StickyBy
from gateway.core.rules.documents import guard_at, target_at
from gateway.core.rules.fields import RuleError

MAX_STEPS = 20
MAX_HOLD_S = 7 * 86_400
MAX_NOTE = 500


def _ascending(steps: list[int]) -> list[int]:
    if any(one >= next_ for one, next_ in pairwise(steps)) or steps[-1] != WHOLE:
        raise ValueError(f"each must be more than the one before, and the last {WHOLE}")
    return steps


_Percent = Annotated[int, Field(ge=1, le=WHOLE)]
_Steps = Annotated[list[_Percent], Field(min_length=1, max_length=MAX_STEPS), AfterValidator(_ascending)]
_Note = Annotated[str, Field(max_length=MAX_NOTE), AfterValidator(cleaned)]


class NoteIn(Body):
    """Why it is done."""

    note: _Note = Field("", description="why, on one line; instead of the header X-Change-Reason")


class RolloutIn(NoteIn):
    """A rollout that is to begin."""

    rule: str = Field(max_length=128, description="its name")
    target: dict[str, Any] = Field(description="where the callers go: a target as in a rule's split, without a weight")
    steps: _Steps = Field(default=list(STEPS), description="percent of the rule's requests")
    hold_s: int = Field(60, ge=0, le=MAX_HOLD_S, description="seconds that each step is held at least")
    guard: dict[str, Any] | None = Field(None, description="as in a rule; without one the rule's own")
    sticky_by: StickyBy | None = Field(None, description="while it lasts; without one as the rule says")

    def course(self) -> Course:
        """What is asked for. Raises `RuleError`."""
        if "weight" in self.target:
            raise RuleError("target.weight: is given by the steps")
        return Course(
            target=target_at(self.target, "target"),
            steps=tuple(self.steps),
            hold_s=self.hold_s,
            guard=None if self.guard is None else guard_at(self.guard, "guard"),
            sticky_by=self.sticky_by,
        )


class PlaceOut(Body):
    """Where the callers go."""

    backend: str = Field(description="its name")
    model: str = Field(description="`*`: the one that the caller names")
    version: str = Field(description="empty: the caller's, or else the server's choice")


class ConductOut(Body):
    """How a place did in this step; in the last one where the rollout is over."""

    requests: int = Field(description="that it answered")
    attempts: int = Field(description="of requests there, whoever answered in the end")
    failed_attempts: int = Field(description="of the attempts")
    error_ratio: float | None = Field(description="failed_attempts / attempts, 0 to 1; null: of nothing")
    violation_ratio: float | None = Field(
        description="0 to 1, of attempts whose answer broke the task's contract or the protocol; null: of nothing"
    )
    p99_ms: float | None = Field(
        description="milliseconds, of whole answers, at most a tenth too high; null: of nothing"
    )
    first_token_p99_ms: float | None = Field(
        description="milliseconds to streamed answers' first parts, at most a tenth too high; null: of nothing"
    )
    compared: int = Field(description="answers, with those of the rule's shadow")
    disagreement: float | None = Field(description="0 to 1, of those that were compared; null: of nothing")


class EventOut(Body):
    """Something that happened."""

    at: str = Field(description="RFC 3339, UTC")
    what: str = Field(description="in words")


class RolloutOut(Body):
    """One rollout."""

    id: str = Field(description="what it is promoted and aborted by")
    rule: str = Field(description="its name")
    target: PlaceOut = Field(description="where the callers go")
    steps: list[int] = Field(description="percent of the rule's requests")
    step: int = Field(description="which of the steps it is at; the first is 0")
    percent: int = Field(description="the target's share in percent, as the rollout has set it")
    hold_s: int = Field(description="seconds that each step is held at least")
    guard: dict[str, Any] | None = Field(description="as in a rule; null: none")
    sticky_by: StickyBy | None = Field(description="while it lasts; null: as the rule says")
    status: Status = Field(
        description="`rolled_back`: by its guard; `aborted`: by an operator, or since the rule was changed meanwhile"
    )
    held: str = Field(description="what is in its way; empty: nothing")
    reason: str = Field(description="why it has ended so")
    started_at: str = Field(description="RFC 3339, UTC")
    step_since: str = Field(description="since when the step is in force: RFC 3339, UTC")
    next_at: str | None = Field(description="when the hold is over; null once that was")
    actor: str = Field(description="who began it")
    note: str = Field(description="why")
    canary: ConductOut = Field(description="how the target did")
    baseline: ConductOut = Field(description="how the other targets of the rule did")
    events: list[EventOut] = Field(description="the oldest first")
    revision: int = Field(description="of the rules, with its newest step")


class RolloutsOut(Body):
    """Rollouts, the newest first."""

    items: list[RolloutOut] = Field(description="the newest first")
    next: Next


def rollout_out(seen: Seen, now_ms: int) -> RolloutOut:
    """What is shown of a rollout."""
    rollout, course = seen.rollout, seen.rollout.course
    place, is_next = course.target, rollout.is_open and now_ms < rollout.next_ms
    return RolloutOut(
        id=rollout.id,
        rule=rollout.rule,
        target=PlaceOut(backend=place.backend, model=place.model, version=place.version),
        steps=list(course.steps),
        step=rollout.step,
        percent=rollout.percent,
        hold_s=course.hold_s,
        guard=asdict(course.guard) if course.guard else None,
        sticky_by=course.sticky_by,
        status=rollout.status,
        held=rollout.held,
        reason=rollout.reason,
        started_at=instant(rollout.started_ms),
        step_since=instant(rollout.step_since_ms),
        next_at=instant(rollout.next_ms) if is_next else None,
        actor=rollout.actor,
        note=rollout.note,
        canary=_conduct_out(seen.canary),
        baseline=_conduct_out(seen.baseline),
        events=[EventOut(at=instant(event.at_ms), what=event.what) for event in rollout.events],
        revision=rollout.revision,
    )


def _conduct_out(conduct: Conduct) -> ConductOut:
    return ConductOut(**{name: getattr(conduct, name) for name in ConductOut.model_fields})
