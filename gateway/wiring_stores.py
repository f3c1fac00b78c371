"""The composition root's part for what workers share: Redis, or the memory of one of them."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from gateway.core.rules import Rule, RuleSet, parse_rules
from gateway.ports import Admissions, Answers, EventLog, Leases, Observer, RuleSource, SequenceStore, StoreObserver
from gateway.settings import ConfigError, Settings
from gateway.settings.redis import read_url
from gateway.stores.control.figures import RedisFigures
from gateway.stores.control.requests import RedisRequests
from gateway.stores.control.shadows import RedisShadows
from gateway.stores.flushing import write_in_background
from gateway.stores.leases import MemoryLeases, RedisLeases
from gateway.stores.memory import MAX_KEYS, MemoryRuleSource, MemorySequenceStore
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.memory_answers import MemoryAnswers
from gateway.stores.redis_admissions import RedisAdmissions
from gateway.stores.redis_answers import RedisAnswers
from gateway.stores.redis_deaths import RedisDeaths
from gateway.stores.redis_events import RedisEvents
from gateway.stores.redis_keys import RedisKeys
from gateway.stores.redis_outcomes import RedisOutcomeCounter
from gateway.stores.redis_rules import RedisRuleSource
from gateway.stores.redis_script import connect
from gateway.stores.redis_sequences import RedisSequenceStore
from gateway.stores.redis_usage import RedisUsage


def wall_us() -> int:
    """Unix time in microseconds: limits by the day and month are calendar days and months."""
    return time.time_ns() // 1000


def monotonic_us() -> int:
    """The process's clock."""
    return time.monotonic_ns() // 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """What workers share, or one of them keeps for itself."""

    admissions: Admissions
    rules: RuleSource
    sequences: SequenceStore
    leases: Leases
    answers: Answers
    keys: RedisKeys | None = None
    events: EventLog | None = None
    deaths: RedisDeaths | None = None
    figures: RedisFigures | None = None
    shadows: RedisShadows | None = None
    observers: Sequence[Observer] = ()

    def tell_of(self, report: Callable[[], Mapping[str, Any]]) -> None:
        """What the control plane shall know of this worker, beside what it says of its rules."""
        if isinstance(self.rules, RedisRuleSource):
            self.rules.report = report


async def open_stores(
    settings: Settings, stack: AsyncExitStack, check: Callable[[Sequence[Rule]], None], observer: StoreObserver
) -> Stores:
    """Those of one worker, following Redis where the settings name one; closed with `stack`.

    `check` raises `RuleError` for rules that this worker cannot run. `observer` hears how Redis answers.
    """
    seed = RuleSet(revision=0, rules=parse_rules(settings.rules))
    if not settings.redis.url:
        workers = settings.server.workers
        return Stores(
            admissions=MemoryAdmissions(wall_us, workers=lambda: workers),
            rules=MemoryRuleSource(seed),
            sequences=MemorySequenceStore(monotonic_us, max_keys=MAX_KEYS if workers == 1 else 0),
            leases=MemoryLeases(monotonic_us),
            answers=MemoryAnswers(monotonic_us, max_bytes=settings.recall.max_bytes, stands_alone=workers == 1),
        )
    client, prefix = open_redis(settings), settings.redis.prefix
    stack.push_async_callback(client.aclose)
    worker_id = f"{socket.gethostname()}-{os.getpid()}"
    rules = RedisRuleSource(client, prefix, seed, check, worker_id, observer=observer)
    stack.push_async_callback(rules.close)
    await rules.start()
    local = MemoryAdmissions(wall_us, workers=rules.live_workers, is_degraded=True)
    admissions = RedisAdmissions(client, prefix, local, is_shared=lies_together(settings), observer=observer)
    stack.push_async_callback(admissions.close)
    admissions.start()
    outcomes = RedisOutcomeCounter(client, prefix)
    usage = RedisUsage(client, prefix)
    figures = RedisFigures(client, prefix)
    requests = RedisRequests(client, prefix, worker_id=worker_id, matched_headers=lambda: rules.current().headers)
    shadows = RedisShadows(client, prefix)
    stack.push_async_callback(write_in_background(outcomes, usage, figures, requests, shadows))
    answers = RedisAnswers(client, prefix, max_bytes=settings.recall.max_bytes)
    stack.push_async_callback(answers.close)
    deaths = RedisDeaths(client, prefix)
    stack.push_async_callback(deaths.close)
    keys = RedisKeys(client, prefix, tuple(limit.limit() for limit in settings.limits), observer=observer)
    stack.push_async_callback(keys.close)
    await keys.start()
    return Stores(
        observers=(outcomes, usage, figures, requests),
        figures=figures,
        shadows=shadows,
        admissions=admissions,
        rules=rules,
        sequences=RedisSequenceStore(client, prefix),
        leases=RedisLeases(client, prefix),
        answers=answers,
        events=RedisEvents(client, prefix),
        deaths=deaths,
        keys=keys,
    )


def open_redis(settings: Settings) -> Redis:
    """A client, not connected yet. Raises `ConfigError`."""
    try:
        return connect(settings.redis)
    except ValueError as error:
        raise ConfigError(str(error)) from None  # its text names the field


def lies_together(settings: Settings) -> bool:
    """Whether the admissions of all tenants lie in one slot, so that a limit may be shared by all of them.

    Only a cluster gains by having them apart; where a configured limit is shared by all, there too.
    """
    if read_url(settings.redis.url).kind != "cluster":
        return True
    limits = [*settings.limits, *(limit for key in settings.keys for limit in key.limits or ())]
    return any(limit.shared_by == "all" for limit in limits)
