import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tuning.curves import CurveError, LatencyCurve, parse_curve

CURVE = LatencyCurve(model="m", compute_us={1: (10.0, 20.0), 4: (40.0, 50.0)}, slowdown={2: 1.5})


def test_a_measured_size_draws_from_its_own_times():
    assert CURVE.at(1, 0) == 10
    assert CURVE.at(4, 1) == 50
    assert CURVE.mean_us(1) == pytest.approx(15)


def test_sizes_between_and_beyond_lie_on_a_line():
    assert CURVE.at(2, 0) == 20
    assert CURVE.at(7, 0) == 70
    assert LatencyCurve(model="m", compute_us={4: (8.0,)}).at(1, 0.5) == 8


def test_busy_neighbours_slow_each_other_down():
    assert CURVE.mean_us(1, busy=2) == pytest.approx(22.5)
    assert CURVE.mean_us(1, busy=3) == pytest.approx(22.5)


@given(rows=st.integers(1, 64), busy=st.integers(1, 4), seed=st.integers())
def test_a_draw_lies_between_the_least_and_the_most_and_is_the_same_for_a_seed(rows, busy, seed):
    drawn = CURVE.draw_us(rows, random.Random(seed), busy=busy)
    assert CURVE.at(rows, 0) * CURVE.slowed(busy) <= drawn <= CURVE.at(rows, 1) * CURVE.slowed(busy)
    assert drawn == CURVE.draw_us(rows, random.Random(seed), busy=busy)


def test_it_comes_back_out_of_its_file():
    assert parse_curve(CURVE.as_json()) == CURVE
    assert parse_curve({"compute_us": {1: 5, "8": [9, 7]}}).compute_us == {1: (5.0,), 8: (7.0, 9.0)}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([], "object"),
        ({}, "compute_us"),
        ({"compute_us": {}}, "compute_us"),
        ({"compute_us": {"one": 5}}, "compute_us"),
        ({"compute_us": {0: 5}}, "compute_us"),
        ({"compute_us": {1: []}}, "compute_us"),
        ({"compute_us": {1: -1}}, "compute_us.1"),
        ({"compute_us": {1: "fast"}}, "compute_us.1"),
        ({"compute_us": {1: True}}, "compute_us.1"),
        ({"compute_us": {1: 5}, "overhead": 1}, "overhead"),
        ({"compute_us": {1: 5}, "slowdown": {"2": "much"}}, "slowdown.2"),
        ({"compute_us": {1: 5}, "form": "latency-curve/9"}, "form"),
    ],
)
def test_a_fault_names_its_field(given, field):
    with pytest.raises(CurveError, match=field):
        parse_curve(given)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("compute_us", {"1": 10**400}, "compute_us.1: must be numbers from 0 to 1e\\+12"),
        ("compute_us", {"9" * 5000: 1}, "compute_us: must have whole numbers from 1 on, of 9 digits at most"),
        ("compute_us", {"1": 5, "01": 6}, "compute_us: a size is there twice"),
        ("slowdown", {"2": []}, "slowdown.2: must be a number above 0"),
        ("slowdown", {"2": 0}, "slowdown.2: must be a number above 0"),
    ],
)
def test_numbers_that_no_machine_gives_are_refused_with_their_field(field, value, words):
    with pytest.raises(CurveError, match=words):
        parse_curve({"compute_us": {"1": 5}, field: value})
