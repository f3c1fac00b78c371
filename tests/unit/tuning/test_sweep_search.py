import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tuning.sweep.search import (
    LEAST_RUNS,
    MOST_RUNS,
    SHARE,
    Goal,
    Seen,
    best,
    budget,
    front,
    next_step,
    rank,
)
from gateway.tuning.sweep.settings import Cell, Load, Setting

SIZES, DELAYS = (1, 2, 4, 8, 16, 32, 64), (0, 500, 2000, 10_000)


def cells_of(*, counts=(1, 2), loads=(16,), sizes=SIZES, delays=DELAYS):
    found = Setting(max_batch_size=max(sizes), count=1, delay_us=1000)
    swept = [
        Setting(max_batch_size=size, count=count, delay_us=delay)
        for count in counts
        for size in sizes
        for delay in (delays if size > 1 else delays[:1])
    ]
    return tuple(
        Cell(setting=one, load=Load(concurrency=load)) for one in dict.fromkeys((found, *swept)) for load in loads
    )


class Surface:
    """A server by arithmetic: fixed costs and costs by row, some cores, callers that come back within `spread` ms."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.fixed_ms, self.row_ms = 10 ** rng.uniform(-1, 1.3), 10 ** rng.uniform(-2, 0.5)
        self.cores, self.spread_ms = rng.choice((1, 2, 4)), rng.uniform(0.05, 1.5)
        self.bend = rng.choice((0, 0.01, 0.03))  # larger batches are slower by row

    def at(self, cell):
        """Answers per second, and p99 in ms."""
        setting, callers = cell.setting, cell.load.concurrency
        share, delay_ms = callers / setting.count, setting.delay_us / 1e3
        gathered = min(share, setting.max_batch_size)
        gathers = delay_ms > self.spread_ms or share >= 2 * setting.max_batch_size
        rows = max(1, gathered if gathers else 0.6 * gathered)
        wait_ms = 0 if share >= 2 * setting.max_batch_size else min(delay_ms, self.spread_ms)
        if share < setting.max_batch_size:
            wait_ms = delay_ms  # never full
        compute_ms = (self.fixed_ms + self.row_ms * rows * (1 + self.bend * rows)) * max(
            1, setting.count / self.cores
        ) ** 0.9
        qps = setting.count * rows / (compute_ms + wait_ms) * 1e3
        return qps, 1.3 * callers / qps * 1e3 + self.spread_ms

    def goodput(self, cell, goal):
        qps, p99_ms = self.at(cell)
        return qps if not goal.p99_ms or p99_ms <= goal.p99_ms else qps * max(0, 1 - 2 * (p99_ms / goal.p99_ms - 1))

    def run(self, cell, goal, *, is_long=False, noise=0.0, rng=None):
        qps, p99_ms = self.at(cell)
        good = self.goodput(cell, goal) / qps
        if noise:
            qps *= math.exp(rng.gauss(0, noise * (0.5 if is_long else 1)))
            p99_ms *= math.exp(rng.gauss(0, 2 * noise * (0.5 if is_long else 1)))
        return Seen(cell=cell, is_long=is_long, qps=qps, goodput=qps * good, p99_ms=p99_ms)


def swept(surface, cells, goal, *, noise=0.0, seed=0):
    rng, seen = random.Random(seed), []
    while step := next_step(cells, seen, goal=goal):
        seen.append(surface.run(step.cell, goal, is_long=step.is_long, noise=noise, rng=rng))
    return seen


def share_of_best(surface, cells, goal, seen):
    whole = [surface.run(cell, goal, is_long=True) for cell in cells]
    top = best(whole, goal)
    return surface.goodput(best(seen, goal).cell, goal) / top.goodput


SPACES = {"51": cells_of(), "33": cells_of(sizes=SIZES[:-1], delays=(0, 2000, 10_000))}


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("noise", [0.0, 0.04])
@pytest.mark.parametrize("has_slo", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_quick_sweep_comes_within_a_twentieth_of_brute_force_at_less_than_a_quarter_of_its_runs(
    seed, has_slo, noise, space
):
    cells, surface = SPACES[space], Surface(seed)
    latencies = sorted(surface.at(cell)[1] for cell in cells)
    goal = Goal(p99_ms=latencies[len(latencies) // 3] if has_slo else 0)
    seen = swept(surface, cells, goal, noise=noise, seed=seed)
    assert len(seen) < SHARE * len(cells)
    assert share_of_best(surface, cells, goal, seen) >= 0.95


@pytest.mark.parametrize("seed", range(3))
def test_it_does_so_over_several_loads_as_well(seed):
    cells, surface, goal = cells_of(counts=(1, 2, 4), loads=(4, 64)), Surface(seed), Goal()
    seen = swept(surface, cells, goal, noise=0.03, seed=seed)
    assert len(seen) < SHARE * len(cells)
    assert share_of_best(surface, cells, goal, seen) >= 0.95


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    p99_ms=st.sampled_from((0.0, 1.0, 20.0, 500.0)),
    sizes=st.sets(st.sampled_from(SIZES), min_size=1, max_size=4),
    delays=st.sets(st.sampled_from(DELAYS), min_size=1, max_size=3),
    noise=st.sampled_from((0.0, 0.3)),
)
def test_any_sweep_ends_within_its_budget_begins_with_what_was_found_and_measures_nothing_twice(
    seed, p99_ms, sizes, delays, noise
):
    cells = cells_of(sizes=sorted(sizes), delays=sorted(delays))
    goal = Goal(p99_ms=p99_ms)
    seen = swept(Surface(seed), cells, goal, noise=noise, seed=seed)
    assert 1 <= len(seen) <= budget(len(cells)) <= len(cells)
    assert seen[0].cell.setting == cells[0].setting
    assert len({(one.cell, one.is_long) for one in seen}) == len(seen)
    chosen = best(seen, goal)
    if any(one.keeps(goal) for one in seen):
        assert chosen.keeps(goal)


def test_the_same_runs_have_the_same_next_one_so_a_sweep_can_go_on_anywhere():
    cells, goal = cells_of(), Goal()
    seen = swept(Surface(3), cells, goal)
    for place in range(len(seen)):
        step = next_step(cells, seen[:place], goal=goal)
        assert (step.cell, step.is_long) == (seen[place].cell, seen[place].is_long)


def test_brute_force_measures_every_cell_once_in_order_and_loads_each_setting_once():
    cells, seen = cells_of(loads=(4, 16)), []
    while step := next_step(cells, seen, goal=Goal(), is_brute_force=True):
        assert step.is_long
        seen.append(Surface(0).run(step.cell, Goal(), is_long=True))
    assert tuple(one.cell for one in seen) == cells
    changes = sum(one.cell.setting != other.cell.setting for one, other in itertools.pairwise(seen))
    assert changes == len({cell.setting for cell in cells}) - 1


def test_settings_that_fail_do_not_end_a_sweep_and_are_not_chosen():
    cells, surface, seen = cells_of(), Surface(5), []
    while step := next_step(cells, seen, goal=Goal()):
        if step.cell.setting.count == 2:
            seen.append(Seen(cell=step.cell, is_long=step.is_long, qps=0, goodput=0, p99_ms=math.inf))
        else:
            seen.append(surface.run(step.cell, Goal(), is_long=step.is_long))
    assert best(seen, Goal()).cell.setting.count == 1


def test_what_is_larger_than_a_setting_that_took_too_much_memory_is_not_tried():
    cells, surface, goal, seen = cells_of(counts=(1, 2, 4)), Surface(1), Goal(memory_bytes=100), []
    while step := next_step(cells, seen, goal=goal):
        run = surface.run(step.cell, goal, is_long=step.is_long)
        memory = 10 * step.cell.setting.count * (1 + step.cell.setting.max_batch_size)
        for earlier in seen:
            if earlier.memory_bytes > 100 and not step.is_long:
                assert (
                    step.cell.setting.max_batch_size < earlier.cell.setting.max_batch_size
                    or step.cell.setting.count < earlier.cell.setting.count
                )
        seen.append(
            Seen(cell=run.cell, is_long=run.is_long, qps=run.qps, goodput=run.goodput, p99_ms=1, memory_bytes=memory)
        )
    assert best(seen, goal).memory_bytes <= 100


@pytest.mark.parametrize(("cells", "runs"), [(1, 1), (4, 4), (16, LEAST_RUNS), (50, 12), (100, 24), (4000, MOST_RUNS)])
def test_a_quick_sweep_makes_less_than_a_quarter_of_the_runs_of_all_but_small_spaces(cells, runs):
    assert budget(cells) == runs


def seen(qps, p99_ms, *, goodput=None, is_long=True, memory=0):
    cell = cells_of()[0]
    goodput = qps if goodput is None else goodput
    return Seen(cell=cell, is_long=is_long, qps=qps, goodput=goodput, p99_ms=p99_ms, memory_bytes=memory)


def test_the_best_keeps_the_bounds_first_then_has_most_good_answers_then_the_lowest_p99():
    goal = Goal(p99_ms=50, memory_bytes=100)
    order = [
        seen(900, 40, memory=50),
        seen(900, 45, memory=50),
        seen(100, 10),
        seen(2000, 60, goodput=1500),
        seen(1500, 40, memory=101, goodput=1400),
        seen(10, 70, goodput=0),
    ]
    ranks = [rank(one, goal) for one in order]
    assert ranks == sorted(ranks, reverse=True)


def test_a_short_run_is_chosen_only_where_no_long_one_keeps_the_bounds():
    goal = Goal(p99_ms=50)
    long, short = seen(100, 40), seen(500, 40, is_long=False)
    assert best([short, long], goal) is long
    assert best([short, seen(100, 60)], goal) is short
    missed = seen(100, 60, goodput=20)
    assert best([seen(500, 70, is_long=False, goodput=5), missed], goal) is missed
    assert best([], goal) is None


def test_the_front_is_what_nothing_beats_in_both():
    a, b, c = seen(10, 1), seen(20, 5), seen(30, 9)
    assert front([c, seen(15, 6), b, seen(30, 12), a, seen(20, 5.5)]) == [a, b, c]
