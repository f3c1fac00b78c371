"""The search against response surfaces that are known, and the bounds against arithmetic."""

import itertools
import random

import pytest

from gateway.tuning.curves import parse_curve
from gateway.tuning.planning import (
    Candidate,
    Outcome,
    Setting,
    best_size,
    capacity,
    floor_ms,
    search,
    settings_of,
)

SEEDS = (0, 1, 2)
CURVE = parse_curve({"compute_us": {"1": 1000, "4": 1600, "8": 2400}})


def setting(number, **more):
    return Setting(max_batch_size=number, max_queue_delay_microseconds=0, **more)


def outcome(strain, *, replicas=1):
    return Outcome(
        holds=strain <= 1,
        latency_ms=strain * 100,
        strain=strain,
        good=1.0,
        p50_ms=1.0,
        p99_ms=strain * 100,
        qps=1.0,
        goodput=1.0,
        busy=0.5,
        mean_batch=1.0,
        queue_ms=0.0,
        compute_ms=1.0,
        requests=100,
        replicas=replicas,
    )


class Surface:
    """How hard each setting is pressed on each number of replicas, and what was asked."""

    def __init__(self, strain):
        self.strain = strain
        self.asked = []

    def __call__(self, setting, replicas, *, seed, whole):
        self.asked.append((setting, replicas, seed, whole))
        return outcome(self.strain(setting, replicas, seed, whole), replicas=replicas)


def needs(numbers, *, whole=None):
    """Each setting holds from so many replicas on; of those that are equal, the smaller batch has less latency."""

    def strain(setting, replicas, seed, is_whole):
        needed = (whole or numbers if is_whole else numbers)[setting.max_batch_size]
        return (needed / replicas) ** 2 * (1 - 0.001 / setting.max_batch_size)

    return strain


@pytest.mark.parametrize("chance", range(40))
def test_it_finds_what_a_look_at_everything_finds(chance):
    rng = random.Random(chance)
    most = rng.choice((10, 50, 400))
    numbers = {size: rng.randint(1, most + 5) for size in (1, 2, 4, 8, 16)}
    candidates = [Candidate(setting=setting(size), least=rng.randint(1, n)) for size, n in numbers.items()]
    surface = Surface(needs(numbers))
    found = search(candidates, surface, seeds=SEEDS, most_replicas=most)
    everything = [
        (replicas, surface.strain(one.setting, replicas, 0, True), one.setting)
        for one, replicas in itertools.product(candidates, range(1, most + 1))
        if replicas >= one.least and surface.strain(one.setting, replicas, 0, True) <= 1
    ]
    if not everything:
        assert found.chosen is None
    else:
        best = min(everything)
        assert (found.chosen.replicas, found.chosen.setting) == (best[0], best[2])
        assert found.chosen.holds
        assert len(found.chosen.outcomes) == len(SEEDS)
        least = next(one.least for one in candidates if one.setting == best[2])
        assert (found.below is None) == (best[0] == least)
        assert found.below is None or not found.below.holds


def test_a_setting_that_cannot_be_better_is_not_run():
    surface = Surface(needs({1: 3, 2: 3}))
    found = search(
        [Candidate(setting=setting(1)), Candidate(setting=setting(2), least=4)], surface, seeds=SEEDS, most_replicas=9
    )
    assert found.chosen.replicas == 3
    assert [one.setting for one in found.ruled_out] == [setting(2)]
    assert setting(2) not in {one for one, *_ in surface.asked}


def test_all_seeds_must_hold():
    def strain(setting, replicas, seed, whole):
        return 0.5 if replicas >= (6 if seed == 2 else 4) else 2.0

    found = search([Candidate(setting=setting(1))], Surface(strain), seeds=SEEDS, most_replicas=20)
    assert found.chosen.replicas == 6


@pytest.mark.parametrize(("part", "whole"), [(20, 17), (20, 23), (20, 20), (20, 60)])
def test_the_whole_has_the_last_word(part, whole):
    surface = Surface(needs({1: part}, whole={1: whole}))
    found = search([Candidate(setting=setting(1))], surface, seeds=SEEDS, most_replicas=100)
    assert found.chosen.replicas == whole
    assert found.chosen.whole
    assert found.below.replicas == whole - 1
    assert not found.below.holds


def test_another_setting_is_chosen_where_the_first_needs_more_than_its_part_said():
    surface = Surface(needs({1: 20, 2: 22}, whole={1: 30, 2: 22}))
    # 2 is looked at first, for its bound is lower, so that both are known
    candidates = [Candidate(setting=setting(1), least=2), Candidate(setting=setting(2))]
    found = search(candidates, surface, seeds=SEEDS, most_replicas=100)
    assert (found.chosen.replicas, found.chosen.setting) == (22, setting(2))


def test_where_nothing_holds_the_closest_is_told():
    surface = Surface(needs({1: 90, 2: 40}))
    found = search(
        [Candidate(setting=setting(1)), Candidate(setting=setting(2)), Candidate(setting=setting(4), impossible="no")],
        surface,
        seeds=SEEDS,
        most_replicas=30,
    )
    assert found.chosen is None
    assert (found.closest.setting, found.closest.replicas) == (setting(2), 30)
    assert [one.impossible for one in found.ruled_out] == ["no"]


def test_the_front_has_lower_latency_for_more_replicas_alone():
    found = search([Candidate(setting=setting(1))], Surface(needs({1: 37})), seeds=SEEDS, most_replicas=999)
    replicas = [point.replicas for point in found.front]
    strains = [point.worst.strain for point in found.front]
    assert replicas[0] == 37
    assert len(replicas) > 1
    assert replicas == sorted(set(replicas))
    assert strains == sorted(strains, reverse=True)


def test_no_run_is_made_twice():
    surface = Surface(needs({1: 37, 2: 37, 4: 36}))
    candidates = [Candidate(setting=setting(size)) for size in (1, 2, 4)]
    found = search(candidates, surface, seeds=SEEDS, most_replicas=999)
    assert len(surface.asked) == len(set(surface.asked)) == found.runs


# --- bounds -------------------------------------------------------------------------------------------------------


def test_capacity_is_that_of_the_best_size():
    assert capacity(CURVE, setting(1)) == pytest.approx(1000)
    assert capacity(CURVE, setting(8)) == pytest.approx(8 / 2.4e-3)
    assert capacity(CURVE, setting(8, count=2)) == pytest.approx(16 / 2.4e-3)
    assert capacity(CURVE, setting(8), rows=3) == pytest.approx(6 / 2.0e-3)  # twice three rows fit, and not eight


def test_a_larger_batch_that_takes_too_long_does_not_count():
    assert capacity(parse_curve({"compute_us": {"1": 1000, "2": 5000}}), setting(2)) == pytest.approx(1000)


def test_instances_that_slow_each_other_down_are_worth_less():
    slowed = parse_curve({"compute_us": {"1": 1000}, "slowdown": {"2": 1.6}})
    assert capacity(slowed, setting(1, count=2)) == pytest.approx(2000 / 1.6)
    assert capacity(parse_curve({"compute_us": {"1": 1000}, "slowdown": {"2": 3}}), setting(1, count=2)) == 1000


def test_the_floor_is_the_computing_of_the_best_size_and_the_way():
    curve = parse_curve({"compute_us": {"1": [1000, 3000], "4": 2000}, "overhead_us": [500, 900]})
    assert floor_ms(curve, setting(1), share=0.99) == pytest.approx(2.98 + 0.5)
    assert floor_ms(curve, setting(4), share=0.99) == pytest.approx(2.0 + 0.5)
    assert floor_ms(curve, setting(4), share=0.5) == pytest.approx(2.0 + 0.5)


def test_settings_are_all_combinations_that_differ():
    found = settings_of(CURVE, sizes=(8, 1, 8), delays_us=(0, 500), counts=(2, 1))
    assert found == (
        setting(1),
        setting(1, count=2),
        setting(8),
        setting(8, count=2),
        Setting(max_batch_size=8, max_queue_delay_microseconds=500),
        Setting(max_batch_size=8, max_queue_delay_microseconds=500, count=2),
    )


def test_what_a_request_does_not_fit_into_is_no_setting():
    assert {
        one.max_batch_size for one in settings_of(CURVE, sizes=(1, 4, 8), delays_us=(0,), counts=(1,), rows=(3,))
    } == {4, 8}
    assert not settings_of(CURVE, sizes=(1,), delays_us=(0,), counts=(1,), rows=(3, 1))


def test_a_delay_is_for_nothing_where_no_two_requests_fit():
    found = settings_of(CURVE, sizes=(4,), delays_us=(0, 500), counts=(1,), rows=(3,))
    assert [one.max_queue_delay_microseconds for one in found] == [0]
    assert len(settings_of(CURVE, sizes=(4,), delays_us=(0, 500), counts=(1,), rows=(1, 3))) == 2


def test_a_size_that_computes_best_below_the_largest_is_preferred_too():
    curve = parse_curve({"compute_us": {"1": 1000, "4": 1600, "8": 4000}})
    assert best_size(curve, 8) == 4
    found = settings_of(curve, sizes=(8,), delays_us=(0, 500), counts=(1,))
    assert [(one.max_queue_delay_microseconds, one.preferred_batch_size) for one in found] == [
        (0, ()),
        (500, ()),
        (500, (4,)),
    ]


@pytest.mark.parametrize("chance", range(60))
def test_bounds_are_those_of_a_look_at_every_size(chance):
    rng = random.Random(chance)
    sizes = sorted(rng.sample(range(1, 40), rng.randint(1, 5)))
    times = sorted(rng.uniform(100, 9000) for _ in sizes)
    curve = parse_curve({"compute_us": {str(size): [us, us * 1.5] for size, us in zip(sizes, times, strict=True)}})
    most, rows = rng.randint(6, 60), rng.randint(1, 6)
    every = range(rows, most + 1, rows)
    assert capacity(curve, setting(most), rows=rows) == pytest.approx(max(n / curve.mean_us(n) * 1e6 for n in every))
    quickest = min(curve.at(n, 0.99) for n in every) / 1e3
    assert floor_ms(curve, setting(most), share=0.99, rows=rows) == pytest.approx(quickest)


def test_bounds_of_a_size_in_the_millions_are_looked_up_at_few_sizes(monkeypatch):
    looked = []
    at = type(CURVE).at
    monkeypatch.setattr(type(CURVE), "at", lambda curve, rows, share: looked.append(rows) or at(curve, rows, share))
    assert capacity(CURVE, setting(1_000_000)) == pytest.approx(1e6 / (2400 + 200 * (1e6 - 8)) * 1e6)
    assert floor_ms(CURVE, setting(1_000_000), share=0.5) == pytest.approx(1.0)
    assert len(set(looked)) < 10
