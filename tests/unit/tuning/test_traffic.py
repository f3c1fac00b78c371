import itertools
import random
import statistics
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tuning.traffic import TrafficClass, TrafficError, arrivals, check_amount, parse_class

SHAPES = ("poisson", "constant", "bursty")


def instants(seconds=1000.0, seed=0, **fields):
    return list(arrivals(TrafficClass(**fields), random.Random(seed), duration_s=seconds))


@pytest.mark.parametrize("shape", SHAPES)
def test_so_many_come_as_the_rate_says(shape):
    assert len(instants(rate=20, arrivals=shape)) == pytest.approx(20_000, rel=0.05)


@pytest.mark.parametrize(("shape", "squared"), [("poisson", 1.0), ("constant", 0.0), ("bursty", 4.0)])
def test_the_shape_is_that_of_the_gaps(shape, squared):
    times = instants(rate=20, arrivals=shape)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.pvariance(gaps) / statistics.mean(gaps) ** 2 == pytest.approx(squared, rel=0.15, abs=1e-9)


def test_a_ramp_goes_evenly_from_one_rate_to_the_other():
    times = instants(rate=10, ramp_to=30, arrivals="constant")
    assert len(times) == pytest.approx(20_000, abs=1)
    assert sum(at < 500 for at in times) == pytest.approx(500 * 15, abs=1)
    assert times[1] - times[0] == pytest.approx(1 / 10, rel=0.01)
    assert times[-1] - times[-2] == pytest.approx(1 / 30, rel=0.01)


@given(
    shape=st.sampled_from(SHAPES),
    rate=st.floats(0.5, 50),
    ramp_to=st.floats(0.0, 50),
    seed=st.integers(0, 9),
)
def test_instants_are_in_order_within_the_run_and_the_same_for_a_seed(shape, rate, ramp_to, seed):
    fields = {"rate": rate, "ramp_to": ramp_to, "arrivals": shape}
    times = instants(10.0, seed, **fields)
    assert times == sorted(times)
    assert all(0 < at < 10.0 + 1e-9 for at in times)
    assert times == instants(10.0, seed, **fields)


def test_a_trace_is_played_again_as_fast_as_it_was_or_faster():
    trace = (0.0, 0.5, 3.0, 8.0)
    assert instants(5.0, trace=trace) == [0.0, 0.5, 3.0]
    assert instants(5.0, trace=trace, speed=2.0) == [0.0, 0.25, 1.5, 4.0]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "one of rate, concurrency and trace"),
        ({"rate": 1, "concurrency": 2}, "rate and concurrency"),
        ({"rate": -1}, "all.rate"),
        ({"rate": "fast"}, "traffic.rate"),
        ({"rate": True}, "traffic.rate"),
        ({"concurrency": 1.5}, "traffic.concurrency"),
        ({"concurrency": 2, "ramp_to": 3}, "all.ramp_to"),
        ({"rate": 1, "arrivals": "often"}, "traffic.arrivals"),
        ({"rate": 1, "priority": "urgent"}, "traffic.priority"),
        ({"rate": 1, "rows": 0}, "rows"),
        ({"rate": 1, "pace": 2}, "traffic.pace"),
        ({"trace": [2, 1]}, "all.trace"),
        ({"trace": "1 2"}, "traffic.trace"),
    ],
)
def test_a_fault_names_its_field(given, field):
    with pytest.raises(TrafficError, match=field.replace(".", r"\.")):
        parse_class(given)


def test_a_class_is_read_as_it_is_written():
    assert parse_class({"name": "bulk", "concurrency": 4, "rows": 8, "priority": "batch"}) == TrafficClass(
        name="bulk", concurrency=4, rows=8, priority="batch"
    )


@pytest.mark.parametrize("burstiness", [1e308, 5e-324])
def test_gaps_that_a_computer_takes_for_nothing_are_refused(burstiness):
    with pytest.raises(TrafficError, match=r"all\.burstiness: must be 0, or 0\.0001 to 10000"):
        TrafficClass(rate=1.0, arrivals="bursty", burstiness=burstiness)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"rate": 1e9}, "all.rate: 1e\\+10 requests in 10 s: 20,000,000 at most"),
        ({"rate": 1.0, "ramp_to": 1e12}, "all.rate: 5e\\+12 requests"),
        ({"concurrency": 10**9}, "all.concurrency: 100,000 callers at most"),
    ],
)
def test_more_than_one_process_can_do_is_refused(asked, words):
    with pytest.raises(TrafficError, match=words):
        check_amount([TrafficClass(**asked)], duration_s=10.0)


def test_what_json_cannot_say_is_refused_with_its_place():
    with pytest.raises(TrafficError, match="classes\\[0\\]: "):
        parse_class({"rate": date(2026, 1, 1), 3: "three"}, at="classes[0]")
