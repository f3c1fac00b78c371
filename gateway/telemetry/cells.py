"""Counts of a worker's metrics, written straight to their places in the library's files.

At each count the library takes a lock, asks the kernel for the process's id, and packs two numbers: its user may have
threads, and be forked. A worker counts in its event loop alone, some fifteen times a request, and is never forked.
Nor does it need the library's looks at whether it counts into a parent, or downwards, or with an exemplar.
"""

import bisect
from collections.abc import Callable
from typing import Any, Final

from prometheus_client import Histogram, values
from prometheus_client.metrics import MetricWrapperBase

DOUBLE: Final = 8  # bytes; the library aligns its numbers to that


def count_in_place() -> None:
    """Of metrics that are made from now on, where they are kept in files; elsewhere nothing changes."""
    library: Any = values.ValueClass
    if not library._multiprocess or hasattr(library, "in_place"):  # noqa: SLF001 - the library's own mark of files
        return

    class Cell(library):  # type: ignore[misc]  # the library makes its class when it is imported
        in_place = True

        def __init__(self, *of: Any, **how: Any) -> None:
            super().__init__(*of, **how)
            self._cells = memoryview(self._file._m).cast("d")  # noqa: SLF001 - a file that grows is mapped anew, too
            self._at = self._file._positions[self._key] // DOUBLE  # noqa: SLF001

        def inc(self, amount: float) -> None:
            self._value += amount
            self._cells[self._at] = self._value

    values.ValueClass = Cell


def counting(child: MetricWrapperBase) -> Callable[[float], None]:
    """What adds to it, or, where it is a histogram, takes a value into it."""
    if not isinstance(child, Histogram):
        add: Callable[[float], None] = child._value.inc  # type: ignore[attr-defined]  # noqa: SLF001 - a counter's, a gauge's
        return add
    bounds, add_to_sum = child._upper_bounds, child._sum.inc  # noqa: SLF001 - the last bound is infinite
    buckets = [bucket.inc for bucket in child._buckets]  # noqa: SLF001

    def observe(value: float) -> None:
        add_to_sum(value)
        buckets[bisect.bisect_left(bounds, value)](1)

    return observe
