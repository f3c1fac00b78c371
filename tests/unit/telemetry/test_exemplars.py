"""Exemplars of one process, in memory and in its file; and who gets OpenMetrics."""

import asyncio

import pytest

from gateway.core.trace import RANDOM, SAMPLED, Trace
from gateway.telemetry import exemplars
from gateway.telemetry.exemplars import Folder, Newest, read
from gateway.telemetry.page import Page
from tests.kit.wait import until

AT = ("chat", "llm")
BOUNDS = (0.1, 1.0)


def trace(number, flags=SAMPLED):
    return Trace(trace_id=f"{number:032x}", span_id="b7ad6b7169203331", flags=flags)


def newest(folder):
    folder.is_due = True  # nothing is written by itself
    return Newest("h_seconds", ("task", "backend"), BOUNDS, folder)


def shown(path):
    return {bound: int(one.labels["trace_id"], 16) for (_, _, bound), one in read(path).items()}


@pytest.mark.parametrize(("value", "bound"), [(0.0, 0.1), (0.1, 0.1), (0.11, 1.0), (1.0, 1.0), (1.1, float("inf"))])
def test_each_bucket_has_the_newest_request_that_it_counted(tmp_path, value, bound):
    folder = Folder(tmp_path)
    histogram = newest(folder)
    histogram.seen(AT, value, trace(1))
    histogram.seen(AT, value, trace(2))
    folder._write()
    ((bucket, one),) = read(tmp_path).items()
    assert bucket == ("h_seconds", frozenset({("task", "chat"), ("backend", "llm")}), bound)
    assert (one.labels, one.value) == ({"trace_id": f"{2:032x}"}, value)


@pytest.mark.parametrize("given", [None, trace(1, flags=0), trace(1, flags=RANDOM)])
def test_a_request_whose_trace_nobody_records_is_none(tmp_path, given):
    folder = Folder(tmp_path)
    histogram = newest(folder)
    histogram.seen(AT, 0.5, given)
    assert not histogram.documents()


def test_of_several_workers_the_newest_counts(tmp_path, monkeypatch):
    for pid, seen in enumerate(((1.0, trace(1)), (3.0, trace(3)), (2.0, trace(2)))):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        monkeypatch.setattr("time.time", lambda at=seen[0]: at)
        folder = Folder(tmp_path)
        newest(folder).seen(AT, 0.5, seen[1])
        folder._write()
    assert shown(tmp_path) == {1.0: 3}


async def test_what_comes_is_written_in_a_while_and_all_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(exemplars, "WRITE_S", 0.01)
    histogram = Newest("h_seconds", ("task", "backend"), BOUNDS, Folder(tmp_path))
    histogram.seen(AT, 0.05, trace(1))
    histogram.seen(AT, 0.5, trace(2))
    assert not shown(tmp_path)
    await until(lambda: shown(tmp_path) == {0.1: 1, 1.0: 2})
    histogram.seen(AT, 0.05, trace(3))
    await until(lambda: shown(tmp_path) == {0.1: 3, 1.0: 2})


async def test_a_folder_that_is_gone_costs_a_line_in_the_log_alone(tmp_path, caplog):
    folder = Folder(tmp_path / "gone")
    newest(folder).seen(AT, 0.05, trace(1))
    await asyncio.to_thread(folder._write)
    assert [one.getMessage() for one in caplog.records] == ["exemplars cannot be written"]


async def test_without_a_folder_nothing_is_written():
    folder = Folder(None)
    Newest("h_seconds", ("task", "backend"), BOUNDS, folder).seen(AT, 0.05, trace(1))
    assert folder.is_due  # for ever


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4", False),
        ("application/openmetrics-text", True),
        ("application/OpenMetrics-text; version=1.0.0; q=0.8, text/plain;q=0.5", True),
        ("text/plain;q=0.5,application/openmetrics-text;q=0.1", True),
        ("text/plain,application/openmetrics-text;q=0", False),
        ("text/plain,application/openmetrics-text; q=0.000", False),
        (";;,,", False),
    ],
)
def test_who_asks_for_openmetrics_gets_it(tmp_path, accept, is_open):
    page, kind = Page(tmp_path).read(accept)
    assert kind.startswith("application/openmetrics-text") is is_open
    assert page == (b"# EOF\n" if is_open else b"")
