"""What is made of traffic in steps: goodput by the step in which answers came, p99, refusals, and the recovery."""

import pytest

from tests.bench.suite.offered import BURST, STEPS, WARM_S, Ended, figures

BURST_S = sum(step.seconds for step in STEPS[:-2])
OVER_S = BURST_S + BURST.seconds
WHOLE_S = OVER_S + STEPS[-1].seconds
CAPACITY = 10.0


def evenly(begin: float, end: float, each_s: float, took_s: float = 0.1, code: str = "ok") -> list[Ended]:
    return [Ended(begin + n * each_s, took_s, code) for n in range(round((end - begin) / each_s))]


def test_a_burst_that_changes_nothing_for_those_who_are_served():
    served, refused = evenly(0, WHOLE_S, 0.1), evenly(BURST_S, OVER_S, 0.1, 0.001, "queue_full")
    told = figures({"interactive": served, "batch": refused}, CAPACITY)
    assert told["goodput of peak"] == pytest.approx(1, abs=0.05)
    assert told["p99 of before"] == told["p99 of alone"] == pytest.approx(1)
    assert told["refused 5x"] == pytest.approx(0.5, abs=0.02)
    assert (told["recovery s"], told["neither answered nor refused"]) == (0, 0)


def test_a_collapse_is_seen_in_every_figure():
    served = [*evenly(0, BURST_S, 0.1), *evenly(BURST_S, OVER_S, 0.5, 0.4), *evenly(OVER_S, OVER_S + 2, 0.1, 0.4)]
    lost = evenly(BURST_S, OVER_S, 0.1, 5.0, "connection_closed")
    told = figures({"interactive": [*served, *evenly(OVER_S + 2, WHOLE_S, 0.1)], "batch": lost}, CAPACITY)
    assert told["goodput of peak"] == pytest.approx(0.2, abs=0.05)
    assert told["p99 of before"] == told["p99 of alone"] == pytest.approx(4)
    assert told["recovery s"] == 2
    assert told["neither answered nor refused"] > 0


def test_what_is_answered_after_its_step_counts_where_it_was_answered():
    late = [Ended(BURST_S + WARM_S, BURST.seconds, "ok")] * 10
    told = figures({"interactive": [*evenly(0, BURST_S, 0.1), *late], "batch": []}, CAPACITY)
    assert told["goodput 5x"] == 0
    assert told["goodput 0.5x after"] > 0
