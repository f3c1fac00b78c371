"""Random timelines by the chunk: the first chunks are played by every check, all of them by `make test`."""

import pytest

QUICK = 5


def chunks(count: int) -> list[object]:
    """The numbers below `count`, those from the sixth on marked as exhaustive."""
    marks = pytest.mark.exhaustive
    return [number if number < QUICK else pytest.param(number, marks=marks) for number in range(count)]
