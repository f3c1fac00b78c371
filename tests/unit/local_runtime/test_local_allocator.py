import os
import subprocess
import sys

import pytest

ARRAY = 96 * 2**20
"""More than the 64 MB that an arena of a thread may hold in one piece."""
COUNTED = f"""
import resource
import threading
import numpy as np
from local_runtime.executors.allocator import keep_freed_memory
keep_freed_memory()
def batches():
    np.ones({ARRAY}, np.int8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(4):
        np.ones({ARRAY}, np.int8)
    print(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
threading.Thread(target=batches).start()
"""


@pytest.mark.skipif("glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="the setting is glibc's")
@pytest.mark.parametrize(("own", "is_kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "131072"}, False)])
def test_what_a_batch_frees_is_there_for_the_next_unless_whoever_starts_the_process_says_otherwise(own, is_kept):
    rest = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    rest["NUMPY_MADVISE_HUGEPAGE"] = "0"  # one fault for each page
    counted = subprocess.run([sys.executable, "-c", COUNTED], env=rest | own, check=True, capture_output=True)
    assert (int(counted.stdout) < ARRAY // os.sysconf("SC_PAGE_SIZE")) is is_kept, counted
