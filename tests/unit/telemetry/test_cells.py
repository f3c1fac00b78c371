"""Counts that are written to their places in the files themselves: the page has them as if the library had."""

import os
import subprocess
import sys

import pytest
from prometheus_client import values
from prometheus_client.parser import text_string_to_metric_families

from gateway.settings import METRICS_DIR_ENV
from gateway.telemetry.cells import count_in_place
from gateway.telemetry.page import Page

MANY = 2000  # series: more than the file has room for when it is made
COUNTING = f"""
import sys
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from gateway.telemetry.cells import count_in_place, counting
in_place = sys.argv[1] == "in place"
if in_place:
    count_in_place()
    count_in_place()
registry = CollectorRegistry()
counter = Counter("c", "Counts.", ("name",), registry=registry)
first = counter.labels("first")
first.inc()
for number in range({MANY}):
    counter.labels(str(number)).inc(number + 0.5)
(counting(first) if in_place else first.inc)(2)
sums = Gauge("sums", "Now.", registry=registry, multiprocess_mode="livesum")
sums.inc(5)
sums.dec(2)
sums.set(7)
sums.inc()
newest = Gauge("newest", "Now.", registry=registry, multiprocess_mode="livemostrecent")
newest.set(4)
times = Histogram("h", "Times.", ("name",), buckets=(1.0, 2.0), registry=registry).labels("x")
for time in (-0.5, 0.5, 1.0, 1.5, 1.75, 2.0, 9):
    (counting(times) if in_place else times.observe)(time)
"""


def counted(folder, how):
    """The page of a process that has counted so."""
    folder.mkdir()
    subprocess.run([sys.executable, "-c", COUNTING, how], env={**os.environ, METRICS_DIR_ENV: str(folder)}, check=True)
    return Page(folder).read("")[0].decode()


def test_the_page_is_the_librarys(tmp_path):
    in_place, as_ever = counted(tmp_path / "a", "in place"), counted(tmp_path / "b", "as ever")
    assert sorted(in_place.splitlines()) == sorted(as_ever.splitlines())
    found = {
        (one.name, *one.labels.values()): one.value
        for f in text_string_to_metric_families(in_place)
        for one in f.samples
    }
    assert found["c_total", "first"] == 3
    assert found["c_total", str(MANY - 1)] == MANY - 0.5
    assert found["sums",] == 8
    assert found["h_sum", "x"] == 15.25


def test_where_nothing_is_kept_in_files_the_library_counts(monkeypatch):
    monkeypatch.setattr(values, "ValueClass", values.MutexValue)
    count_in_place()
    assert values.ValueClass is values.MutexValue


@pytest.fixture(autouse=True)
def _librarys_own(monkeypatch):
    """Whatever a test sets is set back."""
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
