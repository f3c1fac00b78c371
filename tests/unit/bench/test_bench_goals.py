"""What the runs of a benchmark say of a goal."""

import pytest

from tests.bench.suite.goals import Goal, Run, medians, shown, verdict


def runs(subject: str, *values: float, figure: str = "rps") -> list[Run]:
    """One run in each round."""
    return [Run(subject=subject, round=number, figures={figure: value}) for number, value in enumerate(values)]


@pytest.mark.parametrize(
    ("at", "bound", "values", "holds"),
    [
        ("least", 100, (90, 100, 200), True),
        ("least", 100, (90, 99, 200), False),
        ("most", 100, (90, 100, 200), True),
        ("most", 100, (90, 101, 200), False),
        ("most", 0, (0, 0, 0), True),
    ],
)
def test_a_figure_is_held_by_its_median(at, bound, values, holds):
    found = verdict(Goal(figure="rps", at=at, bound=bound), runs("ours", *values))
    assert found.holds is holds
    assert found.rounds == 3
    assert found.spread == (min(values), max(values))
    assert found.peer is None


def test_a_ratio_is_taken_round_by_round():
    """The machine was slower in each round than in the one before; both subjects met it alike."""
    goal = Goal(figure="rps", at="least", bound=0.8, against="peer")
    found = verdict(goal, [*runs("ours", 900, 450, 225), *runs("peer", 1000, 500, 250)])
    assert found.held == pytest.approx(0.9)
    assert found.spread == pytest.approx((0.9, 0.9))
    assert (found.ours, found.peer) == (450, 500)
    assert found.holds is True


def test_a_difference_is_taken_round_by_round():
    goal = Goal(figure="ms", at="most", bound=0.35, against="straight", by="difference")
    found = verdict(goal, [*runs("ours", 1.0, 2.0, 3.0, figure="ms"), *runs("straight", 0.5, 1.7, 2.8, figure="ms")])
    assert found.held == pytest.approx(0.3)
    assert found.holds is True


def test_only_rounds_that_both_have_are_compared():
    goal = Goal(figure="rps", at="least", bound=1, against="peer")
    found = verdict(goal, [*runs("ours", 10, 10, 10), *runs("peer", 5)])
    assert (found.rounds, found.held) == (1, 2)


@pytest.mark.parametrize("seen", [runs("ours", 1.0), runs("peer", 1.0), runs("ours", 1.0, figure="other"), []])
def test_what_was_not_measured_is_neither_met_nor_missed(seen):
    assert verdict(Goal(figure="rps", at="least", bound=1, against="peer"), seen).holds is None


def test_a_goal_may_hold_another_subject_and_another_figure_of_the_peer():
    goal = Goal(figure="events/s", at="least", bound=0.8, subject="ours, 400", against="peer, 800", of="most/s")
    seen = [*runs("ours, 400", 8, figure="events/s"), *runs("peer, 800", 10, figure="most/s")]
    assert verdict(goal, seen).held == pytest.approx(0.8)


def test_medians_are_told_by_subject_and_figure():
    seen = [*runs("a", 1, 2, 9), *runs("b", 5), *runs("a", 7, figure="ms")]
    assert medians(seen) == {"a": {"rps": 2, "ms": 7}, "b": {"rps": 5}}


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        (Goal(figure="rps", at="least", bound=6_000), ">= 6,000"),
        (Goal(figure="rps", at="least", bound=0.6, against="peer, quiet"), ">= 0.6x peer, quiet"),
        (Goal(figure="ms", at="most", bound=0.35, against="straight", by="difference"), "<= straight + 0.35"),
    ],
)
def test_a_goal_has_words(goal, words):
    assert goal.words == words


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (12_345.6, "12,346"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123"), (0, "0.00")],
)
def test_figures_are_shown_with_the_digits_that_mean_something(value, text):
    assert shown(value) == text
