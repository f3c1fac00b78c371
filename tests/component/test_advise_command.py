"""`gateway advise` against scripted servers and a folder of a sweep: what it reads, says, and ends with."""

import json
import re

import pytest
import yaml

from gateway.tuning.advising.search import LEAST_GAIN
from tests.kit.commands import Scripted, command, served

CONFIG = """name: "m"
backend: "python"
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 20000 }  # once upon a time
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
TOLD = {
    "name": "m",
    "max_batch_size": 8,
    "dynamic_batching": {"max_queue_delay_microseconds": "20000"},
    "instance_group": [{"count": 1}],
}


def page(count: int) -> str:
    """The gateway's page after `count` requests, eight in each batch, that took 1 ms and waited 10 ms."""
    model = 'backend="triton",model="m"'
    lines = [
        f'gateway_model_requests{{{model},version="1",outcome="ok"}} {count}',
        f'gateway_model_inferences{{{model},version="1"}} {count}',
        f'gateway_model_executions{{{model},version="1"}} {count // 8}',
        f'gateway_model_seconds{{{model},version="1",stage="queue"}} {count * 0.01}',
        f'gateway_model_seconds{{{model},version="1",stage="compute_infer"}} {count * 0.001}',
        f'gateway_requests_total{{code="ok"}} {count}',
    ]
    return "".join(f"{line}\n" for line in lines)


def stats(count: int) -> dict:
    batches = [
        {
            "batch_size": rows,
            "compute_input": {"count": count, "ns": 0},
            "compute_infer": {"count": count, "ns": int(count * (0.2 + 0.1 * rows) * 1e6)},
            "compute_output": {"count": count, "ns": 0},
        }
        for rows in (1, 8)
    ]
    return {"model_stats": [{"name": "m", "version": "1", "batch_stats": batches}]}


@pytest.fixture
def plane(tmp_path, monkeypatch):
    """A stack at one address: `per_look` requests come between the looks."""
    repository = tmp_path / "models"
    (repository / "m" / "1").mkdir(parents=True)
    (repository / "m" / "1" / "model.py").write_text("class TritonPythonModel: pass\n")
    (repository / "m" / "config.pbtxt").write_text(CONFIG)
    document = {
        "backends": {"triton": {"kind": "triton", "url": "127.0.0.1:9", "repository": str(repository)}},
        "tasks": {"tensor": {"contract": "tensor"}},
        "rules": [{"name": "r", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]}],
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gateway.tuning.advising.search.REQUESTS", 300)
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(document))
    scripted = Scripted()
    scripted.per_look = 400

    def requests() -> int:
        """So many have come: some with each look, which asks once for the models."""
        return 1000 + scripted.per_look * sum(path == "GET /models" for path, _ in scripted.asked)

    scripted.answers = {
        "GET /models": {"items": [], "unreachable": []},
        "GET /backends": {"items": [{"backend": "triton", "is_on": True, "waiting": 0, "replicas": []}]},
        "GET /requests": {"items": []},
        "GET /overview": {"by": [], "workers": {"live": 1}, "is_stale": False},
        "GET /rules": {"rules": []},
        "GET /keys": {"items": []},
        "GET /metrics": lambda _: page(requests()),
        "POST /v2/repository/index": (200, [{"name": "m"}]),
        "GET /v2/models/m/config": TOLD,
        "GET /v2/models/stats": lambda _: stats(requests()),
    }
    with served(scripted.app) as url:
        (tmp_path / ".run").mkdir()
        told = {"admin_url": url, "ops_url": url, "triton_http": url, "admin_token": "t"}
        (tmp_path / ".run" / "stack.json").write_text(json.dumps(told))
        scripted.url = url
        yield scripted


def advise(*options: str):
    environ = {"GATEWAY_ADMIN_TOKEN": "t", "GATEWAY_ADMIN_URL": None}
    done = command("", "advise", *options, env=environ)
    return done.exit_code, done.stdout, done.stderr


def live(*options: str):
    return advise("--config", "gateway.yaml", "--for", "1s", *options)


def test_it_says_what_to_change_why_and_where(plane, tmp_path):
    status, said, _ = live()
    assert status == 1
    first, *rest = said.splitlines()
    assert first == "triton/m: max_queue_delay_microseconds 20000 -> 0"
    assert rest[0].startswith("  expected: p99 better by ")
    assert any("time of a request at the server: seen 11.0 ms, simulated" in line for line in rest)
    assert any(line.startswith("  assumes:  requests come by chance") for line in rest)
    assert f"  write in {tmp_path}/models/m/config.pbtxt:" in rest
    assert "    -dynamic_batching { max_queue_delay_microseconds: 20000 }  # once upon a time" in rest
    assert "    +dynamic_batching { max_queue_delay_microseconds: 0 }  # once upon a time" in rest


def test_a_program_gets_the_same(plane):
    status, said, _ = live("--json")
    assert status == 1
    document = json.loads(said)
    assert document["form"] == "advice/1"
    (one,) = document["advice"]
    assert one["advised"]["delay_us"] == 0
    assert one["gain"] >= LEAST_GAIN
    assert one["before"]["p99_ms"] > one["after"]["p99_ms"]


def test_it_is_silent_where_the_target_is_kept(plane):
    status, said, _ = live("--slo", "60ms")
    assert status == 0
    assert said.startswith("triton/m: nothing to change, because 100.0% of the requests are answered within 60 ms")


def test_too_few_requests_are_no_ground(plane):
    plane.per_look = 50
    status, said, _ = live()
    assert status == 0
    assert re.search(r"50 requests in \d s are too few: 300 are needed, so at this rate --for \d+s", said)


def test_without_times_by_batch_size_nothing_is_said(plane):
    plane.answers["GET /v2/models/stats"] = (404, {})
    status, said, _ = live()
    assert status == 0
    assert "its times by batch size are not known: give the HTTP address of its server (--server)" in said
    assert f"not seen: times by batch size at {plane.url}: no model server answers there" in said


def test_a_stack_without_load_needs_nothing(plane):
    plane.per_look = 0
    status, said, _ = live()
    assert (status, said) == (0, "nothing to change, because no model was under load\n")


# --- a sweep ---------------------------------------------------------------------------------------------


def swept(size: int, goodput: float) -> dict:
    times = dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "p99_9", "max"), 9.0)
    whole = {
        "name": "all",
        "slo_ms": 0.0,
        "sent": 1000,
        "codes": {"ok": 1000},
        "unfinished": 0,
        "offered": goodput,
        "qps": goodput,
        "rows_per_s": goodput,
        "goodput": goodput,
        "latency": times,
        "first_token": None,
        "inter_token": None,
        "tokens_per_s": None,
    }
    report = {
        "form": "traffic-report/1",
        "kind": "load",
        "title": "",
        "setting": {},
        "seconds": 1.0,
        "whole": whole,
        "classes": [],
        "servers": [],
        "timeline": [],
        "cost_usd": None,
        "notes": [],
    }
    setting = {"max_batch_size": size, "count": 1, "delay_us": 20_000, "preferred": [], "batching": "dynamic"}
    return {"setting": setting, "load": {"concurrency": 16, "rate": 0.0}, "report": report, "error": ""}


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    document = {
        "form": "sweep/1",
        "model": "m",
        "place": "this machine",
        "goal": {"p99_ms": 0.0},
        "cells": 9,
        "runs": [swept(8, 100.0), swept(16, 140.0)],
        "found": 0,
        "chosen": 1,
        "config_pbtxt": "# Chosen because\n" + CONFIG.replace("max_batch_size: 8", "max_batch_size: 16"),
    }
    (folder / "sweep.json").write_text(json.dumps(document))
    curve = {"form": "latency-curve/1", "model": "m", "compute_us": {"1": [4000], "8": [6000], "16": [9000]}}
    (folder / "curve.json").write_text(json.dumps(curve))
    return folder


def test_a_sweep_is_advice_with_its_own_numbers(out):
    status, said, _ = advise("--sweep", str(out))
    assert status == 1
    lines = said.splitlines()
    assert lines[:2] == [
        "m: max_batch_size 8 -> 16",
        "  expected: right answers per second better by 40%",
    ]
    assert "    -max_batch_size: 8" in lines
    assert "    +max_batch_size: 16" in lines


def test_a_sweep_changes_the_file_that_is_given(out, tmp_path):
    file = tmp_path / "own.pbtxt"
    file.write_text('name: "m"  # mine\nmax_batch_size: 8 # eight\n')
    status, said, _ = advise("--sweep", str(out), "--config-pbtxt", str(file))
    assert status == 1
    assert "    +max_batch_size: 16 # eight" in said
    assert f"  write in {file}:" in said


def test_a_sweep_at_another_rate_is_simulated(out, monkeypatch):
    monkeypatch.setattr("gateway.tuning.advising.search.REQUESTS", 300)
    status, said, _ = advise("--sweep", str(out), "--rate", "20")
    assert status == 1
    assert said.startswith("m: max_queue_delay_microseconds 20000 -> 0")
    assert "    +dynamic_batching { max_queue_delay_microseconds: 0 }" in said


@pytest.mark.parametrize(
    ("options", "status", "why"),
    [
        (("--sweep", "nowhere"), 2, "sweep.json: No such file"),
        (("--rate", "5"), 2, "--rate and --config-pbtxt go with --sweep"),
        (("--sweep", "out", "--config-pbtxt", "none"), 2, "--config-pbtxt none: cannot be read"),
    ],
)
def test_it_ends_with_a_clear_line(out, monkeypatch, options, status, why):
    monkeypatch.chdir(out.parent)
    code, said, line = advise(*options)
    assert (code, said) == (status, "")
    assert why in line


def test_what_no_sweep_has_written_is_refused(out):
    (out / "sweep.json").write_text("[]")
    assert advise("--sweep", str(out))[0] == 2
    (out / "sweep.json").write_text('{"form": "other"}')
    status, _, line = advise("--sweep", str(out))
    assert status == 2
    assert "sweep.json: form: must be 'sweep/1'" in line


@pytest.mark.parametrize(("options", "status"), [(("--for", "soon"), 2), (("--admin-url", "http://127.0.0.1:9"), 3)])
def test_it_cannot_look_there(plane, options, status):
    assert live(*options)[0] == status


def test_a_control_plane_that_refuses_is_no_change(plane):
    plane.answers["GET /models"] = (403, {"status": 403, "detail": "a viewer may not"})
    status, said, line = live()
    assert (status, said) == (3, "")
    assert "refused: a viewer may not" in line
