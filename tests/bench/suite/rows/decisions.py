"""What is decided for each request: admission in Redis, and the route among 200 rules. Both in this process.

For admission Redis has the load's core and this process the row's, as a worker does.
"""

import os
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.core import routing
from gateway.core.rules import RuleSet, parse_rules
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.redis_admissions import RedisAdmissions
from gateway.stores.redis_script import connect
from gateway.wiring_stores import wall_us
from tests.bench import admission as admissions
from tests.bench import routing as routes
from tests.bench.suite.bench import Bench, Figures, Measure, Row
from tests.bench.suite.goals import OURS, Goal
from tests.kit.redis import RedisServer
from tests.kit.wanted import FOUR, wanted

ADMISSIONS, FEW_ADMISSIONS = 20_000, 5_000
MANY = 32
ROUND_TRIPS = 1.01  # one; the last settlement of a run may be a call of its own
RULES = 200
CALLS = 2_000
PLAIN = ("ten tasks", "one task, a tenant each", "one task, a value of one header each")
ALONE = "ours, 1 in flight"


@contextmanager
def _pinned(core: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def admitted(bench: Bench) -> None:
    """Four limits of all kinds and a place in an order, taken and settled."""
    count = FEW_ADMISSIONS if bench.is_quick else ADMISSIONS
    with RedisServer() as server, _pinned(bench.core):
        client = connect(server.url)
        store = RedisAdmissions(client, admissions.PREFIX, MemoryAdmissions(wall_us), timeout_s=admissions.PATIENT_S)
        store.start()

        def of(in_flight: int) -> Measure:
            asked = [wanted(FOUR, f"key-{lane}") for lane in range(in_flight)]

            async def run() -> Figures:
                cost = await admissions.closed(client, store.admit, asked, count)
                return {"cpu us": cost.cpu_us, "round trips": cost.calls, "p50 ms": cost.p50_ms, "p99 ms": cost.p99_ms}

            return run

        try:
            await bench.in_turns({OURS: of(MANY), ALONE: of(1)})
            if store.is_degraded:
                bench.failed("Redis was too slow: a part was decided without it")
        finally:
            await store.close()
            await client.aclose()


async def routed(bench: Bench) -> None:
    """The rule found, and the plan made of it: a split of two versions and a fallback, two replicas each."""
    state = routes.state({"a:8001": 1, "b:8001": 2})
    with _pinned(bench.core):
        await bench.in_turns({name: _decision(match, state) for name, match in routes.MATCHES.items()})


def _decision(match: Callable[[int], object], state: routing.State) -> Measure:
    targets = {"split": routes.SPLIT, "fallback": routes.FALLBACK}
    made = [{"name": f"r{number}", "match": match(number), **targets} for number in range(RULES - 1)]
    rules = RuleSet(revision=1, rules=parse_rules([*made, {"name": "last", **targets}]))

    def decide() -> object:
        rule = rules.rule_of(routes.REQUEST)
        assert rule is not None
        return routing.plan_by(rule, 1, routes.REQUEST, state)

    async def run() -> Figures:
        return {
            "us": statistics.median(timeit.repeat(decide, timer=time.process_time, number=CALLS, repeat=3))
            / CALLS
            * 1e6
        }

    return run


ADMISSION = Row(
    name="admission",
    title="admission in Redis: four limits and an order, 32 in flight",
    goals=(
        Goal(figure="round trips", at="most", bound=ROUND_TRIPS),
        Goal(figure="cpu us", at="most", bound=25),
    ),
    measure=admitted,
)
ROUTING = Row(
    name="routing",
    title="routing decision, 200 rules",
    goals=tuple(Goal(figure="us", at="most", bound=10, subject=name) for name in PLAIN),
    measure=routed,
)
