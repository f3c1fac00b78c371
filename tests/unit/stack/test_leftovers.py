import io
import os
import signal
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from gateway.stack import launch, leftovers, state
from gateway.stack.leftovers import MARK, identity, survivors
from gateway.stack.state import Identity, Leftovers, RunDir
from tests.unit.stack.standins import python

SLEEP = "import signal\nwhile True: signal.pause()"


@pytest.fixture
def run(tmp_path):
    folder = RunDir(tmp_path / "run")
    folder.create()
    return folder


@pytest.fixture
def spawn():
    started = []

    def spawn(code, **env):
        child = subprocess.Popen(python(code), env=env, start_new_session=True)
        started.append(child)
        return child

    yield spawn
    for child in started:
        child.kill()
        child.wait()


def reap(child):
    return child.wait(timeout=20)


def quiet():
    return Console(file=io.StringIO(), width=200)


def test_a_recorded_process_that_still_lives_is_ended(run, spawn):
    child = spawn(SLEEP)
    state.write_pids(run, Leftovers(run_id="r1", processes={"redis": identity(child.pid)}))
    run.stack.write_text("{}")
    console = quiet()
    assert launch.sweep(run, console) == 1
    assert reap(child) == -signal.SIGTERM
    assert "Ended 1 processes" in console.file.getvalue()
    assert not run.pids.exists()
    assert not run.stack.exists()


def test_another_process_with_a_recorded_pid_is_left_alone(run, spawn):
    child = spawn(SLEEP)
    now = identity(child.pid)
    old = Identity(pid=now.pid, started=now.started - 1)
    state.write_pids(run, Leftovers(run_id="r2", processes={"redis": old}))
    assert launch.sweep(run, quiet()) == 0
    assert child.poll() is None


def test_strays_are_found_by_the_mark_of_their_run(run, spawn):
    ours, other = spawn(SLEEP, **{MARK: "r3"}), spawn(SLEEP, **{MARK: "r33"})
    left = Leftovers(run_id="r3", processes={})
    while not survivors(left):  # the mark shows only once the new program is in place
        pass
    assert [one.pid for one in survivors(left)] == [ours.pid]
    assert leftovers.end(left, grace_s=20) == 1
    reap(ours)
    assert other.poll() is None


def test_what_ignores_sigterm_is_killed(spawn):
    child = spawn("import signal\nsignal.signal(15, signal.SIG_IGN)\nprint(flush=True)\nwhile True: signal.pause()")
    left = Leftovers(run_id="r4", processes={"triton": identity(child.pid)})
    assert leftovers.end(left, grace_s=0.2) == 1
    assert reap(child) in {-signal.SIGKILL, -signal.SIGTERM}


def test_the_supervisor_itself_and_zombies_do_not_count(spawn):
    child = spawn("")
    one = None
    while (one := identity(child.pid) or one) and identity(child.pid):
        pass
    assert identity(child.pid) is None
    own = identity(os.getpid())
    assert survivors(Leftovers(run_id="r5", processes={"supervisor": own})) == []


def test_only_the_shared_memory_of_that_run_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "_SHM", tmp_path)
    for name in ("gwstack_r6_python_1", "gwstack_r66_python_1", "triton_python_backend_shm_region_1"):
        (tmp_path / name).write_bytes(b"")
    leftovers.remove_shared_memory("r6")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "gwstack_r66_python_1",
        "triton_python_backend_shm_region_1",
    ]


def test_a_damaged_record_is_no_record(run):
    for text in ("", "[]", '{"run_id": 1}', '{"run_id": "x", "processes": {"redis": {"pid": "no"}}}'):
        run.pids.write_text(text)
        assert state.read_pids(run) is None
    assert launch.sweep(run, quiet()) == 0


def test_identity_reads_names_with_spaces_and_parentheses(tmp_path, monkeypatch):
    (tmp_path / "7").mkdir()
    fields = " ".join(["S", *map(str, range(2, 20)), "4711", "0"])
    (tmp_path / "7" / "stat").write_text(f"7 (a) b (c)) {fields}")
    monkeypatch.setattr(leftovers, "_PROC", Path(tmp_path))
    assert identity(7) == Identity(pid=7, started=4711)
    assert identity(8) is None
