"""Whether a process that grows is told from one that does not."""

import pytest

from tests.chaos.growth import MOST_MIB_PER_HOUR, Sample, growth


def samples(mib_per_hour, *, lasts_s=900):
    """A warm-up that grows fast, then a steady slope with some noise."""
    warm = [Sample(at=5.0 * n, mib=50.0 + n, descriptors=20 + n) for n in range(60)]
    steady = [
        Sample(at=300.0 + at, mib=110.0 + at * mib_per_hour / 3600 + at % 2 / 10, descriptors=80)
        for at in range(0, lasts_s, 5)
    ]
    return [*warm, *steady]


def test_what_grows_after_its_warm_up_is_not_flat():
    found = growth("worker", samples(2 * MOST_MIB_PER_HOUR))
    assert found.mib_per_hour == pytest.approx(2 * MOST_MIB_PER_HOUR, rel=0.05)
    assert found.descriptors_per_hour == 0
    assert found.is_judged
    assert not found.is_flat
    assert growth("worker", samples(0.5 * MOST_MIB_PER_HOUR)).is_flat


def test_who_was_watched_for_a_moment_is_not_judged():
    found = growth("worker", samples(1000.0, lasts_s=100))
    assert not found.is_judged
    assert found.is_flat
