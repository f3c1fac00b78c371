"""How many GPUs there are, from the driver itself: a tensor library takes seconds to import and may be absent."""

import ctypes
import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)
_DRIVER = "libcuda.so.1"
# Results of the CUDA driver API (cuda.h, CUresult).
_SUCCESS = 0
_NO_DEVICE = 100


def cuda_devices(load: Callable[[str], Any] = ctypes.CDLL) -> int:
    """The CUDA devices that the driver shows to this process; it honours CUDA_VISIBLE_DEVICES itself.

    0 without a driver, and where it does not start, which is logged. Never raises. `load` opens a shared library.
    """
    try:
        driver = load(_DRIVER)
        count = ctypes.c_int(0)
        result: int = driver.cuInit(0)
        if result == _SUCCESS:
            result = driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0  # no driver, or none that we know how to ask
    if result == _SUCCESS:
        return max(0, count.value)
    if result != _NO_DEVICE:
        _log.warning("the CUDA driver does not start: no GPU is used", extra={"result": result})
    return 0
