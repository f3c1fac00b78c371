"""Figures that are read once, and again only while they can change."""

from itertools import pairwise

from gateway.admin.rollouts.recent_figures import AHEAD_S, AT_ONCE_S, SETTLED_S, RecentFigures
from gateway.core.watching.figures import total
from tests.kit.rolling import Clock, MadeFigures


def requests(recent: RecentFigures, since_s: int) -> int:
    return total(recent.since(since_s).items()).requests


async def test_what_cannot_change_is_read_once():
    clock = Clock()
    figures, now_s = MadeFigures(clock), clock.now_ms // 1000
    recent = RecentFigures(figures)
    figures.add("a/m", 5)
    for n in range(30):
        await recent.read({"r"}, since_s=now_s - 60 + n, now_s=now_s + n)
    assert figures.reads[0] == (now_s - 60, now_s + AHEAD_S)
    assert all(until - since == SETTLED_S + 1 for since, until in figures.reads[1:])
    assert requests(recent, now_s) == 5
    assert requests(recent, now_s + 1) == 0


async def test_a_long_time_is_read_in_pieces():
    clock = Clock()
    figures, now_s = MadeFigures(clock), clock.now_ms // 1000
    recent = RecentFigures(figures)
    figures.add("a/m", 1)
    clock.forward(-2000)
    figures.add("a/m", 1)
    await recent.read({"r"}, since_s=now_s - 3600, now_s=now_s)
    assert figures.reads[0][0] == now_s - 3600
    assert figures.reads[-1][1] == now_s + AHEAD_S
    assert all(one[1] == other[0] for one, other in pairwise(figures.reads))
    assert max(until - since for since, until in figures.reads) == AT_ONCE_S
    assert requests(recent, 0) == 2


async def test_what_comes_late_is_counted_once():
    clock = Clock()
    figures, now_s = MadeFigures(clock), clock.now_ms // 1000
    recent = RecentFigures(figures)
    for n in range(5):
        figures.add("a/m", 1)
        await recent.read({"r"}, since_s=now_s - 60, now_s=now_s + n)
        assert requests(recent, 0) == n + 1


async def test_what_is_too_old_or_of_other_rules_is_let_go():
    clock = Clock()
    figures, now_s = MadeFigures(clock), clock.now_ms // 1000
    recent = RecentFigures(figures)
    figures.add("a/m", 1)
    figures.add("a/m", 1, rule="other")
    await recent.read({"r"}, since_s=now_s - 5, now_s=now_s)
    assert requests(recent, 0) == 1
    await recent.read({"r"}, since_s=now_s + 1, now_s=now_s + 6)
    assert requests(recent, 0) == 0


async def test_another_rule_or_an_earlier_time_is_read_anew():
    clock = Clock()
    figures, now_s = MadeFigures(clock), clock.now_ms // 1000
    recent = RecentFigures(figures)
    figures.add("a/m", 1, rule="other")
    await recent.read({"r"}, since_s=now_s, now_s=now_s)
    await recent.read({"r", "other"}, since_s=now_s, now_s=now_s)
    assert requests(recent, 0) == 1
    await recent.read({"r"}, since_s=now_s - 100, now_s=now_s)
    assert figures.reads[-1] == (now_s - 100, now_s + AHEAD_S)
