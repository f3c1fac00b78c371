"""The rollouts of the control plane: begun, looked at every second, taken on or back by operators.

All that is known of one is in the store. Whoever looks at it has a claim on its rule for as long as that takes, so that
any control plane may do the next step: after a restart, or where several run, it simply goes on.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, TypeVar

from gateway.admin.rollouts.guard import Clock, Guard, Wait, every_second, unix_ms
from gateway.admin.rollouts.recent_figures import RecentFigures
from gateway.admin.rollouts.rollout_run import RolloutRun, Seen, Wish, with_rollout
from gateway.admin.routing.rule_writer import RuleWriter
from gateway.admin_ports import AuditLog, DeployStore, FigureSource, RuleStore
from gateway.core.errors import (
    Frozen,
    GatewayError,
    RolloutConflict,
    RulesUnavailable,
    UnknownRollout,
    UnknownRule,
)
from gateway.core.rollouts.guarding import Conduct
from gateway.core.rollouts.model_move import RolloutError
from gateway.core.rollouts.progressive import Course, Rollout, begun, ended, taken_back
from gateway.core.rollouts.rollout_documents import parse_rollout, rollout_document
from gateway.core.rules import Rule
from gateway.core.rules.fields import RuleError

RENEW_S: Final = 2.5  # a quarter of what a claim lasts
LOOK_S: Final = 3.0  # of looks that wait for workers the others are not kept waiting for longer
ASK_S, ASKS = 0.1, 150  # how often, and how many times, an operator's wish asks whether whoever looks now is done

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def rolling(
    *,
    rules: RuleStore,
    check: Callable[[Sequence[Rule]], None],
    store: DeployStore,
    figures: FigureSource,
    audit: AuditLog | None = None,
) -> AsyncIterator["Rollouts"]:
    """The rollouts; they and all rules with a guard are looked at every second until the block ends."""
    rollouts = Rollouts(rules=rules, check=check, store=store, figures=figures, audit=audit)
    guard = Guard(rules=rules, writer=RuleWriter(rules, check), figures=figures, claims=store, audit=audit)
    tasks = [
        asyncio.create_task(every_second(name, tick), name=name)
        for name, tick in (("rollouts", rollouts.tick), ("guard", guard.tick))
    ]
    try:
        yield rollouts
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await rollouts.close()
        await guard.close()


class Rollouts:
    """The rollouts of all control planes. Raises `RulesUnavailable` where the store does not answer.

    `clock` tells the time in Unix milliseconds.
    """

    def __init__(
        self,
        *,
        rules: RuleStore,
        check: Callable[[Sequence[Rule]], None],
        store: DeployStore,
        figures: FigureSource,
        audit: AuditLog | None = None,
        clock: Clock = unix_ms,
        wait: Wait = asyncio.sleep,
    ) -> None:
        self._rules = rules
        self._check = check
        self._store = store
        self._figures = figures
        self.clock = clock
        self._wait = wait
        writer = RuleWriter(rules, check)
        self._run = RolloutRun(rules=rules, writer=writer, save=self._save, audit=audit, clock=clock)
        self._recent: dict[str, RecentFigures] = {}
        self._looks: dict[str, asyncio.Task[None]] = {}

    async def tick(self) -> None:
        """Look at all that are under way, once; one that waits for its workers is not looked at again meanwhile."""
        running = {one["id"]: one["rule"] for one in await self._store.recent() if one["status"] == "running"}
        self._recent = {name: one for name, one in self._recent.items() if name in running}
        for name, rule in running.items():
            if name not in self._looks:
                self._looks[name] = asyncio.create_task(self._tick_one(name, rule), name=f"rollout {name}")
        if self._looks:
            await asyncio.wait(self._looks.values(), timeout=LOOK_S)
        done = [name for name, look in self._looks.items() if look.done()]
        for error in [self._looks.pop(name).exception() for name in done]:
            if isinstance(error, RulesUnavailable):
                _log.warning("rollout_waits", extra={"reason": error.detail})
            elif error is not None:
                _log.error("rollout_failed", exc_info=error)

    async def close(self) -> None:
        """Leave all of them where they are."""
        for look in self._looks.values():
            look.cancel()
        await asyncio.gather(*self._looks.values(), return_exceptions=True)

    async def begin(self, rule: str, course: Course, *, actor: str = "", note: str = "") -> Seen:
        """Take the first step; returns when all workers have it.

        Raises `UnknownRule`, `RolloutConflict`, `Frozen`, and `RuleError` for a target that does not fit.
        """
        wish = Wish(what="begun", actor=actor, note=note)
        return await self._claimed_soon(rule, lambda: self._begin(rule, course, wish))

    async def promote(self, rollout_id: str, *, actor: str = "", note: str = "") -> Seen:
        """Go on to the next step now; from the last one: be done.

        Raises `UnknownRollout`, `Frozen`, and `RolloutConflict` where it has ended, a bound of its guard is broken, or
        it has gone on since it was asked for: of two who promote it at the same time one does.
        """
        wish = Wish(what="promoted", actor=actor, note=note)
        asked = (await self.get(rollout_id)).rollout

        async def act() -> Seen:
            seen = await self._open(rollout_id)
            if seen.rollout.step != asked.step:
                raise RolloutConflict(f"rollout {rollout_id} has gone on to {seen.rollout.percent} % meanwhile")
            return await self._run.look(seen, self._figures_of(rollout_id), wish)

        return await self._claimed_soon(asked.rule, act)

    async def abort(self, rollout_id: str, *, actor: str = "", note: str = "") -> Seen:
        """Give the rule the split that it had. Raises `UnknownRollout`, `RolloutConflict`, `Frozen`."""
        wish = Wish(what="aborted", actor=actor, note=note)

        async def act() -> Seen:
            seen = await self._open(rollout_id)
            if words := await self._run.frozen():
                raise Frozen(words)
            # Its reason does not begin with what its status says already.
            reason = str(replace(wish, what="")).strip().removeprefix(": ")
            return await self._run.put(replace(seen, rollout=taken_back(seen.rollout, "aborted", reason)), wish)

        return await self._claimed_soon((await self.get(rollout_id)).rollout.rule, act)

    async def get(self, rollout_id: str) -> Seen:
        """One of them as it was when it was last looked at. Raises `UnknownRollout`."""
        document = await self._store.load(rollout_id)
        if document is None:
            raise UnknownRollout(f"no rollout has the id '{rollout_id}'"[:200])
        return _parse(document)

    async def recent(self) -> list[Seen]:
        """All that are known, the newest first."""
        return [_parse(document) for document in await self._store.recent()]

    async def _begin(self, name: str, course: Course, wish: Wish) -> Seen:
        for seen in await self.recent():
            if seen.rollout.rule == name and seen.rollout.is_open:
                raise RolloutConflict(f"rollout {seen.rollout.id} of rule '{name}' is under way: abort it first")
        current = await self._rules.get()
        rule = current.named(name)
        if rule is None:
            raise UnknownRule(f"no rule is named '{name}'"[:200])
        rollout = replace(_begun(rule, course, self.clock()), actor=wish.actor, note=wish.note)
        self._check(with_rollout(current.rules, rollout))
        if words := await self._run.frozen():
            raise Frozen(words)
        try:
            return await self._run.put(Seen(rollout=rollout), wish)
        except (Frozen, RuleError) as error:  # since we asked
            reason = error.detail if isinstance(error, GatewayError) else str(error)
            await self._save(Seen(rollout=ended(rollout, "failed", reason, now_ms=self.clock())))
            raise

    async def _open(self, rollout_id: str) -> Seen:
        seen = await self.get(rollout_id)
        if not seen.rollout.is_open:
            raise RolloutConflict(f"rollout {rollout_id} is {seen.rollout.status.replace('_', ' ')}")
        return seen

    async def _tick_one(self, rollout_id: str, rule: str) -> None:
        async def act() -> None:
            seen = await self.get(rollout_id)
            if seen.rollout.is_open:
                await self._run.look(seen, self._figures_of(rollout_id))

        await self._claimed(rule, act)

    def _figures_of(self, rollout_id: str) -> RecentFigures:
        return self._recent.setdefault(rollout_id, RecentFigures(self._figures))

    async def _save(self, seen: Seen) -> None:
        figures = {"canary": asdict(seen.canary), "baseline": asdict(seen.baseline)}
        await self._store.save({**rollout_document(seen.rollout), **figures})

    async def _claimed_soon(self, rule: str, act: Callable[[], Awaitable[_T]]) -> _T:
        """The same as `_claimed`, after whoever looks at it now."""
        for _ in range(ASKS):
            answers = await self._claimed(rule, act)
            if answers:
                return answers[0]
            await self._wait(ASK_S)
        raise RolloutConflict(f"another control plane is changing rule '{rule}': try again")

    async def _claimed(self, rule: str, act: Callable[[], Awaitable[_T]]) -> tuple[_T] | tuple[()]:
        """Do it with a claim on the rule; nothing where another has it, or gets it meanwhile."""
        claimant = uuid.uuid4().hex
        if not await self._store.claim(rule, claimant):
            return ()
        acting = asyncio.ensure_future(act())
        renewing = asyncio.ensure_future(self._renew(rule, claimant))
        try:
            await asyncio.wait({acting, renewing}, return_when=asyncio.FIRST_COMPLETED)
            return (await acting,) if acting.done() else ()
        finally:
            for task in (acting, renewing):
                task.cancel()
            await asyncio.gather(acting, renewing, return_exceptions=True)
            with contextlib.suppress(RulesUnavailable):
                await self._store.release(rule, claimant)

    async def _renew(self, rule: str, claimant: str) -> None:
        """Keep the claim; returns when it is another's, after a time in which it could not be renewed."""
        is_ours = True
        while is_ours:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(RulesUnavailable):
                is_ours = await self._store.claim(rule, claimant)


def _begun(rule: Rule, course: Course, now_ms: int) -> Rollout:
    """With the rule's own guard where the course has none. Raises `RolloutConflict`."""
    course = replace(course, guard=course.guard or rule.guard)
    if course.guard and course.guard.max_disagreement is not None and not (rule.shadow and rule.shadow.compare):
        raise RolloutConflict(f"rule '{rule.name}' has no shadow to compare with, as `max_disagreement` asks for")
    try:
        return begun(rule, course, rollout_id=uuid.uuid4().hex[:12], now_ms=now_ms)
    except RolloutError as error:
        raise RolloutConflict(str(error)) from error


def _parse(document: Mapping[str, Any]) -> Seen:
    fields = dict(document)
    canary, baseline = Conduct(**fields.pop("canary")), Conduct(**fields.pop("baseline"))
    return Seen(rollout=parse_rollout(fields), canary=canary, baseline=baseline)
