"""A deploy under way: a new version beside the old one, the callers moved to it step by step, the old one retired.

The order keeps every caller served, and each caller's versions in order: rules first name the old version, so that the
load moves nobody; the new version has callers only when it is ready on every replica; the old one goes only when
no rule and no worker sends anything there. Whatever fails before that is undone.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from gateway.admin.models.deploy import STEPS, Deploy, Step
from gateway.admin.models.fleet import Fleet
from gateway.admin.routing.rule_writer import RuleWriter, patiently
from gateway.admin_ports import Change, OutcomeSource
from gateway.core.errors import GatewayError
from gateway.core.models import Outcomes
from gateway.core.rollouts.model_move import Marks, RolloutError, names_version, restore, shape
from gateway.core.rules import Rule
from gateway.core.rules.fields import RuleError

TICK_S = 0.5
MISSES = 3  # looks in a row at replicas that do not answer, or are not ready
FEWEST_FAILURES = 3  # one or two say nothing of a version
# A version that leaves finishes its requests first; the longest of them have minutes.
GONE_WITHIN_S = 120.0
DRAINED_WITHIN_S = 30.0
UNDO_LOAD_S = 60.0

_log = logging.getLogger(__name__)


class _WentWrong(Exception):
    """Why a deploy cannot go on; for the operator."""


class _BackAsked(Exception):
    """The operator wants it undone."""


class DeployRun:
    """Drives one deploy to its end. `save` keeps its state before every step that may be cut short."""

    def __init__(
        self,
        deploy: Deploy,
        *,
        fleet: Fleet,
        writer: RuleWriter,
        outcomes: OutcomeSource,
        save: Callable[[Deploy], Awaitable[None]],
    ) -> None:
        self.deploy = deploy
        self._fleet = fleet
        self._writer = writer
        self._outcomes = outcomes
        self._save = save
        self._back = asyncio.Event()
        self._misses = 0

    def go_back(self) -> None:
        """Undo it as soon as may be."""
        self._back.set()

    async def run(self) -> None:
        """From where it is to its end: done, failed or rolled back."""
        if not self.deploy.undo:
            try:
                await self._forward()
            except _BackAsked:
                await self._note(undo="asked", reason="rolled back by an operator")
            except (_WentWrong, GatewayError, RuleError, RolloutError) as error:
                await self._note(undo="forced", reason=_words(error))
            else:
                return
        await self._undo()

    async def _forward(self) -> None:
        steps: dict[Step, Callable[[], Awaitable[None]]] = {
            "pin": self._pin,
            "load": self._load,
            "shift": self._shift,
            "retire": self._retire,
            "unpin": self._unpin,
        }
        for step in STEPS[STEPS.index(self.deploy.step) :]:
            if self._back.is_set():
                raise _BackAsked
            await self._note(step=step)
            await steps[step]()
        await self._note(status="done")

    async def _pin(self) -> None:
        await self._weigh(0)

    async def _load(self) -> None:
        loading = asyncio.ensure_future(self._load_twice())
        back = asyncio.ensure_future(self._back.wait())
        try:
            await asyncio.wait({loading, back}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                raise _BackAsked
            await loading
        finally:
            for task in (loading, back):
                task.cancel()
            await asyncio.gather(loading, back, return_exceptions=True)

    async def _load_twice(self) -> None:
        # Python writes a __pycache__ beside a model that it loads for the first time; Triton takes that for a new file
        # and loads the model anew at the next load of any version. Now nobody is there yet whom that concerns.
        for _ in range(2):
            await self._fleet.serve(self.deploy.both, timeout_s=self.deploy.pace.load_timeout_s)

    async def _shift(self) -> None:
        for percent in self.deploy.pace.percents:
            if percent < self.deploy.weight:
                continue  # it was interrupted after that
            await self._weigh(percent, at_one_instant=True)
            await self._hold()

    async def _hold(self) -> None:
        """Watch the new version for as long as a step lasts."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.deploy.pace.hold_s
        before = await self._counts()
        while True:
            await self._look(before)
            left = until - loop.time()
            if left <= 0:
                return
            try:
                async with asyncio.timeout(min(TICK_S, left)):
                    await self._back.wait()
            except TimeoutError:
                continue
            raise _BackAsked

    async def _look(self, before: tuple[Mapping[str, Outcomes], ...]) -> None:
        """Raise where a version is not ready, for more than a moment, or where the new one fails more than the old."""
        rules = (await self._writer.current()).rules
        if shape(rules, self.deploy.marks, self.deploy.move, percent=self.deploy.weight).rules != rules:
            # someone has put a set of before, or new rules that lead to the model
            await self._weigh(self.deploy.weight)
        try:
            await self._keep_ready()
        except GatewayError:
            self._misses += 1
            if self._misses >= MISSES:
                raise
        else:
            self._misses = 0
        for now, then in zip(await self._counts(), before, strict=True):
            old, new = (
                now.get(version, Outcomes()).since(then.get(version, Outcomes()))
                for version in (self.deploy.old, self.deploy.new)
            )
            if new.failures >= FEWEST_FAILURES and new.ratio > self.deploy.pace.max_error_ratio + old.ratio:
                raise _WentWrong(
                    f"version {self.deploy.new} failed {new.failures} of {new.failures + new.requests} requests "
                    f"at {self.deploy.weight} %"
                )

    async def _counts(self) -> tuple[Mapping[str, Outcomes], Mapping[str, Outcomes]]:
        """As the servers count, which know of all their callers, and as the workers do, which know what was wrong."""
        return await self._fleet.counts(), await patiently(lambda: self._outcomes.read(self.deploy.model))

    async def _keep_ready(self) -> None:
        if self._fleet.lacking(await self._fleet.states(), self.deploy.both):
            # A model that was loaded anew by others (healed, or a server that started again) has its file's versions.
            await self._fleet.serve(self.deploy.both, timeout_s=self.deploy.pace.load_timeout_s)

    async def _retire(self) -> None:
        current = await self._writer.current()
        if names := names_version(current.rules, self.deploy.move, self.deploy.old):
            raise _WentWrong(f"the rule '{names[0]}', edited meanwhile, still sends to version {self.deploy.old}")
        await self._drained()
        await self._fleet.serve(self.deploy.after, timeout_s=self.deploy.pace.load_timeout_s)
        if not await self._fleet.gone(self.deploy.old, timeout_s=GONE_WITHIN_S):
            note = f"version {self.deploy.old} still finishes requests after {GONE_WITHIN_S:g} s"
            await self._note(notes=(*self.deploy.notes, note))

    async def _drained(self) -> None:
        """Wait until nothing comes to the old version any more: what waits in a worker's queue was routed before.

        Not for ever: callers that name it themselves, or that go past the gateway, may never end.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + DRAINED_WITHIN_S
        before: Outcomes | None = None
        while loop.time() < until:
            now = (await self._fleet.counts()).get(self.deploy.old, Outcomes())
            if now == before:
                return
            before = now
            await asyncio.sleep(TICK_S)

    async def _unpin(self) -> None:
        await self._restore(serves=self.deploy.new)

    async def _undo(self) -> None:
        """Back to what served before, each part only when the one before has succeeded.

        Where a part fails the callers stay where they are, served by what is there, and the undo may be tried again.
        """
        try:
            if self.deploy.step in ("retire", "unpin"):
                await self._fleet.serve(self.deploy.both, timeout_s=UNDO_LOAD_S)
            await self._weigh(0)
            await self._fleet.serve(self.deploy.served, timeout_s=UNDO_LOAD_S)
            await self._fleet.gone(self.deploy.new, timeout_s=GONE_WITHIN_S)
            await self._restore(serves=self.deploy.old)
        except (GatewayError, RuleError, RolloutError) as error:
            reason = f"{self.deploy.reason}; not all could be undone: {_words(error)}"
            await self._note(status="failed", reason=reason)
        else:
            await self._note(status="rolled_back" if self.deploy.undo == "asked" else "failed")

    async def _weigh(self, percent: int, *, at_one_instant: bool = False) -> None:
        """Move callers so that `percent` of them are on the new version.

        Going forward, at one instant: a caller that one worker has answered with the new version must not get the old
        one from another. Going back there is no time to lose.
        """

        async def rewrite(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
            shaped = shape(rules, self.deploy.marks, self.deploy.move, percent=percent)
            # Kept before it is put: what a crash leaves in the rules can be told from what others wrote.
            await self._note(marks=shaped.marks)
            return shaped.rules

        await self._writer.change(rewrite, change=self._change(f"{percent} %"), at_one_instant=at_one_instant)
        await self._note(weight=percent)

    async def _restore(self, *, serves: str) -> None:
        async def rewrite(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
            return restore(rules, self.deploy.marks, self.deploy.move, serves=serves)

        released = self.deploy.marks.released
        await self._writer.change(rewrite, change=self._change(f"version {serves} serves"))
        notes = [f"the split of rule '{name}' was edited meanwhile and is left as it is" for name in released]
        await self._note(marks=Marks(), notes=(*self.deploy.notes, *notes))

    def _change(self, what: str) -> Change:
        """How the history of rules has it. What takes a deploy back is made while changes are frozen, too."""
        deploy = self.deploy
        note = f"deploy {deploy.id} of {deploy.model}, version {deploy.old} -> {deploy.new}: {what}"
        return Change(by="deploy", action="deploy", note=note, is_automatic=bool(deploy.undo))

    async def _note(self, **changes: object) -> None:
        # mypy cannot see that `changes` are fields; the dataclass refuses others.
        self.deploy = replace(self.deploy, updated_ms=round(time.time() * 1000), **changes)  # type: ignore[arg-type]  # see above
        told = {name: str(value) for name, value in changes.items() if name != "marks"}
        if told:
            _log.info("deploy", extra={"deploy": self.deploy.id, "model": self.deploy.model, **told})
        await self._save(self.deploy)


def _words(error: Exception) -> str:
    return error.detail if isinstance(error, GatewayError) else str(error)
