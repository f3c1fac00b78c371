"""No hot path may cost more than it does today: bytecode instructions are counted, which are the same in every run."""

import sys
from collections import Counter
from dataclasses import replace

import pytest

from tests.kit import cost
from tests.kit.cost_meter import Cost, Meter, cost_of


def test_no_path_costs_more_than_its_ceiling_nor_much_less():
    costs = cost.measured()
    limits = cost.ceilings()
    assert limits.keys() <= costs.keys(), "ceilings of paths that are not counted (any more)"
    complaints = [cost.complaint(name, one, limits.get(name)) for name, one in costs.items()]
    assert not any(complaints), "\n".join(filter(None, complaints))


# --- the ceilings -----------------------------------------------------------------------------------------


def costing(instructions: int) -> Cost:
    return Cost(instructions=instructions, functions={"gateway/a.py:1 a": instructions})


@pytest.mark.parametrize(
    ("count", "ceiling", "said"),
    [
        (10_000, 10_050, ""),
        (10_050, 10_050, ""),
        (10_051, 10_050, "costs 10,051 instructions, more than its ceiling of 10,050"),
        (9749, 10_050, ""),
        (9748, 10_050, "lower the ceiling from 10,050 to 9,797"),
        (10_000, None, "no ceiling"),
    ],
)
def test_a_ceiling_is_told_where_it_is_broken_and_where_it_is_too_high(count, ceiling, said):
    told = cost.complaint("chat", costing(count), ceiling)
    assert (said in told) if said else not told
    assert not told or "--write" in told or "gateway/a.py:1 a" in told


def test_a_request_that_leaves_garbage_is_told():
    assert not cost.complaint("chat", replace(costing(100), garbage=cost.MOST_GARBAGE), 100)
    assert "leaves 6 objects" in cost.complaint("chat", replace(costing(100), garbage=cost.MOST_GARBAGE + 1), 100)


def test_ceilings_are_lowered_and_never_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "CEILINGS", tmp_path / "ceilings.toml")
    cost.CEILINGS.write_text(f'["3.0"]\nchat = 7\n["{cost.PYTHON}"]\nchat = 1000\ntask = 1000\ngone = 5\n')
    new = cost.lowered({"chat": costing(900), "task": costing(2000), "stream": costing(100)}, cost.ceilings())
    cost.CEILINGS.write_text(cost.written(new))
    assert cost.ceilings() == {"chat": 905, "task": 1000, "stream": 101}
    monkeypatch.setattr(cost, "PYTHON", "3.0")
    assert cost.ceilings() == {"chat": 7}


# --- the count --------------------------------------------------------------------------------------------


async def nothing():
    pass


async def plain():
    return [1]


async def with_a_dict():
    _ = {"a": 1}
    return [1]


async def with_an_await():
    await nothing()
    return [1]


def counted(make) -> int:
    meter, readings = Meter(), []
    before = sys.gettrace()
    for _ in range(4):
        work = make()
        meter.begin()
        try:
            work.send(None)
        except StopIteration:
            pass
        finally:
            sys.settrace(before)
        readings.append(meter.reading())
    return cost_of(readings).instructions


def test_the_count_is_the_same_each_time_and_sees_a_needless_dict_and_a_needless_await():
    first = counted(plain)
    assert first == counted(plain)
    assert first < counted(with_a_dict) < counted(with_an_await)


def test_what_runs_beside_some_requests_is_not_counted():
    readings = [Counter(a=10 * n, timer=n // 2, both=n + n // 2) for n in range(9)]
    assert cost_of(readings) == Cost(instructions=11, functions={"a": 10, "both": 1})
