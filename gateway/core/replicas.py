"""Which of several replicas to send a request to."""

from collections.abc import Callable, Sequence

Draw = Callable[[], float]
"""Chance, given from outside: numbers in [0, 1)."""


def two_choices(loads: Sequence[int], draw: Draw) -> tuple[int, ...]:
    """Two of the replicas, drawn by chance, as indices into `loads` (requests in flight); the less loaded first.

    The power of two choices (Mitzenmacher, 2001): nearly as even as always taking the least loaded, and gateways that
    know nothing of each other do not all run to the same one. The second is where to go on when the first fails.
    """
    count = len(loads)
    if count < 2:  # noqa: PLR2004 - nothing to choose
        return tuple(range(count))
    first = int(draw() * count)
    second = int(draw() * (count - 1))
    second += second >= first
    return (first, second) if loads[first] <= loads[second] else (second, first)
