"""What is advised: decisions on tables of outcomes, on small simulations, and on the files of a sweep."""

import json
import math

import pytest

from gateway.core.doctor.facts import Facts, Gate, Request, Server, Setup, Traffic
from gateway.tuning.advising.reading import BatchTimes, curve_of, situations, times_of
from gateway.tuning.advising.search import TRUST, advise, neighbours, world
from gateway.tuning.advising.situation import ENOUGH, LEAST_GAIN, Advice, Outlook, Part, Setting, Situation
from gateway.tuning.advising.sweeps import SweepFault, at_rate, measured
from gateway.tuning.curves import LatencyCurve
from gateway.tuning.report import ClassReport as Whole
from gateway.tuning.report import Percentiles, Report, ServerReport
from gateway.tuning.simulation.world import parse_world
from gateway.tuning.slo import Slo

CURVE = LatencyCurve(model="m", compute_us={1: (4000.0,), 8: (6000.0,), 32: (14_000.0,)}, source="a table")
ONE = (Part(priority="interactive", rate=50.0),)
CALLERS = (Part(priority="interactive", callers=32),)
MIXED = (Part(priority="interactive", rate=30.0), Part(priority="batch", callers=32, rows=16))


def situation(**changed) -> Situation:
    plain = {
        "backend": "triton",
        "model": "m",
        "setting": Setting(max_batch_size=8, delay_us=0),
        "curve": CURVE,
        "parts": ONE,
        "largest": 32,
    }
    return Situation(**plain | changed)


def table(now: Outlook, **better: Outlook):
    """A simulator that knows the setting as it is and, by the field that differs, some others."""

    def simulated(one: Situation, slo_ms: float, seed: int) -> Outlook:
        for name, then in better.items():
            field, _, value = name.rpartition("_")
            if str(getattr(one.setting, field)) == value:
                return then
        return now

    return simulated


NOW = Outlook(p99_ms=100.0, rows_per_s=50.0, busy=0.3, at_server_ms=10.0)


# --- one change, or none ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("p99_ms", "is_advised"), [(89.0, True), (91.0, False)])
def test_a_change_is_advised_from_a_tenth_on(p99_ms, is_advised):
    then = Outlook(p99_ms=p99_ms, rows_per_s=50.0)
    told = advise(situation(), simulated=table(NOW, max_batch_size_16=then))
    assert (told.advised is not None) is is_advised
    assert told.gain == pytest.approx(0.11 if is_advised else 0.0)
    assert LEAST_GAIN == 0.1


def test_a_better_p99_that_costs_throughput_is_no_advice():
    then = Outlook(p99_ms=10.0, rows_per_s=47.0)
    told = advise(situation(), simulated=table(NOW, max_batch_size_16=then))
    assert told.advised is None
    assert "none of 5 neighbours" in told.because


def test_throughput_that_costs_p99_is_no_advice():
    then = Outlook(p99_ms=120.0, rows_per_s=100.0)
    told = advise(situation(parts=CALLERS, qps=50.0), simulated=table(NOW, max_batch_size_16=then))
    assert told.advised is None


def test_what_is_better_by_one_seed_alone_is_no_advice():
    lucky = Outlook(p99_ms=50.0, rows_per_s=50.0)

    def simulated(one, slo_ms, seed):
        return lucky if seed == 1 and one.setting.max_batch_size == 16 else NOW

    assert advise(situation(), simulated=simulated).advised is None


def test_a_setting_that_keeps_its_target_is_right():
    told = advise(situation(), slo=Slo(ms=150), simulated=table(NOW))
    assert told.advised is None
    assert told.because == "100.0% of the requests are answered within 150 ms"


def test_a_missed_target_is_what_counts():
    now, then = (Outlook(p99_ms=200.0, rows_per_s=50.0, good=good) for good in (0.5, 0.9))
    told = advise(situation(), slo=Slo(ms=150), simulated=table(now, delay_us_500=then))
    assert told.advised == Setting(max_batch_size=8, delay_us=500)
    assert told.gain == pytest.approx(0.8)
    assert "50.0% -> 90.0% in time" in told.evidence[-1]


@pytest.mark.parametrize(("seen_ms", "is_trusted"), [(10 * TRUST - 0.1, True), (10 * TRUST + 0.1, False)])
def test_a_simulation_that_misses_what_was_seen_is_not_asked(seen_ms, is_trusted):
    then = Outlook(p99_ms=10.0, rows_per_s=50.0)
    told = advise(situation(at_server_ms=seen_ms), simulated=table(NOW, max_batch_size_16=then))
    assert (told.advised is not None) is is_trusted
    assert is_trusted or "does not come near what was seen" in told.because


def test_an_instance_more_is_the_last_resort_and_says_what_it_needs():
    more = Outlook(p99_ms=20.0, rows_per_s=50.0)
    busy = Outlook(p99_ms=100.0, rows_per_s=50.0, busy=0.9)
    also = {"max_batch_size_16": Outlook(p99_ms=80.0, rows_per_s=50.0)}
    assert advise(situation(), simulated=table(NOW, instances_2=more)).advised is None  # 30 % busy
    told = advise(situation(), simulated=table(busy, instances_2=more))
    assert told.advised == Setting(max_batch_size=8, instances=2)
    assert "memory of its own" in told.assumes[-1]
    told = advise(situation(), simulated=table(busy, instances_2=more, **also))
    assert told.advised == Setting(max_batch_size=16)
    told = advise(situation(knows_more_instances=True), simulated=table(busy, instances_2=more, **also))
    assert told.advised == Setting(max_batch_size=8, instances=2)


def test_neighbours_can_be_served():
    def told(**changed):
        return [str(one) for one in neighbours(situation(**changed))]

    assert not any("max_batch_size 16" in one for one in told(largest=15))
    assert not any("max_batch_size 4" in one for one in told(preferred=(8,)))
    assert not any("max_batch_size 4" in one for one in told(least=5))
    unbatched = told(setting=Setting(max_batch_size=0, is_batching=False, instances=2))
    assert unbatched == [
        "max_batch_size 0, no dynamic_batching, 3 instances",
        "max_batch_size 0, no dynamic_batching, 1 instance",
    ]
    assert told(setting=Setting(max_batch_size=8, is_batching=False))[0].startswith("max_batch_size 8, delay 0 us")


def test_each_worker_has_its_own_gate():
    gated = list(neighbours(situation(parts=MIXED, workers=4, setting=Setting(max_batch_size=64))))
    assert gated[-1].max_in_flight == 8  # two batches of 64 rows are eight requests of 16


# --- by the simulator ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "advised"),
    [
        ({"setting": Setting(max_batch_size=8, delay_us=5000)}, Setting(max_batch_size=8, delay_us=0)),
        ({"setting": Setting(max_batch_size=8, delay_us=0)}, None),
        ({"parts": CALLERS, "qps": 1300.0}, Setting(max_batch_size=16)),
        ({"parts": CALLERS, "qps": 2200.0, "setting": Setting(max_batch_size=32)}, None),
        (
            {"parts": MIXED, "qps": 160.0, "setting": Setting(max_batch_size=32)},
            Setting(max_batch_size=32, max_in_flight=4),
        ),
    ],
    ids=["delay", "right", "larger batches", "large enough", "interactive behind batch"],
)
def test_the_simulator_decides(changed, advised, monkeypatch):
    monkeypatch.setattr("gateway.tuning.advising.search.REQUESTS", 400)
    monkeypatch.setattr("gateway.tuning.advising.search.WATCHED", 100)
    told = advise(situation(**changed))
    assert told.advised == advised
    assert told.evidence[0].startswith("as it is: ")


def test_what_is_simulated_is_what_was_seen():
    one = situation(
        parts=MIXED,
        preferred=(4, 8),
        queue_timeout_us=7000,
        servers=3,
        setting=Setting(max_batch_size=32, max_in_flight=12),
    )
    read = parse_world(world(one, 20.0))
    batching = read.models["m"].config.dynamic_batching
    assert batching.preferred_batch_size == (4, 8)
    assert batching.default_queue_policy.default_timeout_microseconds == 7000
    assert (read.backends["triton"].replicas, read.backends["triton"].max_in_flight) == (3, 12)
    assert [(each.traffic.name, each.traffic.rows, each.traffic.slo_ms) for each in read.traffic] == [
        ("interactive", 1, 20.0),
        ("batch", 16, 20.0),
    ]


# --- two looks -------------------------------------------------------------------------------------------


def stats(*sizes: tuple[int, int, float], version: str = "1"):
    """A server's word; of each size its batches and the mean of one in ms, in three stages."""
    batches = [
        {
            "batch_size": str(rows),
            "compute_input": {"count": str(count), "ns": str(int(count * ms * 1e5))},
            "compute_infer": {"count": str(count), "ns": str(int(count * ms * 8e5))},
            "compute_output": {"count": str(count), "ns": str(int(count * ms * 1e5))},
        }
        for rows, count, ms in sizes
    ]
    return {"model_stats": [{"name": "m", "version": version, "batch_stats": batches}]}


def test_times_are_what_was_counted_between_the_looks_at_all_servers():
    before = [stats((1, 100, 9.0)), stats((4, 10, 5.0))]
    after = [stats((1, 150, 7.0), (4, 10, 8.0)), stats((4, 30, 5.0))]
    found = times_of(before, after)["m"]
    assert found[1] == BatchTimes(count=50, total_us=pytest.approx(150_000))  # 150 * 7 - 100 * 9 ms
    assert found[4] == BatchTimes(count=30, total_us=pytest.approx(180_000))


def test_a_version_that_counts_anew_is_left_out():
    assert times_of([stats((1, 100, 9.0))], [stats((1, 60, 9.0))]) == {}


def test_a_curve_is_means_and_the_line_beyond_them():
    line = {rows: BatchTimes(count=20, total_us=20 * (2000.0 + 500 * rows)) for rows in (2, 4, 8)}
    curve, largest = curve_of("m", line)
    assert largest == 16
    assert curve.compute_us[8] == (6000.0,)
    assert curve.compute_us[16] == pytest.approx((10_000.0,))
    assert curve.compute_us[1] == pytest.approx((2500.0,))
    assert "8: 6.0 ms (20)" in curve.source


def test_of_one_size_nothing_is_known_of_others():
    curve, largest = curve_of("m", {4: BatchTimes(count=10, total_us=1e5), 8: BatchTimes(count=9, total_us=1e5)})
    assert (largest, curve.compute_us) == (4, {4: (10_000.0,)})
    assert curve_of("m", {4: BatchTimes(count=9, total_us=1e5)}) is None


def facts(*, requests: int = 1000, busy: float = 0.4, mix: tuple[int, int] = (0, 0), **changed) -> Facts:
    """One model on two servers, of two instances each; 10 s; batches of two requests of 3 rows, 10 ms each."""
    compute_s = busy * 4 * 10.0 * 2  # each request of a batch counts it
    traffic = Traffic(
        window_s=10.0,
        requests=requests,
        rows=3 * requests,
        executions=requests // 2,
        queue_s=requests * 0.002,
        compute_s=compute_s,
    )
    here = [
        Request(key="k", priority=priority, code="ok", backend="triton", model="m", total_ms=1.0, stands_for=count)
        for priority, count in zip(("interactive", "batch"), mix, strict=True)
        if count
    ]
    plain = {
        "window_s": 10.0,
        "setups": [Setup(backend="triton", model="m", max_batch_size=8, is_batching=True, delay_us=500, instances=2)],
        "traffic": {("triton", "m"): traffic},
        "gates": [Gate(backend="triton", max_in_flight=16, waiting=4, workers=2, servers=2)],
        "servers": [Server(backend="triton", replica=name, requests=1) for name in "ab"],
        "requests": here,
    }
    return Facts(**plain | changed)


TIMES = {("triton", "m"): {6: BatchTimes(count=100, total_us=1e6), 3: BatchTimes(count=100, total_us=8e5)}}


def test_a_situation_is_what_was_seen():
    (one,) = situations(facts(), TIMES, texts={})
    assert one.setting == Setting(max_batch_size=8, delay_us=500, instances=2, max_in_flight=32)
    assert one.parts == (Part(priority="interactive", rate=100.0, rows=3),)
    assert (one.servers, one.workers, one.least, one.largest) == (2, 2, 3, 12)
    assert one.at_server_ms == pytest.approx(34.0)


def test_what_is_not_known_of_other_sizes_is_said():
    one_size = {("triton", "m"): {6: BatchTimes(count=100, total_us=1e6)}}
    (one,) = situations(facts(), one_size, texts={})
    assert one.assumes[-1] == "smaller batches, none of which was seen, take as long as those of 6 rows"
    (one,) = situations(facts(), TIMES, texts={})
    assert not any("smaller batches" in line for line in one.assumes)


def test_a_busy_server_has_callers():
    (one,) = situations(facts(busy=0.9), TIMES, texts={})
    assert one.parts == (Part(priority="interactive", callers=11, rows=3),)  # 7.4 at the servers, 4 at the gateway
    assert "ask again at once" in one.assumes[-1]


def test_of_two_priorities_the_batch_ones_are_the_callers():
    (one,) = situations(facts(busy=0.9, mix=(25, 75)), TIMES, texts={})
    assert one.parts == (
        Part(priority="interactive", rate=25.0, rows=3),
        Part(priority="batch", callers=8, rows=3),
    )
    (one,) = situations(facts(mix=(25, 75)), TIMES, texts={})
    assert one.parts[1] == Part(priority="batch", rate=75.0, rows=3)
    (one,) = situations(facts(mix=(4, 75)), TIMES, texts={})
    assert [part.priority for part in one.parts] == ["batch"]


@pytest.mark.parametrize(
    ("seen", "times", "text", "because"),
    [
        (
            facts(requests=ENOUGH - 1),
            TIMES,
            "",
            "299 requests in 10 s are too few: 300 are needed, so at this rate --for 11s",
        ),
        (facts(), {}, "", "(--server)"),
        (facts(), {("triton", "m"): {3: BatchTimes(count=9, total_us=1.0)}}, "", "look for longer"),
        (facts(), TIMES, 'parameters { key: "ADAPTIVE_BATCHING" }', "adaptive"),
        (facts(setups=[Setup(backend="triton", model="m", steps=("a",))]), TIMES, "", "an ensemble"),
        (facts(setups=[Setup(backend="triton", model="m", is_sequence=True)]), TIMES, "", "sequences"),
        (facts(setups=[Setup(backend="triton", model="m", faults={"dynamic_batching": "no"})]), TIMES, "", "doctor"),
    ],
)
def test_of_some_nothing_is_said_and_why(seen, times, text, because):
    (told,) = situations(seen, times, texts={"": text})
    assert isinstance(told, Advice)
    assert told.advised is None
    assert because in told.because


# --- a sweep ---------------------------------------------------------------------------------------------


def run(
    *, size: int = 8, delay_us: int = 0, goodput: float = 100.0, sent: int = 1000, batching: str = "dynamic", at=16
):
    times = Percentiles(mean=1.0, p50=1.0, p90=1.0, p95=1.0, p99=9.0, p99_9=9.0, max=9.0)
    whole = Whole(
        name="all",
        slo_ms=0.0,
        sent=sent,
        codes={"ok": sent},
        unfinished=0,
        offered=goodput,
        qps=goodput,
        rows_per_s=goodput,
        goodput=goodput,
        latency=times,
    )
    server = ServerReport(
        backend="b", model="m", executions=1, mean_batch=4.0, queue_ms=1.0, compute_ms=1.0, queue_share=0.5
    )
    report = Report(kind="load", title="", setting={}, seconds=1.0, whole=whole, servers=(server,))
    setting = {"max_batch_size": size, "count": 1, "delay_us": delay_us, "preferred": [], "batching": batching}
    return {"setting": setting, "load": {"concurrency": at, "rate": 0.0}, "report": report.as_json(), "error": ""}


def sweep(found, chosen, **changed):
    document = {
        "form": "sweep/1",
        "model": "m",
        "place": "here",
        "goal": {"p99_ms": 0.0, "memory_bytes": 0},
        "cells": 20,
        "runs": [found, chosen],
        "found": 0,
        "chosen": 1,
    }
    return json.loads(json.dumps(document | changed))


def test_a_sweep_is_its_own_evidence():
    told = measured(sweep(run(), run(size=16, goodput=150.0)))
    assert told.advised == Setting(max_batch_size=16)
    assert told.gain == pytest.approx(0.5)
    assert told.because == "max_batch_size 8 -> 16"
    assert "best: max_batch_size 16, delay 0 us, 1 instance" in told.evidence[1]
    assert "150.0 right answers/s at 16 in flight, p99 9.0 ms, mean batch 4.0" in told.evidence[1]


@pytest.mark.parametrize(
    ("chosen", "because"),
    [
        (run(), "nothing that was measured was better"),
        (run(size=16, goodput=109.0), "+9% more"),
        (run(size=16, goodput=150.0, sent=ENOUGH - 1), "a run had 299 requests: 300 are needed"),
        (run(size=16, goodput=150.0, at=4), "not measured at the load of the best one (4 in flight)"),
    ],
)
def test_a_sweep_that_says_too_little_changes_nothing(chosen, because):
    told = measured(sweep(run(), chosen))
    assert told.advised is None
    assert because in told.because


def test_a_sweep_at_another_rate_is_simulated_on_its_curve():
    one = at_rate(sweep(run(delay_us=5000), run()), CURVE, rate=40.0)
    assert (one.setting.delay_us, one.parts[0].rate, one.largest) == (5000, 40.0, 32)
    assert not one.knows_more_instances
    told = advise(one, simulated=table(NOW, delay_us_0=Outlook(p99_ms=50.0, rows_per_s=50.0)))
    assert told.because == "max_queue_delay_microseconds 5000 -> 0"


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"form": "sweep/2"},
        sweep(run(), run(), runs=[]),
        sweep({**run(), "report": None, "error": "no memory"}, run(size=16)),
        sweep(run(), {**run(size=16), "report": {"form": "other"}}),
    ],
)
def test_what_is_no_sweep_is_refused(document):
    with pytest.raises(SweepFault, match=r"^sweep\.json: "):
        measured(document)


def test_a_gain_over_nothing_is_without_bound():
    told = measured(sweep(run(goodput=0.0), run(size=16, goodput=150.0)))
    assert math.isinf(told.gain)


def test_a_version_whose_time_goes_back_is_left_out():
    def told(count, ns):
        sizes = [{"batch_size": 1, "compute_infer": {"count": count, "ns": ns}}]
        return {"model_stats": [{"name": "m", "version": "1", "batch_stats": sizes}]}

    assert times_of([told(5, 10**9)], [told(50, 1)]) == {}
    assert times_of([told(5, 1000)], [told(50, 10_000)])["m"][1].count == 45
