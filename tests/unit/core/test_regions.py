"""What is made and dropped, as tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.regions import MIB, KeptRegion, RegionBounds, RegionPlan, RegionState, fitting, plan, size_for

BOUNDS = RegionBounds(smallest=MIB, largest=8 * MIB, total=16 * MIB, count=4, idle_us=1000, stale_us=100)
NOW_US = 5000
FREE, BUSY, LEAVING = RegionState.FREE, RegionState.BUSY, RegionState.LEAVING


def kept(name, mib, state=FREE, *, for_us=0):
    return KeptRegion(name=name, size=mib * MIB, state=state, since_us=NOW_US - for_us)


@pytest.mark.parametrize(
    ("need", "size"),
    [(1, MIB), (MIB, MIB), (MIB + 1, 2 * MIB), (5 * MIB, 8 * MIB), (8 * MIB, 8 * MIB), (8 * MIB + 1, None)],
)
def test_sizes_are_powers_of_two(need, size):
    assert size_for(need, BOUNDS) == size


def test_the_smallest_free_one_that_fits_is_taken():
    some = [kept("big", 8), kept("small", 1), kept("busy", 2, BUSY), kept("going", 2, LEAVING), kept("mid", 4)]
    assert fitting(some, 2 * MIB) == "mid"
    assert fitting(some, 1) == "small"
    assert fitting(some, 9 * MIB) is None


@pytest.mark.parametrize(
    ("some", "wanted", "room", "make", "drop"),
    [
        ([], [], 99, [], []),
        ([], [2], 99, [2], []),
        ([], [2, 1], 99, [1, 2], []),
        ([], [2], 1, [], []),  # /dev/shm has no more
        ([], [2, 1], 2, [1], []),
        ([kept("a", 2)], [2], 99, [], []),  # one has come free meanwhile
        ([kept("a", 2, BUSY)], [2], 99, [2], []),
        ([kept("a", 8, BUSY), kept("b", 8, LEAVING)], [1], 99, [], []),  # what is going counts
        ([kept(name, 1, BUSY) for name in "abcd"], [1], 99, [], []),
        ([kept("a", 2, for_us=1000)], [], 99, [], ["a"]),
        ([kept("a", 2, for_us=999)], [], 99, [], []),
        ([kept("a", 2, BUSY, for_us=9999), kept("b", 2, LEAVING, for_us=9999)], [], 99, [], []),
        ([kept("a", 8, BUSY), kept("b", 4, for_us=100), kept("c", 4, for_us=99)], [8], 99, [], []),  # c is not stale
        ([kept("a", 8, BUSY), kept("b", 4, for_us=100), kept("c", 4, for_us=300)], [8], 99, [], ["c", "b"]),
        ([kept("a", 8, BUSY), kept("b", 4, BUSY), kept("c", 2, for_us=300)], [4], 99, [], ["c"]),
        ([kept(name, 1, for_us=200) for name in "abcd"], [2], 99, [], ["a"]),  # their number is the bound
    ],
)
def test_plans(some, wanted, room, make, drop):
    found = plan(some, [size * MIB for size in wanted], room=room * MIB, now_us=NOW_US, bounds=BOUNDS)
    assert found == RegionPlan(make=tuple(size * MIB for size in make), drop=tuple(drop))


REGIONS = st.builds(
    KeptRegion,
    name=st.uuids().map(str),
    size=st.sampled_from([MIB << shift for shift in range(4)]),
    state=st.sampled_from(RegionState),
    since_us=st.integers(0, NOW_US),
)


@given(
    st.lists(REGIONS, max_size=6),
    st.sets(st.sampled_from([MIB << shift for shift in range(4)])),
    st.integers(0, 20 * MIB),
)
def test_no_plan_goes_beyond_the_bounds(some, wanted, room):
    found = plan(some, wanted, room=room, now_us=NOW_US, bounds=BOUNDS)
    states = {one.name: one.state for one in some}
    assert all(states[name] is FREE for name in found.drop)
    assert len(set(found.drop)) == len(found.drop)
    assert sum(found.make) <= room
    if found.make:
        assert sum(found.make) + sum(one.size for one in some) <= BOUNDS.total
        assert len(found.make) + len(some) <= BOUNDS.count
    assert set(found.make) <= wanted
