"""The routing rules and switches as the control plane reads and changes them. `stored_rules` has the layout."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import orjson
from redis.asyncio import Redis

from gateway.admin_ports import NO_NAME, Applied, Change, Revision, WorkerState
from gateway.core.errors import (
    Frozen,
    RulesUnavailable,
    StaleRevision,
    TooManySwitches,
    UnknownRevision,
    UnknownSwitch,
)
from gateway.core.rules import Rule, RuleSet
from gateway.core.rules.fields import RuleError
from gateway.core.switches import NO_SWITCHES, Switch, Switches
from gateway.stores.redis_script import answering, load_script
from gateway.stores.stored_rules import (
    KEPT,
    REPORTED,
    STORED,
    SWITCHES,
    Stored,
    SwitchesError,
    channel,
    frozen_until_ms,
    heading_text,
    history_key,
    number,
    read_revision,
    read_rules,
    read_switches,
    rules_key,
    rules_text,
    switches_of,
    switches_text,
    text,
    worker_key,
    workers_key,
)

APPLIED_POLL_S: Final = 0.01
MAX_SWITCHES: Final = 100
ATTEMPTS: Final = 20  # against other writers of switches
_UNREADABLE: Final = (ValueError, KeyError, TypeError)

_log = logging.getLogger(__name__)


class RedisRuleStore:
    """`admin_ports.RuleStore` over Redis.

    Raises `RulesUnavailable` when Redis does not answer within `timeout_s` or holds what cannot be read.
    """

    def __init__(self, client: Redis, prefix: str, timeout_s: float = 1.0) -> None:
        self._client = client
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._put_script = load_script("put_rules")
        self._switches_script = load_script("put_switches")

    async def get(self) -> RuleSet:
        """The newest set, under the switches of now; revision 0 and no rules where none was ever stored."""
        stored = await self._read(STORED)
        with contextlib.suppress(SwitchesError):  # what is wrong with them `switches` says
            switches = read_switches(switches_of(stored))
            return self._rule_set(stored, switches)
        return self._rule_set(stored, NO_SWITCHES)

    async def put(
        self, rules: Sequence[Rule], *, expected_revision: int, at_ms: int = 0, change: Change = NO_NAME
    ) -> int:
        """Replace the set that has `expected_revision` (0 = none yet); returns the new revision.

        Workers put it in force at `at_ms` (Unix milliseconds), or as soon as they hear of it.
        Raises `StaleRevision`, or `Frozen`, and changes nothing when another set is in force, or changes are frozen.
        """
        heading = heading_text(change, revision=expected_revision + 1, at_ms=_now_ms(), count=len(rules))
        args: list[str | int] = [expected_revision, rules_text(rules), channel(self._prefix), at_ms]
        args += [heading, KEPT, int(change.is_automatic)]
        keys = [rules_key(self._prefix), history_key(self._prefix)]
        async with self._bounded():
            done, told = await self._put_script.run(self._client, keys, args)
        if done < 0:
            raise Frozen(await self._frozen_words(int(told)))
        if not done:
            raise StaleRevision(expected=expected_revision, current=told)
        return int(told)

    async def revisions(self, *, before: int = 0, size: int = 50) -> list[Revision]:
        """The headings of those that are kept, the newest first; those before revision `before`, unless that is 0."""
        async with self._bounded():
            names = [text(name) for name in await self._client.hkeys(history_key(self._prefix))]
            kept = sorted((int(name) for name in names if name.isdecimal()), reverse=True)
            asked = [revision for revision in kept if not before or revision < before][:size]
            found = await self._client.hmget(history_key(self._prefix), [str(n) for n in asked]) if asked else []
        try:
            return [read_revision(heading) for heading in found if heading is not None]
        except _UNREADABLE as error:
            raise RulesUnavailable("the history of rules cannot be read") from error

    async def revision(self, number: int) -> Revision:
        """One of them, with its rules. Raises `UnknownRevision`."""
        async with self._bounded():
            heading, rules = await self._client.hmget(history_key(self._prefix), [str(number), f"{number}:rules"])
        if heading is None or rules is None:
            raise UnknownRevision(f"revision {number} of the rules is not kept")
        try:
            return read_revision(heading, rules)
        except _UNREADABLE as error:
            raise RulesUnavailable(f"revision {number} of the rules cannot be read: {error}") from error

    async def switches(self) -> Switches:
        """All switches that have not ended."""
        try:
            switches = read_switches(await self._read(SWITCHES))
        except SwitchesError as error:
            raise RulesUnavailable(f"the stored switches cannot be read: {error}") from error
        return Switches(revision=switches.revision, items=switches.in_force(_now_ms()))

    async def add_switch(self, switch: Switch) -> int:
        """Set it; returns the new revision of the switches. Raises `TooManySwitches`.

        What cannot be read is replaced: in an emergency a switch has to work.
        """

        def added(items: tuple[Switch, ...]) -> tuple[Switch, ...]:
            others = tuple([one for one in items if one.id != switch.id])
            if len(others) >= MAX_SWITCHES:
                raise TooManySwitches(f"{MAX_SWITCHES} switches are set already: end one of them first")
            return (*others, switch)

        return await self._change_switches(added)

    async def end_switch(self, switch_id: str) -> tuple[Switch, int]:
        """Take it away before its time; returns what it was, and the new revision. Raises `UnknownSwitch`."""
        ended: list[Switch] = []

        def without(items: tuple[Switch, ...]) -> tuple[Switch, ...]:
            ended[:] = [one for one in items if one.id == switch_id]
            if not ended:
                raise UnknownSwitch(f"no switch has the id '{switch_id}': it may have ended by itself"[:300])
            return tuple([one for one in items if one.id != switch_id])

        revision = await self._change_switches(without)
        return ended[0], revision

    async def workers(self) -> list[WorkerState]:
        """The live workers, by id. One that died without a word stays on the list for 5 s."""
        return [_worker(worker_id, said) for worker_id, said in (await self._reported(REPORTED)).items()]

    async def applied(self, revision: int, timeout_s: float = 1.0, *, of_switches: bool = False) -> Applied:
        """Wait until all live workers run `revision` or a later one, or the time is up; says how many do."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        asked = ("pid", "switches" if of_switches else "revision")
        running = of = 0
        with contextlib.suppress(RulesUnavailable):  # saved all the same: the last count seen is the answer
            while True:
                said = await self._reported(asked)
                running, of = sum(number(one) >= revision for _, one in said.values()), len(said)
                if running == of or loop.time() - began_s >= timeout_s:
                    break
                await asyncio.sleep(APPLIED_POLL_S)
        return Applied(workers=running, of=of, ms=round((loop.time() - began_s) * 1000))

    async def _change_switches(self, change: Callable[[tuple[Switch, ...]], tuple[Switch, ...]]) -> int:
        """Put what `change` makes of those that have not ended in their place; returns the new revision."""
        expected = -1
        for _ in range(ATTEMPTS):
            stored = await self._read(SWITCHES)
            expected = number(stored[0])
            try:
                current = read_switches(stored).in_force(_now_ms())
            except SwitchesError:
                _log.exception("switches_replaced", extra={"revision": expected})
                current = ()
            items = change(current)
            args: list[str | int] = [expected, switches_text(items), frozen_until_ms(items), channel(self._prefix)]
            async with self._bounded():
                done, revision = await self._switches_script.run(self._client, [rules_key(self._prefix)], args)
            if done:
                return int(revision)
        raise RulesUnavailable("too many change the switches at the same time")

    async def _frozen_words(self, until_ms: int) -> str:
        """Which switch it is that freezes changes, as far as that can be told."""
        until = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(until_ms / 1000))
        with contextlib.suppress(RulesUnavailable):
            switch = (await self.switches()).freezing(_now_ms())
            if switch is not None:
                return f"changes are frozen until {until} by {switch}, which {switch.owner} has set: {switch.reason}"
        return f"changes are frozen until {until}"

    async def _read(self, names: Sequence[str]) -> Stored:
        async with self._bounded():
            return tuple(await self._client.hmget(rules_key(self._prefix), list(names)))

    def _rule_set(self, stored: Stored, switches: Switches) -> RuleSet:
        if stored[:2] == (None, None):
            return RuleSet(revision=0, rules=(), switches=switches)
        try:
            revision, rules = read_rules(stored)
        except RuleError as error:
            told = text(stored[0]) or "0"
            raise RulesUnavailable(f"the stored rules (revision {told}) cannot be read: {error}") from error
        return RuleSet(revision=revision, rules=rules, switches=switches)

    async def _reported(self, names: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        """What live workers say, by id; the first of `names` is one that every worker tells."""
        async with self._bounded():
            ids = sorted(text(i) for i in await self._client.smembers(workers_key(self._prefix)))
            pipeline = self._client.pipeline(transaction=False)
            for worker_id in ids:
                pipeline.hmget(worker_key(self._prefix, worker_id), *names)
            reports = await pipeline.execute() if ids else []
            gone = [i for i, report in zip(ids, reports, strict=True) if report[0] is None]
            if gone:
                await self._client.srem(workers_key(self._prefix), *gone)
        return {i: report for i, report in zip(ids, reports, strict=True) if report[0] is not None}

    def _bounded(self) -> AbstractAsyncContextManager[None]:
        return answering("the rules", self._timeout_s)


def _now_ms() -> int:
    return round(time.time() * 1000)


def _worker(worker_id: str, said: Sequence[Any]) -> WorkerState:
    pid, revision, started, state, detail, switches, report = said
    return WorkerState(
        id=worker_id,
        pid=number(pid),
        revision=number(revision),
        started=number(started),
        state=text(state),
        detail=text(detail),
        switches=number(switches),
        report=_report(report),
    )


def _report(stored: Any) -> Mapping[str, Any]:
    """Empty where it says nothing, or cannot be read."""
    try:
        report = orjson.loads(stored or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return report if isinstance(report, dict) else {}
