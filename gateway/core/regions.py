"""Which shared memory regions to keep: sizes are powers of two, the whole is bounded, what lies idle goes. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

MIB = 2**20


class RegionState(Enum):
    """Where a region is in its life. LEAVING ones are never used again, but count until they are gone."""

    FREE = "free"
    BUSY = "busy"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRegion:
    """A region as the plan sees it; `since_us` is when its state began."""

    name: str
    size: int
    state: RegionState
    since_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionBounds:
    """How much may be kept, for one replica in one process.

    Attributes:
        smallest: bytes of the smallest region: a region of 1 MiB serves every request just above the threshold.
        largest: bytes of the largest: a request's body (`server.max_body_bytes`, 32 MiB) and an answer of its size.
        total: bytes of all together: two of the largest. Docker gives a container 64 MiB of /dev/shm; `room` bounds
            it further there.
        count: of all together; more large requests at once than this are held up elsewhere.
        idle_us: a region unused for this long goes; making one again takes about a millisecond.
        stale_us: a region unused for this long may go at once to make room for one of a size that is wanted.
    """

    smallest: int = MIB
    largest: int = 64 * MIB
    total: int = 128 * MIB
    count: int = 32
    idle_us: int = 30_000_000
    stale_us: int = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """What to do now: regions to make, by size, and names of free ones to let go."""

    make: tuple[int, ...]
    drop: tuple[str, ...]


def size_for(need: int, bounds: RegionBounds) -> int | None:
    """The size of a region that holds `need` bytes: a power of two; None where that is over the largest."""
    size = max(bounds.smallest, 1 << (need - 1).bit_length())
    return size if size <= bounds.largest else None


def fitting(kept: Iterable[KeptRegion], need: int) -> str | None:
    """The name of the smallest free region that holds `need` bytes."""
    free = [(one.size, one.name) for one in kept if one.state is RegionState.FREE and one.size >= need]
    return min(free)[1] if free else None


def plan(
    kept: Collection[KeptRegion], wanted: Collection[int], *, room: int, now_us: int, bounds: RegionBounds
) -> RegionPlan:
    """What to make and to drop, given the sizes that were `wanted` and not there, and `room` bytes of memory to take.

    A size that a free region covers by now is not made. Where the bounds are reached, free regions that are stale go,
    longest unused first: what they held is taken only when they are gone, by a later plan.
    """
    free = sorted((one for one in kept if one.state is RegionState.FREE), key=lambda one: one.since_us)
    drop = [one for one in free if now_us - one.since_us >= bounds.idle_us]
    used, count, make = sum(one.size for one in kept), len(kept), []
    for size in sorted(wanted):
        if any(one.size >= size and one not in drop for one in free):
            continue
        if size <= room and used + size <= bounds.total and count < bounds.count:
            make.append(size)
            used, count, room = used + size, count + 1, room - size
            continue
        drop += _in_the_way(
            [one for one in free if one not in drop], over=used + size - bounds.total, now_us=now_us, bounds=bounds
        )
    return RegionPlan(make=tuple(make), drop=tuple(one.name for one in drop))


def _in_the_way(
    free: Collection[KeptRegion], *, over: int, now_us: int, bounds: RegionBounds
) -> Collection[KeptRegion]:
    """The stale ones that must go for `over` bytes (one at least: it may be the count); none if they are too few."""
    going: list[KeptRegion] = []
    for one in free:
        if going and sum(gone.size for gone in going) >= over:
            return going
        if now_us - one.since_us >= bounds.stale_us:
            going.append(one)
    return going if sum(one.size for one in going) >= over else ()
