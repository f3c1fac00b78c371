"""What the C library does with memory that models free."""

import ctypes
import functools
import os

# Of malloc.h, and mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MORE_THAN_ANY_TENSOR = 2**30
_NEVER = 2**31 - 1


@functools.cache
def keep_freed_memory() -> None:
    """Have the process keep what a batch frees, for the next one. Once for the process.

    By itself glibc gives a large tensor's memory back to the system at once, and each batch takes all of its pages
    anew: eight images through EfficientNet-Lite0 took 178 ms on one core instead of 91 ms. A process stays as large as
    its largest batch made it. Whoever set `MALLOC_MMAP_THRESHOLD_` or `MALLOC_TRIM_THRESHOLD_` has decided already;
    another C library has no `mallopt`, and keeps its own ways.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} & os.environ.keys():
        return
    mallopt(_M_MMAP_THRESHOLD, _MORE_THAN_ANY_TENSOR)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
