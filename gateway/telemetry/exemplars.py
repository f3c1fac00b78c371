"""Exemplars: of each bucket of some histograms the newest request whose trace is sampled, of all workers together.

The library keeps none where several processes are summed. So each worker writes its own to a file beside those of
its metrics, and the page (`page`) has them from there. They stay after their worker, as the buckets do that it
counted: an exemplar that was gone again would bring an older one back, which Prometheus refuses.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any, Final

import orjson
from prometheus_client.samples import Exemplar

from gateway.core.trace import SAMPLED, Trace

WRITE_S: Final = 1.0  # a worker's file is written once in so many seconds at most, and only when there is news
_PREFIX: Final = "exemplars_"

Bucket = tuple[str, frozenset[tuple[str, str]], float]
"""A histogram's name, its labels, and the bucket's upper bound."""
_log = logging.getLogger(__name__)


class Newest:
    """The newest exemplar of each bucket of one histogram.

    Args:
        histogram: its name.
        labels: the names of its labels.
        bounds: the upper bounds of its buckets, ascending, without infinity.
        folder: where the file is.
    """

    def __init__(self, histogram: str, labels: tuple[str, ...], bounds: tuple[float, ...], folder: "Folder") -> None:
        self._histogram = histogram
        self._labels = labels
        self._bounds = bounds
        self._folder = folder
        self._kept: dict[tuple[tuple[str, ...], int], tuple[str, float, float]] = {}
        folder.histograms.append(self)

    def seen(self, labels: tuple[str, ...], value: float, trace: Trace | None) -> None:
        """The histogram was told `value`, of a request that is part of `trace`."""
        if trace is None or not trace.flags & SAMPLED:
            return
        self._kept[labels, bisect_left(self._bounds, value)] = (trace.trace_id, value, time.time())
        if not self._folder.is_due:
            self._folder.write_soon()

    def documents(self) -> list[Mapping[str, Any]]:
        """All that is kept, for the file."""
        return [
            {
                "histogram": self._histogram,
                "labels": dict(zip(self._labels, labels, strict=True)),
                "le": str((*self._bounds, inf)[bucket]),
                "trace_id": trace_id,
                "value": value,
                "time": time_s,
            }
            for (labels, bucket), (trace_id, value, time_s) in self._kept.copy().items()
        ]


class Folder:
    """Where a worker's exemplars are written to, as one file of all its histograms.

    Args:
        path: that of the worker's metrics; None where nobody reads them, and nothing is written.

    Attributes:
        histograms: those of this process.
        is_due: the file will be written soon.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path / f"{_PREFIX}{os.getpid()}.json"
        self.histograms: list[Newest] = []
        self.is_due = self._file is None
        self._writing = threading.Lock()

    def write_soon(self) -> None:
        """Write the file in `WRITE_S`, in a thread of its own: a disk may be slow."""
        self.is_due = True
        loop = asyncio.get_running_loop()
        loop.call_later(WRITE_S, loop.run_in_executor, None, self._write)

    def _write(self) -> None:
        if self._file is None:
            return
        new = self._file.with_suffix(".new")
        with self._writing:
            self.is_due = False  # what comes from now on is written the next time, whether it is in this file or not
            rows = [row for histogram in self.histograms for row in histogram.documents()]
            try:
                new.write_bytes(orjson.dumps(rows))
                new.replace(self._file)  # whole, or not at all
            except OSError as error:
                _log.warning("exemplars cannot be written", extra={"file": str(self._file), "reason": str(error)})


def read(folder: Path) -> Mapping[Bucket, Exemplar]:
    """The newest of each bucket, of all workers that write or wrote to `folder`."""
    return {bucket: _exemplar(row) for bucket, row in _newest(folder.glob(f"{_PREFIX}*.json")).items()}


def add_up(folder: Path, pid: int, ended: str) -> None:
    """Add those of a worker that has ended to the file of all that have, named by `ended` instead of a process id."""
    own, into = (folder / f"{_PREFIX}{one}.json" for one in (pid, ended))
    own.with_suffix(".new").unlink(missing_ok=True)
    if own.exists():
        new = into.with_suffix(".new")
        new.write_bytes(orjson.dumps(list(_newest((into, own)).values())))
        new.replace(into)
        own.unlink()


def _newest(files: Iterable[Path]) -> Mapping[Bucket, Mapping[str, Any]]:
    newest: dict[Bucket, Mapping[str, Any]] = {}
    for file in files:
        for row in _rows(file):
            bucket = (row["histogram"], frozenset(row["labels"].items()), float(row["le"]))
            before = newest.get(bucket)
            if before is None or before["time"] < row["time"]:
                newest[bucket] = row
    return newest


def _rows(file: Path) -> list[dict[str, Any]]:
    """What a file holds; nothing where it is not there, or not whole: no exemplar is worth the page."""
    with contextlib.suppress(OSError, orjson.JSONDecodeError):
        rows: list[dict[str, Any]] = orjson.loads(file.read_bytes())
        return rows
    return []


def _exemplar(row: Mapping[str, Any]) -> Exemplar:
    return Exemplar({"trace_id": row["trace_id"]}, row["value"], row["time"])
