"""One look at a rollout, and what follows: it goes on, is held, is taken back, or ends. Whoever looks has its claim."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from gateway.admin.rollouts.guard import Clock, written
from gateway.admin.rollouts.recent_figures import RecentFigures
from gateway.admin.routing.rule_writer import RuleWriter
from gateway.admin.watching.workers import report_of
from gateway.admin_ports import AuditEntry, AuditLog, Change, RuleStore
from gateway.core.errors import BackendBroke, Frozen, RolloutConflict
from gateway.core.rollouts.guarding import NOTHING_SEEN, Conduct, Verdict, conduct, figures_of, judge, others_of
from gateway.core.rollouts.progressive import (
    Advance,
    Hold,
    RollBack,
    Rollout,
    advanced,
    ended,
    kept_out,
    next_step,
    noted,
    settled,
    shaped,
    taken_back,
    taken_over,
    withdrawn,
)
from gateway.core.rules import Rule
from gateway.core.rules.fields import RuleError
from gateway.core.watching.figures import Tally

LONGEST_S: Final = 3600  # figures are not kept for longer
MAX_NOTE: Final = 500

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A rollout, and how its target and the rule's others did in this step when it was last looked at."""

    rollout: Rollout
    canary: Conduct = NOTHING_SEEN
    baseline: Conduct = NOTHING_SEEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What an operator wants of a rollout now; the door of the control plane writes it into the audit log."""

    what: str
    actor: str = ""
    note: str = ""

    def __str__(self) -> str:
        return self.what + (f" by {self.actor}" if self.actor else "") + (f": {self.note}" if self.note else "")


class _TakenOver(Exception):
    """The rule is someone else's; the text says why."""


class RolloutRun:
    """What may be done with a rollout. `save` keeps its state before every step that may be cut short."""

    def __init__(
        self,
        *,
        rules: RuleStore,
        writer: RuleWriter,
        save: Callable[[Seen], Awaitable[None]],
        audit: AuditLog | None,
        clock: Clock,
    ) -> None:
        self._rules = rules
        self._writer = writer
        self._save = save
        self._audit = audit
        self._clock = clock

    async def look(self, seen: Seen, recent: RecentFigures, wish: Wish | None = None) -> Seen:
        """Do what is to be done now. With a `wish` it is to go on.

        Raises `RulesUnavailable`, and, where an operator wishes it, `RolloutConflict` or `Frozen` for what is in the
        way.
        """
        rollout = seen.rollout
        rule = (await self._rules.get()).named(rollout.rule)
        if rule is None or taken_over(rule, rollout):
            return await self._end(seen, "aborted", taken_over(rule, rollout), wish=None)
        if not rollout.is_settled:
            if rollout.ending or not rollout.step or rule.split == rollout.forms[-1]:
                return await self._put_or_hold(seen, None)
            rollout = withdrawn(rollout)  # a step that was cut short before it was made: its hold begins anew
        seen, verdict = await self._judged(rule, replace(seen, rollout=rollout), recent)
        frozen = await self.frozen()
        obstacle = frozen or ("" if rule.enabled else f"rule '{rule.name}' is switched off")
        following = next_step(rollout, verdict, now_ms=self._clock(), obstacle=obstacle, is_asked=wish is not None)
        if wish is not None:
            _check_passable(following, is_frozen=bool(frozen))
        if isinstance(following, RollBack):
            return await self._take_back(seen, following)
        if isinstance(following, Advance):
            return await self._advance(seen, wish)
        if isinstance(following, Hold):
            is_unseen = following.reason != "" and following.reason == verdict.lacks
            return await (self._hold_or_give_up if is_unseen else self._hold)(seen, following.reason)
        return await self._end(seen, "done", "", wish=wish)

    async def put(self, seen: Seen, wish: Wish | None = None) -> Seen:
        """Give the rule the form that the rollout has planned.

        Raises `Frozen` or `RuleError` where that is refused, and nothing is changed.
        """
        planned = seen.rollout
        # Kept before it is put: what a crash leaves in the rule can be told from what others wrote.
        await self._save(seen)

        async def rewrite(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
            rule = next((one for one in rules if one.name == planned.rule), None)
            if words := taken_over(rule, planned):
                raise _TakenOver(words)
            return with_rollout(rules, planned)

        is_sticky = (planned.course.sticky_by or planned.sticky_by) != "request"
        try:
            # A caller that one worker has sent to the target must not be sent elsewhere by another.
            at_one_instant = is_sticky and not planned.ending
            done = await self._writer.change(rewrite, change=_change(planned, wish), at_one_instant=at_one_instant)
        except _TakenOver as taken:
            return await self._end(seen, "aborted", str(taken), wish=None)
        except BackendBroke as error:  # it stands
            planned = noted(planned, error.detail, now_ms=self._clock())
            done = await self._rules.get()
        now = settled(planned, now_ms=self._clock(), revision=done.revision)
        # What was seen in the step before says nothing of a new one.
        after = Seen(rollout=now) if now.is_open else replace(seen, rollout=now)
        return await self._audited(replace(planned, forms=planned.forms[:1]), after, wish)

    async def frozen(self) -> str:
        """What freezes changes, in words; empty where nothing does."""
        switch = (await self._rules.switches()).freezing(self._clock())
        return f"changes are frozen by {switch}: {switch.reason}" if switch else ""

    async def _judged(self, rule: Rule, seen: Seen, recent: RecentFigures) -> tuple[Seen, Verdict]:
        """What the guard says of the step as a whole, and of its own window where the step is longer."""
        rollout, now_s = seen.rollout, self._clock() // 1000
        begun_s = max(rollout.step_since_ms // 1000 + 1, now_s - LONGEST_S)
        await recent.read({rule.name}, since_s=begun_s, now_s=now_s)

        def did(since_s: int) -> tuple[Tally, Tally]:
            figures = recent.since(since_s)
            return figures_of(rule, rollout.course.target, figures), others_of(rule, rollout.course.target, figures)

        canary, baseline = did(begun_s)
        seen = replace(seen, canary=conduct(canary), baseline=conduct(baseline))
        guard = rollout.course.guard
        if guard is None:
            return seen, Verdict()
        lately = judge(guard, *did(max(begun_s, now_s - guard.window_s)))
        whole = judge(guard, canary, baseline)
        return seen, replace(whole, breach=lately.breach or whole.breach)

    async def _kept_out(self, rollout: Rollout) -> str:
        """Why no worker sends the target anything; empty where one does, or no worker tells."""
        views = [view for view in map(report_of, await self._rules.workers()) if view.at_ms]
        reasons = [view.kept_out(rollout.course.target.place) for view in views]
        return str(reasons[0]) if reasons and all(reasons) else ""

    async def _hold_or_give_up(self, seen: Seen, lacks: str) -> Seen:
        """Too little was seen: it waits for more, but not for ever where nothing more can come."""
        why = await self._kept_out(seen.rollout)
        following = kept_out(seen.rollout, why, now_ms=self._clock())
        if isinstance(following, RollBack):
            return await self._take_back(seen, following)
        return await self._hold(
            replace(seen, rollout=following), f"{lacks}; nothing is sent there: {why}" if why else lacks
        )

    async def _take_back(self, seen: Seen, why: RollBack) -> Seen:
        """The split as it was before the rollout."""
        reason = f"{seen.rollout.course.target.place}: {why.reason}"
        return await self.put(replace(seen, rollout=taken_back(seen.rollout, "rolled_back", reason)))

    async def _advance(self, seen: Seen, wish: Wish | None) -> Seen:
        now_ms = self._clock()
        before = noted(seen.rollout, str(wish), now_ms=now_ms) if wish else seen.rollout
        planned = replace(seen, rollout=advanced(before, now_ms=now_ms))
        return await self._put_or_hold(planned, wish, otherwise=seen)

    async def _put_or_hold(self, planned: Seen, wish: Wish | None, *, otherwise: Seen | None = None) -> Seen:
        """Put it; where that is refused nothing was changed, and it stays as it was, which an operator hears, too."""
        try:
            return await self.put(planned, wish)
        except (Frozen, RuleError) as error:
            held = await self._hold(otherwise or planned, error.detail if isinstance(error, Frozen) else str(error))
            if wish is not None:
                raise
            return held

    async def _hold(self, seen: Seen, reason: str) -> Seen:
        rollout = seen.rollout
        if reason and not rollout.held:
            rollout = noted(rollout, f"held: {reason}", now_ms=self._clock())
        seen = replace(seen, rollout=replace(rollout, held=reason))
        await self._save(seen)
        return seen

    async def _end(self, seen: Seen, status: Literal["done", "aborted"], reason: str, *, wish: Wish | None) -> Seen:
        """Over, and the rule is left as it is."""
        now_ms = self._clock()
        before = noted(seen.rollout, str(wish), now_ms=now_ms) if wish else seen.rollout
        over = replace(seen, rollout=ended(before, status, reason, now_ms=now_ms))
        return await self._audited(seen.rollout, over, wish)

    async def _audited(self, before: Rollout, seen: Seen, wish: Wish | None) -> Seen:
        """Keep it, and write down what was done without an operator."""
        await self._save(seen)
        if wish is None:
            after = seen.rollout
            entry = AuditEntry(
                actor="guard" if after.status == "rolled_back" else "rollout",
                role="system",
                action="rollout.step" if after.is_open else f"rollout.{after.status}",
                at_ms=self._clock(),
                target=after.rule,
                before=told(before),
                after=told(after),
                reason=after.reason or after.note,
            )
            await written(self._audit, entry)
        return seen


def told(rollout: Rollout) -> Mapping[str, Any]:
    """What the audit log keeps of it."""
    return {
        "rollout": rollout.id,
        "target": str(rollout.course.target.place),
        "status": rollout.status,
        "percent": rollout.percent,
        "revision": rollout.revision,
    }


def with_rollout(rules: Sequence[Rule], rollout: Rollout) -> tuple[Rule, ...]:
    """The set with the rollout's share in it."""
    return tuple(shaped(one, rollout) if one.name == rollout.rule else one for one in rules)


def _change(planned: Rollout, wish: Wish | None) -> Change:
    """What the revision says of itself. What takes back is made while changes are frozen, too."""
    by = wish.actor if wish else "guard" if planned.ending == "rolled_back" else "rollout"
    step = f"{planned.course.target.place} to {planned.course.steps[planned.step]} %"
    note = f"rollout {planned.id}: {planned.reason or step}"
    return Change(by=by, action="rollout", note=note[:MAX_NOTE], is_automatic=bool(planned.ending))


def _check_passable(following: object, *, is_frozen: bool) -> None:
    """Raise for what an operator cannot pass over."""
    if isinstance(following, RollBack):
        raise RolloutConflict(f"its guard is about to take it back: {following.reason}")
    if isinstance(following, Hold):
        raise Frozen(following.reason) if is_frozen else RolloutConflict(following.reason)
