"""The page of all workers' metrics: what stays on it of those that have ended, and what cannot take it away."""

import itertools
import math
import os
import subprocess
import sys
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.settings import METRICS_DIR_ENV
from gateway.telemetry import exemplars
from gateway.telemetry.page import Page

OPEN = "application/openmetrics-text"
WORKER = """
import json, os, sys
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
registry = CollectorRegistry()
for name in json.loads(sys.argv[1]):
    Counter("c", "A count.", ("name",), registry=registry).labels(name).inc(3)
    registry = CollectorRegistry()
Histogram("h", "Times.", buckets=(1.0,), registry=registry).observe(0.5)
Gauge("g", "Now.", registry=registry, multiprocess_mode="livesum").set(1)
print(os.getpid())
"""


def worker(folder, *names):
    """A process that counts, and ends. Its process id."""
    environment = {**os.environ, METRICS_DIR_ENV: str(folder)}
    named = "[" + ",".join(f'"{name}"' for name in names) + "]"
    told = subprocess.run([sys.executable, "-c", WORKER, named], env=environment, check=True, capture_output=True)
    return int(told.stdout)


def samples(page, accept=""):
    families = text_string_to_metric_families(page.read(accept)[0].decode())
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def exemplar(folder, pid, number, at_s):
    row = {"histogram": "h", "labels": {}, "le": "1.0", "trace_id": f"{number:032x}", "value": 0.5, "time": at_s}
    (folder / f"exemplars_{pid}.json").write_bytes(exemplars.orjson.dumps([row]))


def test_what_workers_counted_stays_when_they_have_ended_in_as_few_files_as_there_are_kinds(tmp_path):
    page = Page(tmp_path)
    first, second, living = worker(tmp_path, "a"), worker(tmp_path, "a", "b"), worker(tmp_path, "b")
    before = samples(page)
    assert before["c_total", "a"] == before["c_total", "b"] == 6
    page.ended(first)
    page.ended(second)
    assert {name: value for name, value in samples(page).items() if name != ("g",)} == {
        name: value for name, value in before.items() if name != ("g",)
    }
    assert (before["g",], samples(page)["g",]) == (3, 1)
    ended, own = ({f"{kind}_{one}.db" for kind in ("counter", "histogram")} for one in ("ended", living))
    assert {file.name for file in tmp_path.iterdir()} == ended | own | {f"gauge_livesum_{living}.db"}


def test_the_files_of_those_that_have_ended_grow_by_what_is_new_in_them_alone(tmp_path):
    page = Page(tmp_path)
    page.ended(worker(tmp_path, "a"))
    size = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    for _ in range(3):
        page.ended(worker(tmp_path, "a"))
    assert samples(page)["c_total", "a"] == 12
    assert all(file.stat().st_size <= 2 * size[file.name] for file in tmp_path.iterdir())


def test_a_page_that_is_read_meanwhile_has_everything_once(tmp_path):
    page = Page(tmp_path)
    pids = [worker(tmp_path, "a") for _ in range(4)]
    seen, over = [], threading.Event()

    def read():
        while not over.is_set():
            seen.append(samples(page)["c_total", "a"])

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for pid in pids:
        page.ended(pid)
    over.set()
    for reader in readers:
        reader.join()
    assert set(seen) == {12.0}


def test_a_process_of_the_same_number_counts_on(tmp_path):
    page = Page(tmp_path)
    pid = worker(tmp_path, "a")
    page.ended(pid)
    again = worker(tmp_path, "a")
    for file in tmp_path.glob(f"*_{again}.db"):
        file.rename(tmp_path / file.name.replace(str(again), str(pid)))
    assert samples(page)["c_total", "a"] == 6
    page.ended(pid)
    assert samples(page)["c_total", "a"] == 6


@pytest.mark.parametrize("content", [b"", bytes(4096)])
@pytest.mark.parametrize("kind", ["counter", "histogram", "gauge_livesum"])
def test_a_worker_that_is_killed_while_it_makes_a_file_costs_nothing(tmp_path, kind, content):
    page = Page(tmp_path)
    worker(tmp_path, "a")
    (tmp_path / f"{kind}_1.db").write_bytes(content)
    assert samples(page)["c_total", "a"] == samples(page, OPEN)["c_total", "a"] == 3
    page.ended(1)
    assert samples(page)["c_total", "a"] == 3


def test_a_folder_without_room_leaves_everything_as_it_was(tmp_path, monkeypatch):
    page = Page(tmp_path)
    pid = worker(tmp_path, "a")
    page.ended(worker(tmp_path, "a"))

    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        page.ended(pid)
    assert samples(page)["c_total", "a"] == 6
    monkeypatch.undo()
    page.ended(pid)
    assert samples(page)["c_total", "a"] == 6


def test_exemplars_of_ended_workers_stay_and_the_newest_counts(tmp_path):
    page, numbers = Page(tmp_path), itertools.count(1)
    for pid, at_s in ((11, 1.0), (12, 3.0), (13, 2.0)):
        exemplar(tmp_path, pid, next(numbers), at_s)
    (tmp_path / "exemplars_12.new").write_bytes(b"[{")
    for pid in (11, 12, 13, 14):
        page.ended(pid)
    assert [file.name for file in tmp_path.iterdir()] == ["exemplars_ended.json"]
    exemplar(tmp_path, 15, next(numbers), math.nextafter(3.0, 0.0))
    (one,) = exemplars.read(tmp_path).values()
    assert one.labels == {"trace_id": f"{2:032x}"}


@pytest.mark.parametrize("content", [b"", b"[{", b"\xff"])
def test_an_exemplar_file_that_is_not_whole_costs_its_exemplars_alone(tmp_path, content):
    page = Page(tmp_path)
    worker(tmp_path, "a")
    exemplar(tmp_path, 12, 1, 1.0)
    (tmp_path / "exemplars_11.json").write_bytes(content)
    assert b'trace_id="' in page.read(OPEN)[0]
    page.ended(11)
    assert b'trace_id="' in page.read(OPEN)[0]
