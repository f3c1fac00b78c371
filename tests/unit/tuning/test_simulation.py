"""What must hold of every simulation, what is known of some by formula, and what breaks in them."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.pipeline import Pipeline
from gateway.tuning.report import OK, Report, parse_report
from gateway.tuning.simulation.run import simulate
from gateway.tuning.simulation.world import parse_world

BATCHED = {"curve": {"compute_us": {"1": 3000, "8": 6500}}, "max_batch_size": 8, "dynamic_batching": {}}


def fixed(us: float) -> dict[str, Any]:
    """A model that takes that long for each request, one at a time."""
    return {"curve": {"compute_us": {"1": us}}}


def run(seed: int = 0, **sections: Any) -> Report:
    world = {"models": {"m": BATCHED}, "backends": {"triton": {}}, "traffic": [{"rate": 100.0}], "duration_s": 2.0}
    return simulate(parse_world(world | sections), seed=seed)


# --- of every world ------------------------------------------------------------------------------------

_classes = st.fixed_dictionaries(
    {"tenant": st.sampled_from(["a", "b"]), "priority": st.sampled_from(["interactive", "batch"])},
    optional={"slo_ms": st.sampled_from([5.0, 50.0]), "rows": st.integers(1, 4), "ordering_keys": st.integers(1, 3)},
)
_much = st.one_of(
    st.builds(
        lambda rate, shape: {"rate": rate, "arrivals": shape},
        st.sampled_from([20.0, 150.0, 600.0]),
        st.sampled_from(["poisson", "constant", "bursty"]),
    ),
    st.builds(lambda n, think: {"concurrency": n, "think_ms": think}, st.integers(1, 12), st.sampled_from([0.0, 3.0])),
    st.just({"trace": [0.0, 0.0, 0.1, 0.1, 0.4]}),
)
_failures = st.lists(
    st.builds(
        lambda at_s, replica, kind: {
            "backend": "triton",
            "at_s": at_s,
            "for_s": 0.3,
            "replica": replica,
            "kind": kind,
            "times": 5.0 if kind == "slow" else 1.0,
        },
        st.sampled_from([0.0, 0.1, 0.5]),
        st.integers(0, 1),
        st.sampled_from(["dead", "slow", "refusing"]),
    ),
    max_size=2,
)
_worlds = st.fixed_dictionaries(
    {
        "models": st.fixed_dictionaries(
            {
                "m": st.fixed_dictionaries(
                    {
                        "curve": st.just(
                            {"compute_us": {"1": [900, 1000, 4000], "8": [2000, 7000]}, "overhead_us": 200}
                        ),
                        "max_batch_size": st.sampled_from([4, 8]),
                        "dynamic_batching": st.sampled_from(
                            [
                                {},
                                {"max_queue_delay_microseconds": 2000, "preferred_batch_size": [4]},
                                {"default_queue_policy": {"max_queue_size": 3}},
                                {"default_queue_policy": {"default_timeout_microseconds": 4000}},
                                {"preserve_ordering": True},
                            ]
                        ),
                        "parameters": st.sampled_from([{}, {"ADAPTIVE_BATCHING": "true"}]),
                        "instances": st.integers(1, 2),
                    }
                )
            }
        ),
        "backends": st.just({"triton": {"replicas": 2, "max_in_flight": 16, "max_queue_size": 20}}),
        "traffic": st.lists(st.builds(lambda c, m: c | m, _classes, _much), min_size=1, max_size=2).map(
            lambda classes: [one | {"name": f"c{place}"} for place, one in enumerate(classes)]
        ),
        "failures": _failures,
        "tasks": st.just({"t": {"timeout_ms": 400, "attempt_timeout_ms": 150}}),
        "duration_s": st.just(0.6),
        "warmup_s": st.sampled_from([0.0, 0.2]),
    }
)


@settings(max_examples=12)
@given(world=_worlds, seed=st.integers(0, 5))
def test_every_request_ends_once_and_in_time_and_the_seed_decides_all(world: dict[str, Any], seed: int) -> None:
    told: list[float] = []
    found = simulate(parse_world(world), seed=seed, on_progress=told.append)
    for one in (found.whole, *found.classes):
        assert one.sent == sum(one.codes.values())  # none twice, none lost
        assert one.unfinished == 0
    assert found.whole.sent == sum(one.sent for one in found.classes)
    assert told == sorted(told)
    assert set(found.whole.codes) <= {OK, "queue_full", "deadline_exceeded", "no_healthy_backend", "backend_error"}
    if found.whole.latency is not None:
        assert found.whole.latency.max <= 400 + 1e-3
        least = min(found.whole.latency.p50, found.whole.latency.mean)
        assert least >= 0.9 + 0.2 - 1e-3  # the fastest batch, and the way there and back
    assert all(0 <= one.busy <= 1 + 1e-9 for one in found.servers if one.busy is not None)
    assert simulate(parse_world(world), seed=seed) == found
    assert parse_report(found.as_json()) == found


def test_another_seed_is_another_day() -> None:
    assert run(seed=1).whole.latency != run(seed=2).whole.latency


# --- what is known ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "count"), [(0.3, 15_000), (0.7, 15_000), (0.85, 40_000)])
def test_requests_that_take_the_same_time_wait_as_the_formula_says(load: float, count: int) -> None:
    """M/D/1: the mean wait is load * service / (2 (1 - load))."""
    service_ms = 2.0
    rate = load / service_ms * 1e3
    found = run(
        models={"m": fixed(service_ms * 1e3)}, traffic=[{"rate": rate}], duration_s=count / rate + 2, warmup_s=2.0
    )
    wait_ms = found.servers[0].queue_ms
    came = found.whole.offered * service_ms / 1e3  # which is the load, but for chance
    assert wait_ms == pytest.approx(came * service_ms / (2 * (1 - came)), rel=0.05)
    assert found.servers[0].busy == pytest.approx(load, rel=0.03)
    assert found.whole.latency.mean == pytest.approx(wait_ms + service_ms, rel=0.01)


def test_of_times_by_chance_as_many_are_there_as_come_while_one_is() -> None:
    """M/M/1 and Little's law: at 60 % load there are 0.6 / 0.4 = 1.5 requests on average."""
    rng = random.Random(3)
    times_us = [rng.expovariate(1 / 2000) for _ in range(4000)]
    mean_us = sum(times_us) / len(times_us)
    rate = 0.6 / mean_us * 1e6
    found = run(models={"m": fixed(times_us)}, traffic=[{"rate": rate}], duration_s=52.0, warmup_s=2.0)
    there = found.whole.qps * found.whole.latency.mean / 1e3
    assert there == pytest.approx(1.5, rel=0.12)
    servers = found.servers[0]
    assert servers.queue_ms + servers.compute_ms == pytest.approx(found.whole.latency.mean, rel=0.01)


def test_callers_that_wait_are_as_fast_as_their_turns() -> None:
    found = run(models={"m": fixed(5000)}, traffic=[{"concurrency": 4, "think_ms": 20.0}], duration_s=10.0)
    assert found.whole.qps == pytest.approx(1e3 / 25 * 4, rel=0.01)  # they fall into step: none waits for another


def test_a_batch_takes_what_the_curve_says_of_its_size() -> None:
    found = run(models={"m": BATCHED}, traffic=[{"concurrency": 8}], duration_s=4.0, warmup_s=1.0)
    servers = found.servers[0]
    assert servers.batch_sizes.keys() <= {1, 2, 3, 4, 5, 6, 7, 8}
    rows = sum(size * count for size, count in servers.batch_sizes.items())
    each_us = sum((3000 + 500 * (size - 1)) * count for size, count in servers.batch_sizes.items())
    assert servers.busy == pytest.approx(each_us / 3e6, rel=0.01)
    assert servers.mean_batch == rows / servers.executions


def test_a_delay_makes_batches_and_costs_the_lonely() -> None:
    lonely = {"rate": 10.0, "arrivals": "constant"}
    late = BATCHED | {"dynamic_batching": {"max_queue_delay_microseconds": 4000}}
    found = run(models={"m": late}, traffic=[lonely])
    assert found.whole.latency.p50 == pytest.approx(7.0, abs=0.01)
    busy = run(models={"m": late}, traffic=[{"rate": 600.0}]).servers[0]
    eager = run(traffic=[{"rate": 600.0}]).servers[0]
    assert busy.mean_batch > eager.mean_batch


def test_instances_that_are_busy_at_once_slow_each_other_down() -> None:
    curve = {"compute_us": {"1": 2000}, "slowdown": {"1": 1.0, "2": 2.0}}
    found = run(models={"m": {"curve": curve, "instances": 2}}, traffic=[{"trace": [0.0, 0.0]}])
    assert (found.whole.latency.p50, found.whole.latency.max) == (pytest.approx(2.0), pytest.approx(4.0))


def test_the_way_there_and_back_is_on_top_of_all() -> None:
    curve = {"compute_us": {"1": 2000}, "overhead_us": 300}
    found = run(models={"m": {"curve": curve}}, backends={"triton": {"overhead_us": 700}}, traffic=[{"trace": [0.5]}])
    assert found.whole.latency.max == pytest.approx(3.0)
    assert found.servers[0].queue_ms == 0


def test_price_is_of_the_servers_and_of_the_counted_time() -> None:
    found = run(backends={"triton": {"replicas": 3, "usd_per_hour": 36.0}}, duration_s=12.0, warmup_s=2.0)
    assert found.cost_usd == pytest.approx(3 * 36.0 * 10 / 3600)


# --- what the gateway does ---------------------------------------------------------------------------------


def test_a_replica_that_dies_is_left_alone_and_used_again_when_it_is_back() -> None:
    """What it had to do is tried again; a breaker keeps requests from it, and a probe brings it back."""
    failure = {"at_s": 3.0, "for_s": 4.0, "backend": "triton", "replica": 1}
    traffic = [{"rate": 200.0, "arrivals": "constant"}]
    three = {"triton": {"replicas": 3}}
    found = run(backends=three, traffic=traffic, duration_s=12.0, failures=[failure])
    assert found.whole.codes == {OK: 2399}
    well = run(backends=three, traffic=traffic, duration_s=12.0)
    # Two of three do the work of all for four seconds.
    busy, usual = found.servers[0].busy, well.servers[0].busy
    assert busy == pytest.approx(usual, rel=0.05)
    alone = run(backends={"triton": {}}, traffic=traffic, duration_s=12.0, failures=[{**failure, "replica": 0}])
    failed = {second.at_s: second.failed for second in alone.timeline}
    assert sum(alone.whole.codes.values()) == 2399
    assert all(failed[second] == 200 for second in (4.0, 5.0))
    assert all(failed[second] == 0 for second in (0.0, 1.0, 2.0, 8.0, 9.0, 10.0, 11.0))  # probes run every second
    assert set(alone.whole.codes) == {OK, "no_healthy_backend"}


def test_one_that_says_it_is_not_ready_is_left_alone_too() -> None:
    failure = {"at_s": 1.0, "for_s": 2.0, "backend": "triton", "replica": 0, "kind": "refusing"}
    found = run(backends={"triton": {"replicas": 2}}, duration_s=4.0, failures=[failure])
    assert set(found.whole.codes) == {OK}
    alone = run(duration_s=6.0, failures=[failure])
    assert alone.whole.codes["no_healthy_backend"] > 150


def test_one_that_is_slow_for_a_while_is_slow_for_that_while() -> None:
    failure = {"at_s": 2.0, "for_s": 2.0, "backend": "triton", "kind": "slow", "times": 3.0}
    found = run(traffic=[{"rate": 20.0, "arrivals": "constant"}], duration_s=6.0, failures=[failure])
    assert [second.p50 for second in found.timeline] == pytest.approx([3.0, 3.0, 9.0, 9.0, 3.0, 3.0], abs=0.01)


def test_failures_of_one_replica_that_overlap_all_last_as_long_as_they_say() -> None:
    traffic = [{"rate": 20.0, "arrivals": "constant"}]
    slow = [
        {"at_s": 1.0, "for_s": 2.0, "backend": "triton", "kind": "slow", "times": 3.0},
        {"at_s": 2.0, "for_s": 2.0, "backend": "triton", "kind": "slow", "times": 2.0},
    ]
    found = run(traffic=traffic, duration_s=5.0, failures=slow)
    assert [second.p50 for second in found.timeline] == pytest.approx([3.0, 9.0, 18.0, 6.0, 3.0], abs=0.01)
    dead = [{"at_s": at_s, "for_s": for_s, "backend": "triton"} for at_s, for_s in ((1.0, 1.0), (1.5, 2.5))]
    as_one = [{"at_s": 1.0, "for_s": 3.0, "backend": "triton"}]
    lasting = run(traffic=traffic, duration_s=5.0, failures=dead)
    assert lasting.whole.codes == run(traffic=traffic, duration_s=5.0, failures=as_one).whole.codes


def test_a_caller_that_thinks_beyond_the_end_does_not_keep_the_simulation_going() -> None:
    found = run(traffic=[{"concurrency": 1, "think_ms": 1e300}])
    assert found.whole.codes == {OK: 1}


def test_who_is_over_the_limit_is_refused_and_others_are_not() -> None:
    found = run(
        traffic=[
            {"name": "greedy", "rate": 100.0, "arrivals": "constant", "tenant": "greedy"},
            {"name": "modest", "rate": 100.0, "arrivals": "constant", "tenant": "modest"},
        ],
        limits={"greedy": [{"requests": 20, "per": "second", "burst": 1}]},
        duration_s=10.0,
    )
    greedy, modest = found.classes
    assert greedy.codes["rate_limited"] == pytest.approx(800, abs=2)
    assert greedy.codes[OK] == pytest.approx(200, abs=2)
    assert modest.codes == {OK: 999}


def test_a_limit_of_requests_at_once_is_held() -> None:
    limits = {"load": [{"concurrent": 2}]}
    found = run(models={"m": fixed(10_000)}, traffic=[{"trace": [0.1] * 5}], limits=limits)
    assert found.whole.codes == {OK: 2, "rate_limited": 3}


def test_requests_of_one_key_go_one_after_another() -> None:
    """Four instances are there, and one key's requests use one of them at a time."""
    rule = {"name": "r", "match": {}, "split": [{"backend": "triton", "model": "m"}], "ordering": {"mode": "serial"}}
    model = fixed(10_000) | {"instances": 4}
    at_once = {"trace": [0.1] * 4}
    ordered = run(models={"m": model}, rules=[rule], traffic=[at_once | {"ordering_keys": 1}])
    assert ordered.whole.latency.max == pytest.approx(40.0, abs=0.01)
    two = run(models={"m": model}, rules=[rule], traffic=[at_once | {"ordering_keys": 2}])
    assert two.whole.latency.max == pytest.approx(20.0, abs=0.01)
    free = run(models={"m": model}, rules=[rule], traffic=[at_once])
    assert free.whole.latency.max == pytest.approx(10.0, abs=0.01)


def test_interactive_requests_pass_the_others_at_a_full_server() -> None:
    traffic = [
        {"name": "now", "rate": 60.0, "priority": "interactive"},
        {"name": "bulk", "concurrency": 40, "priority": "batch"},
    ]
    found = run(models={"m": fixed(4000)}, backends={"triton": {"max_in_flight": 1}}, traffic=traffic, duration_s=5.0)
    now, bulk = found.classes
    assert now.latency.p50 < 10
    assert bulk.latency.p50 > 100


def test_a_models_own_priorities_are_its_schedulers() -> None:
    levels = {"priority_levels": 2, "default_priority_level": 2}
    model = {"curve": {"compute_us": {"1": 4000}}, "max_batch_size": 1, "dynamic_batching": levels}
    first = {"name": "first", "rate": 60.0, "model_priority": 1}
    found = run(models={"m": model}, traffic=[first, {"name": "bulk", "concurrency": 40}], duration_s=5.0)
    assert found.classes[0].latency.p50 < 10
    assert found.classes[1].latency.p50 > 100


def test_weights_and_fallbacks_are_the_rules() -> None:
    rule = {
        "name": "r",
        "match": {},
        "split": [{"backend": "a", "model": "m", "weight": 3}, {"backend": "b", "model": "m", "weight": 1}],
        "fallback": [{"backend": "c", "model": "m"}],
    }
    found = run(
        backends={"a": {}, "b": {}, "c": {}},
        rules=[rule],
        traffic=[{"rate": 200.0}],
        duration_s=20.0,
        models={"m": fixed(100)},
    )
    counts = {one.backend: one.executions for one in found.servers}
    assert counts.keys() == {"a", "b"}
    assert counts["a"] / 4000 == pytest.approx(0.75, abs=0.03)
    dead = [{"at_s": 0.0, "backend": name} for name in "ab"]
    rest = run(backends={"a": {}, "b": {}, "c": {}}, rules=[rule], models={"m": fixed(100)}, failures=dead)
    assert {one.backend for one in rest.servers} == {"c"}
    assert set(rest.whole.codes) == {OK}


def test_copies_go_to_a_shadow_and_are_nobodys_requests() -> None:
    rule = {
        "name": "r",
        "match": {},
        "split": [{"backend": "a", "model": "m"}],
        "shadow": {"backend": "b", "model": "m", "percent": 50},
    }
    found = run(backends={"a": {}, "b": {}}, rules=[rule], duration_s=10.0)
    counts = {one.backend: one.executions for one in found.servers}
    assert found.whole.sent == pytest.approx(1000, rel=0.15)
    assert counts["b"] / found.whole.sent == pytest.approx(0.5, abs=0.1)


def test_a_request_looks_at_two_of_many_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    really = Pipeline.why_not
    monkeypatch.setattr(Pipeline, "why_not", lambda self, place: looked.append(place.replica) or really(self, place))
    found = run(backends={"triton": {"replicas": 100}}, duration_s=4.0)
    assert found.whole.codes[OK] == found.whole.sent
    assert len(looked) == 2 * found.whole.sent
    assert len(set(looked)) == 100


def test_a_fault_of_the_gateway_is_not_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "why_not", lambda *_: 1 / 0)
    with pytest.raises(ExceptionGroup) as broke:
        run()
    assert broke.group_contains(Exception, match="the gateway failed on this request")
