"""A worker as a process: how late its event loop is, its memory, processor time and open files."""

import asyncio
import os
import time
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway import __version__

SAMPLE_S: Final = 0.1
SAMPLES_A_LOOK: Final = 10  # process figures are read once a second
LAG_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_SELF: Final = Path("/proc/self")


class ProcessMetrics:
    """The metrics of one worker, fed by a task between `start` and `close`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = Histogram(
            "gateway_event_loop_lag_seconds",
            "How much later than it should a worker's event loop came to a task that waits, ten times a second.",
            buckets=LAG_BUCKETS,
            registry=registry,
        )
        self._memory = Gauge(
            "gateway_worker_memory_bytes",
            "Resident memory of all workers; pages that they share count for each.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._cpu = Counter("gateway_worker_cpu_seconds", "Processor time of all workers.", registry=registry)
        self._open_fds = Gauge(
            "gateway_worker_open_fds",
            "Open files and sockets of all workers.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        build = Gauge(
            "gateway_build_info",
            "1, with the version that runs.",
            ("version",),
            registry=registry,
            multiprocess_mode="livemax",
        )
        build.labels(__version__).set(1)
        self._cpu_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Measure from now on, in the running loop."""
        self._look()
        self._task = asyncio.get_running_loop().create_task(self._sample(), name="process-metrics")

    async def close(self) -> None:
        """Stop measuring."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._look()

    async def _sample(self) -> None:
        while True:
            for _ in range(SAMPLES_A_LOOK):
                began_s = time.monotonic()
                await asyncio.sleep(SAMPLE_S)
                self._lag.observe(max(0.0, time.monotonic() - began_s - SAMPLE_S))
            self._look()

    def _look(self) -> None:
        """Read the process's own figures: three short reads of memory, no disk."""
        pages = int((_SELF / "statm").read_text().split()[1])
        self._memory.set(pages * _PAGE_BYTES)
        self._open_fds.set(len(list((_SELF / "fd").iterdir())))
        spent_s, self._cpu_s = time.process_time() - self._cpu_s, time.process_time()
        self._cpu.inc(spent_s)
