"""The guard of the control plane: a canary that breaks a bound of its rule's guard gets no more requests.

Of several control planes one looks; where it goes another takes over within seconds. What it has taken out it leaves
out: an operator gives the canary a weight again, and it is judged afresh by what happens from then on.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.admin.rollouts.recent_figures import RecentFigures
from gateway.admin.routing.rule_writer import RuleWriter
from gateway.admin_ports import AuditEntry, AuditLog, Change, DeployStore, FigureSource, Revision, RuleStore
from gateway.core.errors import BackendBroke, GatewayError, RulesUnavailable, UnknownRevision
from gateway.core.rollouts.guarding import canaries, canary_out, figures_of, judge, others_of
from gateway.core.rules import Rule, Target
from gateway.core.rules.fields import RuleError
from gateway.core.types import Place

EVERY_S: Final = 1.0
CLAIM: Final = "*"  # no rule has this name
STANDS_MS: Final = (
    5000  # that a verdict waits for Redis, or other writers; an older one may be of what an operator undid
)
_SECOND_MS: Final = 1000

_log = logging.getLogger(__name__)

Wait = Callable[[float], Awaitable[None]]
Clock = Callable[[], int]


def unix_ms() -> int:
    """Now, in Unix milliseconds."""
    return round(time.time() * _SECOND_MS)


async def every_second(name: str, tick: Callable[[], Awaitable[None]], wait: Wait = asyncio.sleep) -> None:
    """Call `tick` for ever; what goes wrong is logged, and tried again."""
    while True:
        try:
            await tick()
        except RulesUnavailable as error:
            _log.warning(f"{name}_waits", extra={"reason": error.detail})
        except Exception:  # noqa: BLE001 - the supervisor of this task
            _log.exception(f"{name}_failed")
        await wait(EVERY_S)


async def written(audit: AuditLog | None, entry: AuditEntry) -> None:
    """Write down what has been done by itself; where that cannot be it is in the process's log alone."""
    told = {"target": entry.target, "reason": entry.reason, "actor": entry.actor}
    _log.warning(entry.action, extra=told)
    if audit is not None:
        try:
            await audit.add(entry)
        except RulesUnavailable:
            _log.exception("audit_lost", extra=told)


class Guard:
    """Looks at every rule with a guard. `claims` is the store of rollouts: rules that one is at are left to it."""

    def __init__(
        self,
        *,
        rules: RuleStore,
        writer: RuleWriter,
        figures: FigureSource,
        claims: DeployStore,
        audit: AuditLog | None = None,
        clock: Clock = unix_ms,
    ) -> None:
        self._rules = rules
        self._writer = writer
        self._figures = RecentFigures(figures)
        self._claims = claims
        self._audit = audit
        self._clock = clock
        self._weights = WeightHistory(rules)
        self._id = uuid.uuid4().hex

    async def tick(self) -> None:
        """Look once. Raises `RulesUnavailable`."""
        if not await self._claims.claim(CLAIM, self._id):
            return
        current = await self._rules.get()
        watched = [(rule, target) for rule in current.rules if rule.enabled and rule.guard for target in canaries(rule)]
        if not watched:
            return
        now_ms = self._clock()
        longest_s = max(rule.guard.window_s for rule, _ in watched if rule.guard)
        await self._weights.follow(current.revision, since_ms=now_ms - longest_s * _SECOND_MS)
        names = {rule.name for rule, _ in watched}
        now_s = now_ms // _SECOND_MS
        await self._figures.read(names, since_s=now_s - longest_s, now_s=now_s)
        for rule, target in watched:
            if words := self._breach(rule, target, now_s):
                await self._take_out(rule, target, words)

    async def close(self) -> None:
        """Leave it to others at once."""
        with contextlib.suppress(RulesUnavailable):
            await self._claims.release(CLAIM, self._id)

    def _breach(self, rule: Rule, target: Target, now_s: int) -> str:
        """What the target has done in the guard's window, as far as it has had its weight since."""
        if rule.guard is None:
            return ""
        # Of the second in which the weight was set some is from before.
        fresh_s = self._weights.since_ms(rule.name, target.place) // _SECOND_MS + 1
        since_s = max(now_s - rule.guard.window_s, fresh_s)
        figures = self._figures.since(since_s)
        verdict = judge(rule.guard, figures_of(rule, target, figures), others_of(rule, target, figures))
        return f"{_named(target)}: {verdict.breach}" if verdict.breach else ""

    async def _take_out(self, judged: Rule, target: Target, words: str) -> None:
        """Put the rule without the canary in force, unless someone has changed its split since it was judged."""
        if await self._is_rolled_out(judged.name):
            return
        weight, changed = next(one.weight for one in judged.split if one.place == target.place), False
        until_ms = self._clock() + STANDS_MS

        async def rewrite(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
            nonlocal changed
            stands = self._clock() <= until_ms
            made = tuple(canary_out(one, target) if stands and _is_as_judged(one, judged) else one for one in rules)
            changed = made != rules
            return made

        said = Change(by="guard", action="guard", note=words[:500], is_automatic=True)
        try:
            await self._writer.change(rewrite, change=said)
        except BackendBroke as error:  # it stands; workers that lag are seen on the list of workers
            _log.warning("guard_lags", extra={"rule": judged.name, "reason": error.detail})
        except (GatewayError, RuleError):
            # The other canaries are looked at all the same; this one again in a second.
            _log.exception("guard_cannot", extra={"rule": judged.name, "reason": words})
            return
        if changed:
            await written(
                self._audit,
                AuditEntry(
                    actor="guard",
                    role="system",
                    action="guard.take_out",
                    at_ms=self._clock(),
                    target=judged.name,
                    before={"target": _named(target), "weight": weight},
                    after={"target": _named(target), "weight": 0},
                    reason=words,
                ),
            )

    async def _is_rolled_out(self, rule: str) -> bool:
        """Whether a rollout is at the rule: it has a guard of its own."""
        return any(one["rule"] == rule and one["status"] == "running" for one in await self._claims.recent())


class WeightHistory:
    """Since when targets have had the weights that they have, as far back as somebody looks."""

    def __init__(self, rules: RuleStore) -> None:
        self._rules = rules
        self._revisions: dict[int, _Weights] = {}
        self._newest = 0

    async def follow(self, revision: int, *, since_ms: int) -> None:
        """Know the revisions up to this one that were made since, and the one before them.

        Raises `RulesUnavailable`.
        """
        if revision == self._newest:
            return
        kept: dict[int, _Weights] = {}
        async for heading in self._headings(revision + 1):
            number = heading.revision
            with contextlib.suppress(UnknownRevision):  # forgotten since
                kept[number] = self._revisions.get(number) or _weights(await self._rules.revision(number))
            if heading.at_ms < since_ms:
                break
        self._revisions, self._newest = kept, revision

    def since_ms(self, rule: str, place: Place) -> int:
        """From when the target has its weight of now; of a change that is not known any more, the oldest known."""
        numbers = sorted(self._revisions, reverse=True)
        since_ms, now = 0, None
        for number in numbers:
            known = self._revisions[number]
            weight = known.of.get((rule, place), 0)
            now = weight if now is None else now
            if weight != now:
                break
            since_ms = known.at_ms
        return since_ms

    async def _headings(self, before: int) -> AsyncIterator[Revision]:
        """The newest first."""
        while page := await self._rules.revisions(before=before):
            for heading in page:
                yield heading
            before = page[-1].revision


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Those of all targets of a rule set, by the rule's name and the place, and when it was made."""

    at_ms: int
    of: Mapping[tuple[str, Place], int]


def _weights(revision: Revision) -> _Weights:
    of: dict[tuple[str, Place], int] = {}
    for rule in revision.rules or ():
        for target in rule.split:
            of[rule.name, target.place] = of.get((rule.name, target.place), 0) + target.weight
    return _Weights(at_ms=revision.at_ms, of=of)


def _is_as_judged(one: Rule, judged: Rule) -> bool:
    return (one.name, one.split, one.guard) == (judged.name, judged.split, judged.guard)


def _named(target: Target) -> str:
    return str(target.place)
