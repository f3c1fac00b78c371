"""`/overview` and `/workers`: what all workers counted lately, read second by second, and how fresh it is."""

from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gateway.admin.watching.overview import FINE_S, MAX_WINDOW_S, SETTLING_S, Live
from gateway.admin_ports import WorkerState
from gateway.core.errors import RulesUnavailable
from gateway.core.watching.figures import Figures, Series, Tally, step_of
from gateway.stores.control.figures import RedisFigures, RedisFigureSource
from tests.kit.admin_plane import SECRETS, bearing, whole_app
from tests.kit.control_stores import Rules
from tests.kit.records import A, B, answered

pytest_plugins = ["tests.kit.redis"]

NOW = 1_800_000_003
AT = Series("t", "r", "triton", "m", "1")
RULES = [{"name": "r", "split": [{"backend": "triton", "model": "m"}]}]


class World:
    """The time, the figures as they lie in the store, and what was asked of it."""

    def __init__(self) -> None:
        self.now_s = NOW + 0.5
        self.figures: dict[int, Figures] = {}
        self.asked: list[tuple[int, int]] = []
        self.is_gone = False
        self.rules = Rules(RULES)
        self.live = Live(self, self.rules, now_s=lambda: self.now_s)
        self.report()

    async def read(self, since_s: int, until_s: int) -> Mapping[int, Figures]:
        if self.is_gone:
            raise RulesUnavailable("Redis does not answer")
        self.asked.append((since_s, until_s))
        return {second: figures for second, figures in self.figures.items() if since_s <= second < until_s}

    def add(self, second: int, *, requests: int = 1, at: Series = AT, ms: int = 10, **counts: int) -> None:
        tally = Tally(requests=requests, whole={step_of(ms * 1000): requests}, **counts)
        self.figures.setdefault(second, {})[at] = tally

    def report(self, *, age_s: float = 0.0, **report: Any) -> None:
        at_ms = int((self.now_s - age_s) * 1000)
        self.rules.states = [worker("w1", report={"at_ms": at_ms, **report}), worker("w2", report={"at_ms": 1})]


def worker(name: str, **changes: Any) -> WorkerState:
    fields: dict[str, Any] = {"id": name, "pid": 1, "revision": 1, "started": 1, "state": "serving"}
    return WorkerState(**fields | changes)


@pytest.fixture
def world() -> World:
    return World()


async def test_totals_points_and_series_of_a_window(world: World) -> None:
    other = AT._replace(backend="local")
    world.add(NOW - 61, requests=1000)  # before it
    world.add(NOW - 60, requests=3, errors=1, ms=100)
    world.add(NOW - 1, requests=20, input_tokens=30, output_tokens=70, cost_nano_usd=2_000_000_000)
    world.add(NOW - 1, requests=1, at=other, failed_attempts=4)
    world.add(NOW, requests=500)  # which is not over
    found = await world.live.overview(60)
    assert (found.window_s, found.at) == (60, "2027-01-15T08:00:03.000Z")
    assert (found.requests_per_s, found.tokens_per_s, found.usd_per_hour) == (2.1, 10.0, 720.0)
    assert found.error_ratio == 1 / 24
    assert 10 <= (found.p50_ms or 0) <= 11
    assert 100 <= (found.p99_ms or 0) <= 110
    assert found.first_token_p50_ms is None
    assert len(found.points) == 60
    assert [point.requests for point in found.points] == [3, *[0] * 58, 21]
    assert (found.points[0].errors, found.points[-1].tokens, found.points[-1].usd) == (1, 100, 2.0)
    assert found.points[-1].t == "2027-01-15T08:00:02.000Z"
    assert found.points[1].p50_ms is None
    assert [(one.backend, one.requests, one.errors, one.failed_attempts) for one in found.by] == [
        ("triton", 23, 1, 0),
        ("local", 1, 0, 4),
    ]
    assert found.by[0].points == [3, *[0] * 58, 20]


async def test_long_windows_have_a_point_every_five_seconds(world: World) -> None:
    for second in range(NOW - 400, NOW + 1):
        world.add(second)
    found = await world.live.overview(300)
    assert [point.requests for point in found.points] == [5] * 60
    assert found.points[-1].t == "2027-01-15T07:59:55.000Z"
    assert found.requests_per_s == 1.0


async def test_only_new_seconds_are_read(world: World) -> None:
    world.add(NOW - 100)
    await world.live.overview(120)
    world.now_s += 1
    world.add(NOW, requests=7)
    found = await world.live.overview(120)
    first, second = world.asked
    assert first[0] <= NOW - 120
    assert second == (NOW + 1 - SETTLING_S, NOW + 2)
    assert [point.requests for point in found.points if point.requests] == [1, 7]


async def test_a_second_may_still_grow_for_a_while(world: World) -> None:
    world.add(NOW - 1, requests=1)
    await world.live.overview(60)
    world.add(NOW - 1, requests=5)
    world.now_s += 1
    assert [point.requests for point in (await world.live.overview(60)).points][-2:] == [5, 0]


async def test_callers_at_once_share_what_was_read(world: World) -> None:
    await world.live.overview(60)
    await world.live.overview(30)
    assert len(world.asked) == 1
    await world.live.overview(600)
    assert len(world.asked) == 2


@pytest.mark.parametrize("window_s", [60, 300, 3600])
async def test_figures_do_not_depend_on_how_often_it_was_asked(world: World, window_s: int) -> None:
    """What is folded into steps, second by second, gives what is read at once."""
    await world.live.overview(window_s)
    for i in range(400):
        world.now_s += 1
        world.add(int(world.now_s) - 1, requests=1 + i % 3, errors=i % 2, ms=1 + i)
        if i % 7 == 0:
            await world.live.overview(window_s)
    world.now_s += 1
    known = await world.live.overview(window_s)
    anew = await Live(world, world.rules, now_s=lambda: world.now_s).overview(window_s)
    assert known == anew
    assert known.by[0].requests > 0


async def test_what_is_too_old_is_forgotten(world: World) -> None:
    for second in range(NOW - MAX_WINDOW_S, NOW, 60):
        world.add(second)
    await world.live.overview(MAX_WINDOW_S)
    world.now_s += MAX_WINDOW_S - 1
    await world.live.overview(FINE_S)
    assert sum(point.requests for point in (await world.live.overview(MAX_WINDOW_S)).points) <= 1


async def test_workers_are_added_up(world: World) -> None:
    world.report(in_flight=[["triton", "m", "1", "a", 3], ["llm", "big", "", "", 2]], waiting={"triton": 4, "llm": 1})
    world.rules.states += [
        worker("w3", revision=0, report={"at_ms": 5, "in_flight": [["triton", "m", "1", "a", 1]]}),
        worker("w4", state="refused", detail="no", report={"shut": "of another version"}),
    ]
    found = await world.live.overview(60)
    assert (found.in_flight, found.waiting) == (6, 5)
    assert found.workers.model_dump() == {"live": 4, "refused": 1, "behind": 1}


@pytest.mark.parametrize(("age_s", "is_stale"), [(0.5, False), (2.9, False), (3.1, True)])
async def test_old_reports_are_stale(world: World, age_s: float, *, is_stale: bool) -> None:
    world.report(age_s=age_s)
    found = await world.live.overview(60)
    assert (found.is_stale, round(found.newest_s or 0, 1)) == (is_stale, age_s)


async def test_without_a_worker_nothing_is_fresh(world: World) -> None:
    world.rules.states = []
    found = await world.live.overview(60)
    assert (found.is_stale, found.newest_s, found.workers.live) == (True, None, 0)


async def test_without_redis_the_last_figures_stand_and_are_stale(world: World) -> None:
    world.add(NOW - 1, requests=8)
    world.is_gone = True
    with pytest.raises(RulesUnavailable):
        await world.live.overview(60)
    world.is_gone = False
    before = await world.live.overview(60)
    world.is_gone = True
    world.now_s += 10
    after = await world.live.overview(60)
    assert (before.is_stale, after.is_stale) == (False, True)
    assert (after.at, after.points) == (before.at, before.points)
    assert after.newest_s == 10.0
    world.is_gone = False
    world.report()
    assert not (await world.live.overview(60)).is_stale


async def test_live_figures_are_those_that_workers_write(redis_client: Redis, redis_prefix: str) -> None:
    observer = RedisFigures(redis_client, redis_prefix, now_s=lambda: NOW - 1)
    for place in (A, B, B):
        observer.ended(answered(place))
    await observer.flush()
    found = await Live(RedisFigureSource(redis_client, redis_prefix), None, now_s=lambda: NOW + 0.2).overview(10)
    assert [(one.model, one.requests, one.points[-1]) for one in found.by] == [("m", 3, 3)]


async def test_its_path_takes_windows_up_to_an_hour(redis_client: Redis, redis_prefix: str) -> None:
    figures = RedisFigureSource(redis_client, redis_prefix)
    app = whole_app(redis_client, redis_prefix, figures=figures, rules=Rules(RULES))
    async with bearing(app, SECRETS["viewer"]) as http:
        answer = await http.get("/overview")
        assert (answer.status_code, answer.json()["window_s"], len(answer.json()["points"])) == (200, 300, 60)
        for window_s in ("0", "3601", "x"):
            assert (await http.get("/overview", params={"window_s": window_s})).status_code == 422


async def test_workers_say_what_they_run(redis_client: Redis, redis_prefix: str) -> None:
    rules = Rules(RULES)
    rules.states = [
        worker("new", report={"at_ms": 5, "drains": {"s1": 2}}),
        worker("old", revision=0, state="refused", detail="no such backend"),
    ]
    app = whole_app(redis_client, redis_prefix, rules=rules)
    async with bearing(app, SECRETS["viewer"]) as http:
        answer: httpx.Response = await http.get("/workers")
    new, old = answer.json()["items"]
    assert (new["is_behind"], new["switches"], new["report"]) == (False, 0, {"at_ms": 5, "drains": {"s1": 2}})
    assert (old["is_behind"], old["state"], old["detail"], old["report"]) == (True, "refused", "no such backend", {})
