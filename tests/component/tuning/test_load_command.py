"""`gateway load` as it is typed, against a scripted gateway on a real socket."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from gateway.tuning.report import parse_report
from tests.kit.commands import command, served
from tests.kit.serving import free_port
from tests.kit.upstream import delta

ROOT = Path(__file__).resolve().parents[3]


class Scripted:
    """What was asked of it, and the page of its metrics by the number of requests so far."""

    def __init__(self):
        self.asked = []
        self.answer = lambda: JSONResponse({"output": {"x": 1}})

    async def task(self, request):
        self.asked.append((request.url.path, dict(request.headers), await request.body()))
        return self.answer()

    async def chat(self, request):
        self.asked.append((request.url.path, dict(request.headers), await request.body()))
        text = "".join(f"data: {json.dumps(delta(word))}\n\n" for word in "ab") + "data: [DONE]\n\n"
        return StreamingResponse(iter([text]), media_type="text/event-stream")

    async def metrics(self, _request):
        count = len(self.asked)
        labels = 'backend="triton",model="text_embedding",version="1"'
        return PlainTextResponse(
            f'gateway_model_requests{{{labels},outcome="ok"}} {count}\n'
            f"gateway_model_inferences{{{labels}}} {count}\n"
            f"gateway_model_executions{{{labels}}} {count / 2}\n"
            f'gateway_model_seconds{{{labels},stage="queue"}} {count * 0.001}\n'
            f'gateway_model_seconds{{{labels},stage="compute_infer"}} {count * 0.003}\n'
            f'gateway_model_batch_executions{{backend="triton",model="text_embedding",batch_size="2"}} {count / 2}\n'
        )

    @property
    def app(self):
        return Starlette(
            routes=[
                Route("/v1/tasks/{task}", self.task, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/metrics", self.metrics),
            ]
        )


@pytest.fixture
def gateway(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scripted = Scripted()
    with served(scripted.app) as url:
        (tmp_path / ".run").mkdir()
        told = {"data_url": url, "ops_url": url, "key": "gw-key"}
        (tmp_path / ".run" / "stack.json").write_text(json.dumps(told))
        scripted.url = url
        yield scripted


def load(*options):
    done = command("", "load", *options, env={"GATEWAY_OPS_URL": None, "GATEWAY_LOAD_KEY": None})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def test_alone_it_asks_the_stack_of_this_folder(gateway):
    done = load("--duration", "1s", "--warmup", "0s")
    assert done.exit_code == 0, done.output
    path, headers, body = gateway.asked[0]
    assert (path, headers["authorization"], headers["x-priority"]) == (
        "/v1/tasks/text-embedding",
        "Bearer gw-key",
        "interactive",
    )
    assert json.loads(body) == {"input": {"text": "a cat"}}
    assert "triton/text_embedding" in done.stdout
    assert "closed loop" in done.stdout
    assert "25%" in done.stdout
    assert done.stderr == ""


def test_json_is_the_report_and_nothing_else(gateway):
    done = load("--rate", "51", "--arrivals", "constant", "--duration", "1s", "--warmup", "0s", "--json")
    report = parse_report(json.loads(done.stdout))
    assert (report.whole.sent, report.whole.codes) == (50, {"ok": 50})
    (server,) = report.servers
    assert (server.mean_batch, server.queue_share, server.batch_sizes) == (2.0, 0.25, {2: 25})


def test_files_are_written(gateway, tmp_path):
    done = load("--trace", "t", "--csv", "a.csv", "--html", "a.html")
    assert (done.exit_code, done.stderr) == (2, "trace: t: No such file or directory\n")
    (tmp_path / "t").write_text("[0, 0.1, 0.2]")
    done = load("--trace", "t", "--csv", "a.csv", "--html", "a.html")
    assert done.exit_code == 0
    assert len(gateway.asked) == 3
    (row,) = csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text()))
    assert (row["class"], row["ok"]) == ("text-embedding", "3")
    assert "<svg" in (tmp_path / "a.html").read_text()


def test_an_slo_that_does_not_hold_is_an_exit_code(gateway):
    options = ("--rate", "20", "--duration", "1s", "--warmup", "0s", "--slo")
    held = load(*options, "p99=60s")
    assert held.exit_code == 0
    assert "SLO p99=60000ms held: text-embedding: 100.00 %" in held.stdout
    gateway.answer = lambda: JSONResponse({"code": "queue_full"}, status_code=429, headers={"retry-after": "1"})
    broken = load(*options, "60s")
    assert broken.exit_code == 1
    assert "not held" in broken.stdout
    assert "queue_full" in broken.stdout


def test_the_highest_load_is_looked_for(gateway):
    gateway.answer = lambda: JSONResponse({}, status_code=500)
    done = load("--find", "--concurrency", "2", "--slo", "1s", "--duration", "1s", "--warmup", "0s", "--html", "f.html")
    assert done.exit_code == 1
    assert "no load was found that holds p99=1000ms; 1 caller did not" in done.stdout
    assert done.stderr.splitlines() == [
        f"{callers}: p99=1000ms not held: 0.00 % in time, 0.0/s" for callers in ("2 callers", "1 caller")
    ]
    assert Path("f.html").read_text().count("<h2>") == 2


def test_classes_of_a_file_each_ask_their_own(gateway, tmp_path):
    (tmp_path / "mixed.yaml").write_text(
        """
classes:
  - {name: people, rate: 20, slo_ms: 60000, task: text-embedding, input: {text: a}}
  - {name: bulk, concurrency: 1, rows: 3, priority: batch, task: text-embedding, input: {text: a}}
  - {name: talk, rate: 5, chat: hello}
"""
    )
    done = load("--traffic", "mixed.yaml", "--duration", "1s", "--warmup", "0s", "--json")
    assert done.exit_code == 0, done.output
    report = parse_report(json.loads(done.stdout))
    assert [one.name for one in report.classes] == ["people", "bulk", "talk"]
    assert report.whole.sent == sum(one.sent for one in report.classes)
    assert report.classes[1].rows_per_s == 3 * report.classes[1].qps
    assert report.classes[2].first_token is not None
    asked = {
        json.loads(body)["input"]["text"].__class__: headers["x-priority"]
        for path, headers, body in gateway.asked
        if "tasks" in path
    }
    assert asked == {str: "interactive", list: "batch"}


def test_chat_streams(gateway):
    done = load("--chat", "hello", "--max-tokens", "2", "--rate", "10", "--duration", "1s", "--warmup", "0s")
    assert done.exit_code == 0, done.output
    assert "tokens/s" in done.stdout


def test_inputs_of_a_file_take_turns(gateway, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "t").write_text("[0, 0.1, 0.2]")
    assert load("--input", "@in.jsonl", "--task", "x", "--trace", "t").exit_code == 0
    assert [json.loads(body)["input"]["text"] for _, _, body in gateway.asked] == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--rate", "x"], "--rate x: write 50"),
        (["--rate", "5", "--concurrency", "2"], "rate and concurrency"),
        (["--slo", "fast"], "--slo 'fast': write an SLO as"),
        (["--find"], "--find: raises load until an SLO breaks"),
        (["--find", "--slo", "1s", "--rate", "1..5"], "--find: raises one rate"),
        (["--task", "ocr"], "input: the task has none"),
        (["--input", "{"], "--input: "),
        (["--input", "7"], "--input: must be a JSON object"),
        (["--duration", "0s"], "--duration: must be longer"),
        (["--duration", "5"], "--duration 5: write a time as"),
        (["--html", "no/such/folder.html"], "no such folder"),
        (["--traffic", "x.yaml", "--rate", "5"], "not beside it: --rate"),
        (["--url", "http://192.0.2.1:80"], "192.0.2.1: not this machine; --yes"),
        (["--priority", "high"], "priority"),
        (["--tensor", "m", "--shape", "3"], "--shape 3: write INPUT:D,D"),
        (["--shape", "X:3"], "shape: is of made-up tensors"),
        (["--traffic", "x.yaml", "--shape", "X:3"], "not beside it: --shape"),
        (["--duration", "0.4"], "--duration 0.4: write a time as"),
        (["--chat", "a", "--triton", "127.0.0.1:1"], "triton"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(gateway, options, told):
    done = load(*options)
    assert done.exit_code == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert gateway.asked == []


def test_nobody_to_ask(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = load()
    assert (done.exit_code, "run `gateway up` here" in done.stderr) == (2, True)
    done = load("--url", f"http://127.0.0.1:{free_port()}", "--rate", "5", "--duration", "1s", "--warmup", "0s")
    assert (done.exit_code, done.stderr) == (3, "nobody answers: connection_refused\n")
    assert "no --ops-url" in done.stdout


def test_another_address_gets_no_key_of_the_stack(gateway):
    with served(gateway.app) as other:
        done = load("--url", other, "--rate", "10", "--duration", "1s", "--warmup", "0s")
    assert done.exit_code == 0
    assert all("authorization" not in headers for _, headers, _ in gateway.asked)
    assert "no --ops-url" in done.stdout


def test_ctrl_c_ends_with_the_report_of_what_was_measured(gateway):
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "load", "--duration", "10m", "--warmup", "0s", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    while not gateway.asked and process.poll() is None:
        pass
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    report = parse_report(json.loads(said))
    assert report.whole.sent == sum(report.whole.codes.values()) > 0
    assert any(note.startswith("stopped after") for note in report.notes)


def test_a_page_that_cannot_be_written_does_not_cost_what_was_measured(gateway):
    done = load("--concurrency", "1", "--duration", "1s", "--warmup", "0s", "--html", "/dev/full", "--json")
    assert done.exit_code == 2
    assert parse_report(json.loads(done.stdout)).whole.codes["ok"] > 0
    assert "/dev/full: No space left on device" in done.stderr
    assert gateway.asked
