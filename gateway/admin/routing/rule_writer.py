"""Changes to the routing rules that a program makes: on top of whatever set is the newest, and seen through."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from gateway.admin_ports import Change, RuleStore
from gateway.core.errors import BackendBroke, RulesUnavailable, StaleRevision
from gateway.core.rules import Rule, RuleSet

ATTEMPTS = 20  # against other writers
AHEAD_S = 0.75  # more than the half second after which a worker looks by itself
PATIENCE_S = 60.0
RETRY_S = 0.5
APPLIED_WITHIN_S = 10.0  # twice as long as a worker that died stays on the list

_T = TypeVar("_T")
Rewrite = Callable[[tuple[Rule, ...]], Awaitable[tuple[Rule, ...]]]
"""New rules from those in force; called anew after a conflict."""


async def patiently(call: Callable[[], Awaitable[_T]]) -> _T:
    """The answer of a store that may be out of reach for a while: what is half done is better finished late."""
    loop = asyncio.get_running_loop()
    until = loop.time() + PATIENCE_S
    while True:
        try:
            return await call()
        except RulesUnavailable:
            if loop.time() >= until:
                raise
            await asyncio.sleep(RETRY_S)


class RuleWriter:
    """Puts changes in force, and returns when all workers run them."""

    def __init__(self, store: RuleStore, check: Callable[[Sequence[Rule]], None]) -> None:
        self._store = store
        self._check = check

    async def change(self, rewrite: Rewrite, *, change: Change, at_one_instant: bool = False) -> RuleSet:
        """The set after the change: in force on each worker as soon as may be, or on all at one instant soon.

        `change` says whose it is, and why. Raises `BackendBroke` where workers do not follow (the change then stands),
        and `Frozen` where changes are frozen.
        """
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._change_once(rewrite, change, ahead_s=AHEAD_S if at_one_instant else 0)
            except StaleRevision:
                continue
        return await self._change_once(rewrite, change, ahead_s=AHEAD_S if at_one_instant else 0)

    async def current(self) -> RuleSet:
        """The set in force."""
        return await patiently(self._store.get)

    async def _change_once(self, rewrite: Rewrite, change: Change, *, ahead_s: float) -> RuleSet:
        current = await self.current()
        rules = await rewrite(current.rules)
        if rules == current.rules:
            await self._followed(current.revision)
            return current
        self._check(rules)
        at_s = time.time() + ahead_s
        at_ms = round(at_s * 1000) if ahead_s else 0
        put = functools.partial(self._store.put, rules, expected_revision=current.revision, at_ms=at_ms, change=change)
        revision = await patiently(put)
        await self._followed(revision)
        await asyncio.sleep(max(0.0, at_s - time.time()))
        return RuleSet(revision=revision, rules=rules)

    async def _followed(self, revision: int) -> None:
        applied = await self._store.applied(revision, timeout_s=APPLIED_WITHIN_S)
        if applied.workers < applied.of:
            raise BackendBroke(
                f"revision {revision} of the rules runs on only {applied.workers} of {applied.of} workers"
            )
