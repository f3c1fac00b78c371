import json
import os
import socket

import pytest

from gateway.tuning.report import Report, Tally, class_report
from gateway.tuning.sweep.memory import listener, resident_bytes
from gateway.tuning.sweep.record import FILE, Run, opened
from gateway.tuning.sweep.settings import Cell, Load, Setting, SweepError

SPACE = {"model": "m", "seconds": 1.0}


def run(size=8, *, error=""):
    cell = Cell(setting=Setting(max_batch_size=size, count=1, preferred=(4,)), load=Load(concurrency=16))
    if error:
        return Run(cell=cell, is_long=False, why="promising", error=error)
    tally = Tally(name="all", slo_ms=5, rows=1, from_s=0, until_s=10)
    for number in range(10):
        tally.due(number)
        tally.ended(number, number + 0.001 * number)
    report = Report(kind="load", title="m", setting={}, seconds=10, whole=class_report([tally], name="all", seconds=10))
    return Run(cell=cell, is_long=True, why="once more", report=report, memory_bytes=7)


def test_runs_are_on_disk_at_once_and_come_back(tmp_path):
    with opened(tmp_path / "new", SPACE, is_resumed=False) as record:
        record.add(run())
        record.add(run(error="no room"))
        assert len((tmp_path / "new" / FILE).read_text().splitlines()) == 3
    with opened(tmp_path / "new", SPACE, is_resumed=True) as record:
        assert record.runs == [run(), run(error="no room")]
        record.add(run(2))
    with opened(tmp_path / "new", SPACE, is_resumed=True) as record:
        assert record.runs == [run(), run(error="no room"), run(2)]


def test_the_search_sees_good_answers_and_a_failed_run_as_the_worst():
    seen = run().seen()
    assert (seen.qps, seen.goodput, seen.memory_bytes) == (1.0, 0.6, 7)
    assert seen.p99_ms == pytest.approx(9)
    failed = run(error="no room").seen()
    assert (failed.qps, failed.p99_ms) == (0.0, float("inf"))


def test_what_a_killed_sweep_wrote_half_is_left_out_and_the_next_run_stands_on_its_own_line(tmp_path):
    with opened(tmp_path, SPACE, is_resumed=False) as record:
        record.add(run())
    file = tmp_path / FILE
    file.write_text(file.read_text() + '{"setting": {"max_b')
    with opened(tmp_path, SPACE, is_resumed=True) as record:
        assert record.runs == [run()]
        record.add(run(2))
    with opened(tmp_path, SPACE, is_resumed=True) as record:
        assert record.runs == [run(), run(2)]


def refused(folder, space=SPACE, *, is_resumed=True):
    with pytest.raises(SweepError) as error, opened(folder, space, is_resumed=is_resumed):
        pass
    return str(error.value)


def test_a_folder_with_a_sweep_is_not_begun_anew(tmp_path):
    with opened(tmp_path, SPACE, is_resumed=False):
        pass
    assert "go on with it by --resume" in refused(tmp_path, is_resumed=False)


def test_a_sweep_of_something_else_is_not_gone_on_with(tmp_path):
    with opened(tmp_path, SPACE, is_resumed=False):
        pass
    words = refused(tmp_path, {"model": "other", "seconds": 2.0})
    assert words == f"--resume: {tmp_path} holds a sweep of something else: its model, seconds differ"


@pytest.mark.parametrize("text", ["nonsense\n", "[]\n", '{"form": "sweep-runs/1"}\n', "half"])
def test_what_is_no_record_is_told(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert "--resume: " in refused(tmp_path)


def test_two_sweeps_do_not_share_a_folder(tmp_path):
    with opened(tmp_path, SPACE, is_resumed=False):
        assert "another sweep writes into it now" in refused(tmp_path)


def test_a_place_that_is_no_folder_is_told(tmp_path):
    (tmp_path / "file").write_text(json.dumps({}))
    assert refused(tmp_path / "file").startswith(f"--output {tmp_path / 'file'}: ")


def test_memory_of_a_process_is_seen_and_who_listens_on_a_port():
    assert resident_bytes(os.getpid()) > 2**20
    assert resident_bytes(2**22 + 1) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listener("127.0.0.1", port) == listener("localhost", port) == os.getpid()
    assert listener("127.0.0.1", port) is None
    assert listener("10.0.0.1", port) is None
    assert listener("triton.example", port) is None


def test_one_that_was_killed_while_it_began_is_a_new_one(tmp_path):
    (tmp_path / FILE).write_text('{"form": "sweep-runs/1", "sp')
    with opened(tmp_path, SPACE, is_resumed=True) as record:
        record.add(run())
    with opened(tmp_path, SPACE, is_resumed=True) as record:
        assert record.runs == [run()]


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / FILE).write_bytes(b"\xff\xfe\n")
    with pytest.raises(SweepError, match="is no record of a sweep"), opened(tmp_path, SPACE, is_resumed=True):
        pass
