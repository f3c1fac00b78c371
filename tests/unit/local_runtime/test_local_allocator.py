import os
import subprocess
import sys

import pytest

PAGES_OF_ARRAY = 16 * 2**20 // os.sysconf("SC_PAGE_SIZE")
COUNTED = """
import resource
import numpy as np
from local_runtime.executors.allocator import keep_freed_memory
keep_freed_memory()
np.ones(2**21)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    np.ones(2**21)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif("glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="the setting is glibc's")
@pytest.mark.parametrize(("own", "is_kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "131072"}, False)])
def test_what_a_batch_frees_is_there_for_the_next_unless_whoever_starts_the_process_says_otherwise(own, is_kept):
    rest = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    counted = subprocess.run([sys.executable, "-c", COUNTED], env=rest | own, check=True, capture_output=True)
    assert (int(counted.stdout) < PAGES_OF_ARRAY) is is_kept, counted
