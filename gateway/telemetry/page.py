"""The metrics of all workers as one page, in Prometheus's text format or as OpenMetrics with exemplars."""

import mmap
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest, multiprocess
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from gateway.telemetry import exemplars
from gateway.telemetry.exemplars import Bucket

OPENMETRICS: Final = "application/openmetrics-text"
ENDED: Final = "ended"
"""In the place of a process id in a file's name: all workers that have ended."""


class Page:
    """The page out of the files that workers write to `folder`. May be used by several threads.

    What a worker that has ended counted stays on it, in one file for all of those: a page of one file for each would
    take the longer to read the more often workers die.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # nothing is read while it stands in two files, or in none

    def read(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type.

        `accept` is the request's header; whoever names OpenMetrics there gets it, as Prometheus does. Both forms have
        the same series.
        """
        with self._lock:
            registry = CollectorRegistry()
            registry.register(_Workers(self._folder))
            if not _takes_openmetrics(accept):
                return generate_latest(registry), CONTENT_TYPE_LATEST
            told = _WithExemplars(registry, exemplars.read(self._folder))
            page: bytes = openmetrics.generate_latest(told)  # type: ignore[no-untyped-call]  # untyped there
            return page, openmetrics.CONTENT_TYPE_LATEST

    def ended(self, pid: int) -> None:
        """The worker `pid` has ended: its gauges go, its counts are added to those of all that have.

        Raises OSError where the folder has no room; the worker's own files stay then, and count as before.
        """
        with self._lock:
            multiprocess.mark_process_dead(pid, str(self._folder))  # type: ignore[no-untyped-call]  # untyped there
            for kind in ("counter", "histogram"):
                _add_up(self._folder / f"{kind}_{pid}.db", self._folder / f"{kind}_{ENDED}.db")
            exemplars.add_up(self._folder, pid, ENDED)


def _add_up(own: Path, ended: Path) -> None:
    """Add the counts of one file to those of another one, and take the first away."""
    if not own.exists():
        return
    files = [one for one in (ended, own) if one.exists()]
    new = ended.with_suffix(".new")
    with new.open("wb") as file:
        # All at once, and by a call that can fail: a write to a mapped page without room ends the process.
        os.posix_fallocate(file.fileno(), 0, max(mmap.PAGESIZE, sum(map(_used, files))))
    sums = MmapedDict(str(new))  # type: ignore[no-untyped-call]  # untyped there, like the next ones
    for one in filter(_used, files):
        for key, value, _, _ in MmapedDict.read_all_values_from_file(str(one)):  # type: ignore[no-untyped-call]  # the same
            before, _ = sums.read_value(key)  # type: ignore[no-untyped-call]  # the same
            sums.write_value(key, before + value, 0.0)  # type: ignore[no-untyped-call]  # the same
    sums.close()  # type: ignore[no-untyped-call]  # the same
    new.replace(ended)
    own.unlink()


def _used(file: Path) -> int:
    """How many bytes of it hold something: its first four say so. None where its worker has only just made it."""
    with file.open("rb") as opened:
        return int.from_bytes(opened.read(4), sys.byteorder)


class _Workers(Collector):
    """The sums over all files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        """Each metric."""
        files = [str(file) for file in self._folder.glob("*.db") if _used(file)]
        metrics: Iterable[Metric] = multiprocess.MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]  # untyped there
        return metrics


def _takes_openmetrics(accept: str) -> bool:
    """Whether one of the types in an `Accept` header is OpenMetrics, and not one that it rules out."""
    for one in accept.lower().split(","):
        name, *parameters = (part.strip() for part in one.split(";"))
        if name == OPENMETRICS:
            quality = next((part.partition("=")[2] for part in parameters if part.startswith("q=")), "1")
            return bool(quality.strip("0."))
    return False


class _WithExemplars(Collector):
    """What `metrics` tells, with an exemplar on each bucket that has one."""

    def __init__(self, metrics: Collector, newest: Mapping[Bucket, Exemplar]) -> None:
        self._metrics = metrics
        self._newest = newest
        self._histograms = {histogram for histogram, _, _ in newest}

    def collect(self) -> Iterable[Metric]:
        """Each metric."""
        for metric in self._metrics.collect():
            if metric.name in self._histograms:
                metric.samples = [self._with_exemplar(metric.name, one) for one in metric.samples]
            yield metric

    def _with_exemplar(self, histogram: str, sample: Sample) -> Sample:
        labels = dict(sample.labels)
        bound = labels.pop("le", None)
        if bound is None:
            return sample
        return sample._replace(exemplar=self._newest.get((histogram, frozenset(labels.items()), float(bound))))
