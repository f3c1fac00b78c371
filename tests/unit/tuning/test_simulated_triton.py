"""Batches as Triton forms them ahead of a free instance: what its source says, case by case, on a made-up clock."""

import heapq
import random
from collections.abc import Sequence

import pytest

from gateway.tuning.simulation.ahead import BatcherAhead, triton_policy
from gateway.tuning.simulation.run import simulate
from gateway.tuning.simulation.world import parse_world
from local_runtime.repository import parsing
from local_runtime.scheduling.batching import Batcher
from local_runtime.scheduling.decisions import Dispatch, Policy, QueuedRequest, WaitUntil

MODEL = """
backend: "python" max_batch_size: {max_batch_size}
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }} ]
{batching}
"""
DELAY = "max_queue_delay_microseconds: 5000"


def policy(batching: str, *, dims: int = 1, max_batch_size: int = 8, instances: int = 1) -> Policy:
    block = f"dynamic_batching {{ {batching} }}"
    text = MODEL.format(max_batch_size=max_batch_size, dims=dims, batching=block)
    return triton_policy(parsing.parse(text, folder_name="m"), instances=instances, max_queue_size=0)


def played(
    of: Policy, arrivals: Sequence[tuple[int, int]], *, took_us: int = 20_000, instances: int = 1
) -> list[tuple[int, tuple[int, ...]]]:
    """Requests of (instant, rows) come, and a batch takes `took_us`: when which requests began together."""
    events: list[tuple[int, int, str, int]] = [(at_us, place, "comes", 0) for place, (at_us, _) in enumerate(arrivals)]
    heapq.heapify(events)
    free, batches, number = list(range(instances)), [], len(arrivals)
    while events:
        now_us, place, what, instance = heapq.heappop(events)
        if what == "comes":
            of.enqueue(QueuedRequest(id=place, rows=arrivals[place][1], batch_key=0, enqueued_us=now_us))
        elif what == "ends":
            free.append(instance)
        while isinstance(decision := of.decide(now_us, free=free), Dispatch):
            free.remove(decision.instance)
            batches.append((now_us, decision.ids))
            assert decision.rows == sum(arrivals[one][1] for one in decision.ids)
            number += 1
            heapq.heappush(events, (now_us + took_us, number, "ends", decision.instance))
        if isinstance(decision, WaitUntil):
            assert decision.at_us > now_us
            number += 1
            heapq.heappush(events, (decision.at_us, number, "wakes", 0))
    return batches


def sizes(batches: Sequence[tuple[int, tuple[int, ...]]]) -> list[int]:
    return [len(ids) for _, ids in batches]


def ones(*at_us: int) -> list[tuple[int, int]]:
    return [(one, 1) for one in at_us]


@pytest.mark.parametrize(
    ("batching", "arrivals", "batches"),
    [
        ("", ones(0, 1000, 2000, 3000, 4000, 5000), [1, 5]),
        ("preferred_batch_size: [ 4 ]", ones(0, *range(1000, 11_000, 1000)), [1, 4, 4, 2]),
        ("", ones(0, *range(1000, 19_000, 1000)), [1, 8, 8, 2]),
        (DELAY, ones(0), [1]),
        (DELAY, ones(0, 1000, 4000), [3]),
        # the first is alone in its payload after 5 ms, the others do not wake the batcher: they stay behind
        (DELAY, ones(0, 6000, 12_000, 13_000, 14_000), [1, 1, 3]),
        # eight of them do wake it: they fill the payload of the first
        (DELAY, ones(0, 6000, *range(12_000, 20_000, 1000)), [1, 8, 1]),
        # a fifth joins four that wait; three more make a payload of their own, which joins at the end
        (f"preferred_batch_size: [ 4 ] {DELAY}", ones(0, 6000, *range(7000, 14_000, 1000)), [1, 8]),
        # nothing is ever split, and nothing overtakes
        ("", [(0, 8), (1000, 5), (2000, 5), (3000, 3)], [1, 1, 2]),
    ],
)
def test_what_is_formed_ahead(batching: str, arrivals: list[tuple[int, int]], batches: list[int]):
    found = played(policy(batching), arrivals)
    assert sizes(found) == batches
    assert [one for _, ids in found for one in ids] == list(range(len(arrivals)))


def test_every_request_wakes_the_batcher_where_shapes_vary():
    assert sizes(played(policy(DELAY, dims=-1), ones(0, 6000, 12_000, 13_000, 14_000))) == [1, 4]


def test_what_does_not_fit_into_the_payload_before_it_stays_as_it_is():
    # four rows stand behind five when those leave: the last, which comes later, stays behind them
    found = played(policy(DELAY, dims=-1), [(0, 1), (6000, 5), (12_000, 4), (41_000, 1)])
    assert found == [(5000, (0,)), (25_000, (1,)), (45_000, (2,)), (65_000, (3,))]


def test_a_lone_request_waits_the_delay():
    assert played(policy(DELAY), ones(1000)) == [(6000, (0,))]


def test_where_nothing_is_formed_ahead_it_is_the_runtimes_batcher():
    assert isinstance(policy(f"{DELAY} priority_levels: 2 default_priority_level: 1"), Batcher)
    assert isinstance(policy("default_queue_policy { max_queue_size: 9 }"), Batcher)
    assert isinstance(policy("", max_batch_size=0), Batcher)
    assert isinstance(policy(""), BatcherAhead)


@pytest.mark.parametrize("seed", range(40))
def test_without_a_delay_rows_of_one_are_batched_as_by_the_runtime(seed: int):
    rng = random.Random(seed)
    at_us, arrivals = 0, []
    for _ in range(300):
        at_us += round(rng.expovariate(1 / 2500)) + 1  # never two at once, where the order of turns would count
        arrivals.append((at_us, 1))
    instances = rng.choice((1, 2))
    late = Batcher(max_batch_size=8, config=parsing.parse(TEXT, folder_name="m").dynamic_batching)
    assert played(policy("", instances=instances), arrivals, instances=instances) == played(
        late, arrivals, instances=instances
    )


TEXT = MODEL.format(max_batch_size=8, dims=1, batching="dynamic_batching { }")


@pytest.mark.parametrize("seed", range(60))
def test_every_request_runs_once_in_order_whatever_comes(seed: int):
    rng = random.Random(seed)
    preferred = rng.choice(("", "preferred_batch_size: [ 4 ]", "preferred_batch_size: [ 3, 6 ]"))
    at_us, arrivals = 0, []
    for _ in range(200):
        at_us += rng.choice((0, 500, 3000, 40_000))
        arrivals.append((at_us, rng.randint(1, 8)))
    instances = rng.choice((1, 3))
    of = policy(f"{preferred} {rng.choice(('', DELAY))}", dims=rng.choice((1, -1)), instances=instances)
    found = played(of, arrivals, took_us=rng.choice((1000, 9000)), instances=instances)
    assert [one for _, ids in found for one in ids] == list(range(len(arrivals)))
    assert all(sum(arrivals[one][1] for one in ids) <= 8 for _, ids in found)
    assert len(of) == 0


def test_who_is_cancelled_leaves_the_queue_but_no_payload():
    of = policy(DELAY)
    for number in range(3):
        of.enqueue(QueuedRequest(id=number, rows=1, batch_key=0, enqueued_us=0))
    assert [one.id for one in of.cancel(1)] == [1]
    assert of.decide(5000, free=()).dropped == ()
    assert of.cancel(2) == ()
    dispatch = of.decide(5000, free=(0,))
    assert isinstance(dispatch, Dispatch)
    assert dispatch.ids == (0, 2)


def test_a_world_says_whose_batches_its_servers_form(tmp_path):
    (tmp_path / "m.pbtxt").write_text(
        MODEL.format(max_batch_size=8, dims=1, batching=f"dynamic_batching {{ {DELAY} }}")
    )
    found = {}
    for engine in ("local", "triton"):
        world = {
            "models": {"m": {"curve": {"compute_us": {"1": 20_000}}, "config": "m.pbtxt"}},
            "backends": {"server": {"engine": engine}},
            "traffic": [{"trace": [0.0, 0.006, 0.012, 0.013, 0.014]}],
            "duration_s": 1.0,
        }
        found[engine] = simulate(parse_world(world, folder=tmp_path)).servers[0].batch_sizes
    assert found == {"local": {1: 1, 4: 1}, "triton": {1: 2, 3: 1}}
