"""Whether a process grows: the slope of its memory and of its descriptors over a long run. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression
from typing import Final

WARM_UP: Final = 1 / 3
"""Of a process's samples: the first requests of each kind fill caches, and the allocator finds its size."""
MOST_MIB_PER_HOUR: Final = 24.0
MOST_DESCRIPTORS_PER_HOUR: Final = 20.0
LEAST_S: Final = 300.0
"""A process that was watched for less says nothing about growth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at a process."""

    at: float
    mib: float
    descriptors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What a process did after its warm-up: first and last fifth's mean, and the slope of the line through all."""

    process: str
    watched_s: float
    mib: tuple[float, float]
    descriptors: tuple[float, float]
    mib_per_hour: float
    descriptors_per_hour: float

    @property
    def is_judged(self) -> bool:
        """Whether it was watched long enough."""
        return self.watched_s >= LEAST_S

    @property
    def is_flat(self) -> bool:
        """Whether neither grows; true also where nobody can tell."""
        is_small = self.mib_per_hour <= MOST_MIB_PER_HOUR and self.descriptors_per_hour <= MOST_DESCRIPTORS_PER_HOUR
        return is_small or not self.is_judged


def growth(process: str, samples: Sequence[Sample]) -> Growth:
    """Of one process; `samples` by time, at least two after the warm-up."""
    warm = samples[int(len(samples) * WARM_UP) :]
    times = [one.at for one in warm]
    memory, descriptors = [one.mib for one in warm], [float(one.descriptors) for one in warm]
    return Growth(
        process=process,
        watched_s=times[-1] - times[0],
        mib=_ends(memory),
        descriptors=_ends(descriptors),
        mib_per_hour=3600 * linear_regression(times, memory).slope,
        descriptors_per_hour=3600 * linear_regression(times, descriptors).slope,
    )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    part = max(1, len(values) // 5)
    return sum(values[:part]) / part, sum(values[-part:]) / part
