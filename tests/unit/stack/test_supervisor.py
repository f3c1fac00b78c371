import asyncio
import json
import os
import signal
import stat

import pytest

from gateway.stack.leftovers import identity
from gateway.stack.process import Backoff, PartFailedError
from gateway.stack.state import read_json, read_pids
from gateway.stack.supervisor import Stops, signals, waves
from tests.unit.stack.standins import failing, lives, part, supervisor, until


async def started(made, run):
    stops = Stops()
    task = asyncio.create_task(made.run(stops))
    await until(lambda: run.stack.exists() or task.done())
    return stops, task


async def test_stack_json_holds_the_addresses_and_pids_and_is_private(tmp_path):
    made, run, text = supervisor(tmp_path, part("redis", tmp_path), part("serve", tmp_path, after=("redis",)))
    stops, task = await started(made, run)
    stack = json.loads(run.stack.read_text())
    assert stack["data_url"] == "http://127.0.0.1:1"
    assert stack["triton_grpc"] is None
    assert set(stack["pids"]) == {"redis", "serve", "supervisor"}
    assert stack["pids"]["supervisor"] == os.getpid()
    assert all(lives(pid) for pid in stack["pids"].values())
    assert stat.S_IMODE(run.stack.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.pids.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    stops.ask()
    await task
    assert not run.stack.exists()
    assert not run.pids.exists()
    assert not any(lives(stack["pids"][name]) for name in ("redis", "serve"))
    assert "Redis: ready after" in text.getvalue()
    assert "gw-dev-x" not in text.getvalue()


async def test_parts_stop_in_reverse_order(tmp_path):
    parts = (
        part("redis", tmp_path),
        part("llm", tmp_path, after=("redis",)),
        part("serve", tmp_path, after=("redis", "llm")),
    )
    made, run, _ = supervisor(tmp_path, *parts)
    stops, task = await started(made, run)
    stops.ask()
    await task
    assert (tmp_path / "journal").read_text().split() == ["serve", "llm", "redis"]


async def test_on_ready_is_called_once_and_after_stack_json(tmp_path):
    seen = []
    one = part("redis", tmp_path)
    made, run, _ = supervisor(tmp_path, one, on_ready=lambda: seen.append((tmp_path / "run/stack.json").exists()))
    stops, task = await started(made, run)
    stops.ask()
    await task
    assert seen == [True]


async def test_a_part_that_dies_is_started_again_and_its_new_pid_recorded(tmp_path):
    made, run, text = supervisor(tmp_path, part("redis", tmp_path), part("serve", tmp_path))
    stops, task = await started(made, run)
    before = read_json(run.stack)["pids"]
    os.kill(before["redis"], signal.SIGKILL)
    await until(lambda: read_json(run.stack)["pids"].get("redis") not in {None, before["redis"]})
    await until(lambda: text.getvalue().count("Redis: ready") == 2)
    after = read_json(run.stack)["pids"]
    assert after["serve"] == before["serve"]
    assert read_pids(run).processes["redis"] == identity(after["redis"])
    assert "Redis was ended by SIGKILL; it starts again in 0.01 s" in text.getvalue()
    assert run.log("redis").read_text().count("listening") == 2
    stops.ask()
    await task
    assert not lives(after["redis"])


async def test_a_part_that_does_not_start_ends_the_stack_and_the_other_parts(tmp_path):
    good = part("redis", tmp_path)
    made, run, _ = supervisor(tmp_path, good, failing("serve"))
    with pytest.raises(PartFailedError, match="Serve did not start: it exited with code 3") as caught:
        await made.run(Stops())
    assert caught.value.part.name == "serve"
    assert run.log("serve").read_text() == "no luck\n"
    assert not run.stack.exists()
    assert not run.pids.exists()


async def test_a_command_that_does_not_exist_is_a_line_not_a_traceback(tmp_path):
    missing = failing("serve")
    object.__setattr__(missing, "command", (str(tmp_path / "nothing"),))
    made, _, _ = supervisor(tmp_path, missing)
    with pytest.raises(PartFailedError, match="Serve could not be started: No such file"):
        await made.run(Stops())


async def test_a_stop_during_the_start_leaves_nothing(tmp_path):
    slow = failing("serve", "import time; time.sleep(600)")
    made, run, _ = supervisor(tmp_path, part("redis", tmp_path), slow)
    stops = Stops()
    task = asyncio.create_task(made.run(stops))
    await until(lambda: (left := read_pids(run)) is not None and "serve" in left.processes)
    pid = read_pids(run).processes["serve"].pid
    stops.ask()
    await task
    assert not lives(pid)
    assert not run.stack.exists()


async def test_a_part_that_ignores_sigterm_is_killed_after_its_grace_time(tmp_path):
    made, run, _ = supervisor(tmp_path, part("redis", tmp_path, manner="stubborn", grace_s=0.05))
    stops, task = await started(made, run)
    pid = read_json(run.stack)["pids"]["redis"]
    stops.ask()
    await task
    assert not lives(pid)


async def test_a_second_signal_kills_at_once(tmp_path):
    made, run, _ = supervisor(tmp_path, part("redis", tmp_path, manner="stubborn", grace_s=3600.0))
    stops, task = await started(made, run)
    pid = read_json(run.stack)["pids"]["redis"]
    with signals(stops):
        os.kill(os.getpid(), signal.SIGTERM)
        await until(stops.once.is_set)
        os.kill(os.getpid(), signal.SIGINT)
        await task
    assert not lives(pid)


async def test_children_of_a_part_that_outlive_it_are_ended(tmp_path):
    made, run, _ = supervisor(tmp_path, part("triton", tmp_path, manner="parent"))
    stops, task = await started(made, run)
    child = int((tmp_path / "journal.child").read_text())
    assert lives(child)
    stops.ask()
    await task
    await until(lambda: not lives(child))


def test_waits_double_up_to_the_bound_and_are_forgotten_after_a_good_while():
    backoff = Backoff()
    assert [backoff.after(0.0) for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert backoff.after(31.0) == 0.5
    assert backoff.after(0.0) == 1.0


def test_waves_follow_the_dependencies(tmp_path):
    parts = [
        part("redis", tmp_path),
        part("triton", tmp_path),
        part("admin", tmp_path, after=("redis",)),
        part("serve", tmp_path, after=("redis", "triton")),
    ]
    assert [[one.name for one in wave] for wave in waves(parts)] == [["redis", "triton"], ["admin", "serve"]]
