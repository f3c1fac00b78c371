"""The search for the highest load, against servers whose bound is known."""

import pytest

from gateway.tuning.load import finding
from gateway.tuning.report import Report, Tally, class_report
from gateway.tuning.slo import Slo

SLO = Slo(ms=10)


def report(*, good):
    tally = Tally(name="a", slo_ms=10, rows=1, from_s=0, until_s=1)
    tally.due(0.0)
    tally.ended(0.0, 0.005 if good else 0.5)
    return Report(kind="load", title="", setting={}, seconds=1, whole=class_report([tally], name="a", seconds=1))


async def search(bound, *, start, is_whole=False, most=float("inf")):
    tried = []

    async def attempt(load):
        tried.append(load)
        return report(good=load <= bound)

    steps = [one async for one in finding.steps(attempt, SLO, start=start, is_whole=is_whole, most=most)]
    assert [one.load for one in steps] == tried
    return finding.found(tuple(steps))


@pytest.mark.parametrize("bound", [3.0, 50.0, 51.0, 777.0, 12_345.0])
@pytest.mark.parametrize("start", [1.0, 50.0, 100_000.0])
async def test_a_rate_is_found_to_within_a_twentieth(bound, start):
    found = await search(bound, start=start)
    assert found.held.load <= bound < found.broke.load
    assert found.broke.load - found.held.load <= finding.CLOSE * found.held.load
    assert len(found.steps) < finding.MAX_STEPS


@pytest.mark.parametrize("bound", [1, 2, 7, 8, 100])
async def test_callers_are_found_exactly(bound):
    found = await search(bound, start=1, is_whole=True)
    assert (found.held.load, found.broke.load) == (bound, bound + 1)


async def test_nothing_may_hold():
    found = await search(0, start=4, is_whole=True)
    assert found.held is None
    assert found.broke.load == 1
    found = await search(0, start=4)
    assert found.held is None
    assert found.broke.load < 2 * finding.LEAST_RATE


async def test_no_more_is_tried_than_may_be():
    found = await search(1e9, start=10, most=25)
    assert [one.load for one in found.steps] == [10, 20, 25]
    assert (found.held.load, found.broke) == (25, None)


def test_a_load_that_held_above_one_that_broke_was_chance():
    low, broke, high = (
        finding.Step(load=load, is_held=held, report=report(good=held))
        for load, held in ((1, True), (2, False), (3, True))
    )
    assert finding.found((high, broke, low)).held is low
