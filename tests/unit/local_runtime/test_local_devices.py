import ctypes
import os
import subprocess
import sys

import pytest

from local_runtime.repository.devices import cuda_devices

DECLARED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))


class Driver:
    """The two functions of libcuda that are asked, called as foreign functions are."""

    def __init__(self, devices=0, *, start=0, count=0):
        self.asked = []

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)
        def init(flags):
            self.asked.append(flags)
            return start

        @DECLARED
        def get_count(pointer):
            pointer[0] = devices
            return count

        self.cuInit = init
        self.cuDeviceGetCount = get_count


@pytest.mark.parametrize("devices", [0, 1, 8])
def test_the_driver_is_asked(devices):
    driver, opened = Driver(devices), []
    assert cuda_devices(lambda name: opened.append(name) or driver) == devices
    assert (opened, driver.asked) == (["libcuda.so.1"], [0])


def test_no_driver_no_device():
    def load(name):
        raise OSError(name)

    assert cuda_devices(load) == 0


def test_a_library_that_is_not_the_driver_has_no_device():
    assert cuda_devices(lambda _: object()) == 0


@pytest.mark.parametrize(
    ("driver", "is_told"),
    [
        (Driver(3, start=100), False),
        (Driver(3, start=803), True),
        (Driver(3, count=999), True),
    ],
    ids=["no device", "driver does not fit", "count fails"],
)
def test_a_driver_that_does_not_start_has_no_device(driver, is_told, caplog):
    assert cuda_devices(lambda _: driver) == 0
    assert bool(caplog.records) == is_told


def test_no_tensor_library_is_imported():
    code = "import sys; from local_runtime.repository.devices import cuda_devices; cuda_devices(); "
    code += "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
