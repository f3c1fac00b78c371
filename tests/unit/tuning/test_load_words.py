"""What is written for `gateway load`: SLOs, recordings, files of traffic, requests."""

import json

import numpy as np
import pytest

from gateway.core.tensors import to_numpy
from gateway.tuning.load import asks, made_up, traffic_file
from gateway.tuning.load.asks import Ask, AskError
from gateway.tuning.load.recorded import instants
from gateway.tuning.report import Tally, class_report
from gateway.tuning.slo import Slo, parse_slo
from gateway.tuning.traffic import TrafficClass, TrafficError

URL = "http://127.0.0.1:8080"


@pytest.mark.parametrize(
    ("text", "percent", "ms"),
    [("50ms", 99, 50), ("p99=100ms", 99, 100), ("p99.9=2s", 99.9, 2000), ("P50=1.5ms", 50, 1.5), ("1s", 99, 1000)],
)
def test_an_slo_is_read(text, percent, ms):
    assert parse_slo(text) == Slo(percent=percent, ms=ms)
    assert parse_slo(str(parse_slo(text))) == parse_slo(text)


@pytest.mark.parametrize("text", ["", "50", "p99", "p100=5ms", "p99=0ms", "p=5ms", "99=5ms", "-5ms", "p99=5m"])
def test_what_is_no_slo_is_refused(text):
    with pytest.raises(ValueError, match="write an SLO as"):
        parse_slo(text)


@pytest.mark.parametrize(("late", "wrong", "is_held"), [(1, 0, True), (2, 0, False), (0, 1, True), (1, 1, False)])
def test_errors_and_what_is_never_answered_are_late(late, wrong, is_held):
    tally = Tally(name="a", slo_ms=10, rows=1, from_s=0, until_s=10)
    for number in range(100):
        tally.due(1.0)
        if number < wrong:
            continue  # never answered
        tally.ended(1.0, 1.02 if number < wrong + late else 1.005)
    assert Slo(ms=10).is_held(class_report([tally], name="a", seconds=1)) is is_held


def test_an_slo_of_nothing_is_not_held():
    tally = Tally(name="a", slo_ms=10, rows=1, from_s=0, until_s=10)
    assert not Slo(ms=10).is_held(class_report([tally], name="a", seconds=1))


@pytest.mark.parametrize(
    "text",
    [
        "[7.0, 5, 5.5]",
        "# seconds\n5\n\n5.5\n7\n",
        '{"at_s": 5}\n{"at_s": 5.5}\n{"timestamp": 7}\n',
        "2026-01-31T10:00:05Z\n2026-01-31T10:00:05.5Z\n2026-01-31T10:00:07+00:00\n",
    ],
)
def test_a_recording_begins_with_its_first_request(text):
    assert instants(text) == pytest.approx((0, 0.5, 2))


def test_the_gateways_own_log_is_a_recording_of_when_requests_began():
    lines = [
        {"time": "2026-01-31T10:00:06+00:00", "logger": "gateway.access", "event": "request", "total_ms": 1000.0},
        {"time": "2026-01-31T10:00:05.5+00:00", "logger": "gateway.access", "event": "request", "total_ms": 100.0},
        {"time": "2026-01-31T10:00:05+00:00", "logger": "gateway.serve", "event": "ready"},
        {"time": "2026-01-31T10:00:09+00:00", "logger": "gateway.access", "event": "request", "task": "ocr"},
    ]
    text = "\n".join(json.dumps(one) for one in lines)
    assert instants(text) == pytest.approx((0, 0.4, 4))
    assert instants(text, task="ocr") == pytest.approx((0, 0.4, 4))
    assert instants(text, task="chat") == pytest.approx((0, 0.4))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no request"),
        ("1\nx\n", "line 2"),
        ('{"a": 1}', "line 1"),
        ("{", "line 1"),
        ("[1, true]", r"\[1\]"),
        ("[1", "trace: "),
        ("1\nnan", "line 2"),
        ("inf", "line 1"),
        ('{"at": null}', "line 1"),
    ],
)
def test_what_is_no_recording_is_refused_with_its_place(text, told):
    with pytest.raises(TrafficError, match=told):
        instants(text)


def test_classes_of_a_file_have_their_own_keys_requests_and_traces(tmp_path):
    (tmp_path / "trace.txt").write_text("0\n1\n")
    (tmp_path / "traffic.yaml").write_text(
        """
classes:
  - {name: people, rate: 50, slo_ms: 100, task: text-embedding, input: {text: [a, b]}}
  - {name: bulk, concurrency: 2, rows: 8, priority: batch, key_env: BULK, task: text-embedding, input: {text: a}}
  - {name: again, trace: trace.txt, speed: 2, tensor: m, triton: "127.0.0.1:1"}
"""
    )
    parts = traffic_file.read(tmp_path / "traffic.yaml", url=URL, key="k", environ={"BULK": "secret"})
    people, bulk, again = parts
    assert (people.traffic.rows, people.ask.key, people.traffic.slo_ms) == (2, "k", 100)
    assert (bulk.traffic.rows, bulk.ask.key, bulk.traffic.priority) == (8, "secret", "batch")
    assert (again.traffic.trace, again.ask.triton, again.ask.url) == ((0, 1), "127.0.0.1:1", "")
    assert "secret" not in repr(parts)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("classes: []", "list `classes`"),
        ("a: 1", "list `classes`"),
        ("{", "traffic.yaml"),
        ("classes: [1]", r"classes\[0\]: must be an object"),
        ("classes: [{rate: 1}]", "task, tensor or chat"),
        ("classes: [{rate: 1, task: a, tensor: b}]", "task, tensor or chat"),
        ("classes: [{task: a, input: {text: a}}]", "rate, concurrency and trace"),
        ("classes: [{rate: 1, task: a, input: {text: a}, colour: red}]", r"classes\[0\].colour"),
        ("classes: [{rate: 1, task: a, input: 7}]", r"classes\[0\].input"),
        ("classes: [{rate: 1, task: a, input: {text: a}, key_env: NONE}]", "key_env"),
        ("classes: [{rate: 1, chat: a}, {rate: 1, chat: a}]", "a name of its own"),
        ("classes: [{trace: none.txt, chat: a}]", "none.txt"),
        ("classes: [{rate: 1, chat: a, sequence_length: 3}]", r"classes\[0\].sequence_length: sequences are simulated"),
    ],
)
def test_faults_of_a_file_are_told_with_their_place(tmp_path, text, told):
    (tmp_path / "traffic.yaml").write_text(text)
    with pytest.raises((AskError, TrafficError), match=told):
        traffic_file.read(tmp_path / "traffic.yaml", url=URL, key="", environ={})


def split(request):
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return first, dict(line.lower().split(": ", 1) for line in lines), body


def test_a_file_that_is_not_there_is_told_in_plain_words(tmp_path):
    absent = tmp_path / "absent"
    with pytest.raises(AskError, match=f"^traffic: {absent}: No such file or directory$"):
        traffic_file.read(absent, url=URL, key="k", environ={})


def test_a_tasks_text_is_asked_for_as_often_as_there_are_rows():
    ask = Ask(url=f"{URL}/under", key="K", task="text-embedding", input=({"text": "a"}, {"text": "b"}))
    one, other = asks.task_requests(ask, TrafficClass(rate=1, rows=3, priority="batch"))
    first, headers, body = split(one)
    assert first == "POST /under/v1/tasks/text-embedding HTTP/1.1"
    assert (headers["authorization"], headers["x-priority"]) == ("bearer k", "batch")
    assert (headers["host"], headers["content-length"]) == ("127.0.0.1:8080", str(len(body)))
    assert json.loads(body) == {"input": {"text": ["a"] * 3}}
    assert json.loads(split(other)[2]) == {"input": {"text": ["b"] * 3}}


def test_an_image_is_a_whole_body(tmp_path):
    (tmp_path / "cat.png").write_bytes(b"image")
    ask = Ask(url=URL, task="ocr", image=str(tmp_path / "cat.png"))
    _, headers, body = split(asks.task_requests(ask, TrafficClass(rate=1))[0])
    assert (headers["content-type"], body) == ("image/png", b"image")


@pytest.mark.parametrize(
    ("given", "rows", "told"),
    [
        ({"task": "t", "input": {"labels": []}}, 2, "rows"),
        ({"task": "t", "image": "no.png"}, 1, "no.png"),
        ({"task": "t", "image": "no.txt"}, 1, "does not end like"),
        ({"task": "t", "image": "no.png"}, 2, "rows"),
        ({"task": "t", "input": {"text": "a"}, "url": "127.0.0.1:80"}, 1, "is not an address"),
        ({"task": "t", "input": {"text": "a"}, "url": "http://h:x"}, 1, "url"),
        ({"task": "t", "input": {"text": "a"}, "key": "a\nb"}, 1, "key"),
    ],
)
def test_requests_that_cannot_be_made(given, rows, told):
    with pytest.raises(AskError, match=told):
        asks.task_requests(Ask(**{"url": URL, **given}), TrafficClass(rate=1, rows=rows))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"task": "t"}, "input"),
        ({"task": "t", "input": {"text": "a"}, "url": ""}, "url"),
        ({"chat": "a", "triton": "h:1"}, "triton"),
        ({"tensor": "m", "image": "a.png"}, "image"),
        ({"tensor": "m", "shape": {"X": [0]}}, "shape"),
        ({"task": "t", "input": {"text": "a"}, "shape": {"X": [1]}}, "shape"),
    ],
)
def test_what_makes_no_request(given, told):
    with pytest.raises(AskError, match=told):
        Ask(**{"url": URL, **given})


CONFIG = {
    "max_batch_size": 8,
    "input": [
        {"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]},
        {"name": "IDS", "data_type": "TYPE_INT64", "dims": ["-1"]},
        {"name": "X", "data_type": "TYPE_FP32", "dims": [2, -1]},
    ],
}


def test_tensors_are_made_up_with_the_types_and_shapes_of_the_model():
    made = made_up.tensors(CONFIG, Ask(url=URL, tensor="m", shape={"IDS": [5], "X": [2, 5]}), rows=3, seed=1)
    text, ids, x = (to_numpy(one) for one in made)
    assert text.tolist() == [[b"a cat"]] * 3
    assert ids.tolist() == [[1] * 5] * 3
    assert (x.shape, x.dtype) == ((3, 2, 5), np.float32)
    again = made_up.tensors(CONFIG, Ask(url=URL, tensor="m", shape={"IDS": [5], "X": [2, 5]}), rows=3, seed=1)
    assert bytes(again[2].data) == bytes(made[2].data)


def test_values_of_one_row_are_taken():
    ask = Ask(url=URL, tensor="m", input={"IDS": [7, 8], "TEXT": ["dog"]})
    text, ids, _ = (to_numpy(one) for one in made_up.tensors(CONFIG, ask, rows=2, seed=1))
    assert (ids.tolist(), text.tolist()) == ([[7, 8]] * 2, [[b"dog"]] * 2)


def test_a_model_without_batches_has_no_dimension_for_them():
    config = {"input": [{"name": "X", "data_type": "TYPE_INT32", "dims": [3]}]}
    (x,) = made_up.tensors(config, Ask(url=URL, tensor="m"), rows=1, seed=1)
    assert x.shape == (3,)
    with pytest.raises(AskError, match="no batches"):
        made_up.tensors(config, Ask(url=URL, tensor="m"), rows=2, seed=1)


@pytest.mark.parametrize(
    ("given", "told"),
    [({"Z": 1}, "has no 'Z'"), ({"IDS": ["x"]}, "input.IDS"), ({"IDS": [10**30]}, "input.IDS")],
)
def test_values_that_do_not_fit(given, told):
    with pytest.raises(AskError, match=told):
        made_up.tensors(CONFIG, Ask(url=URL, tensor="m", input=given), rows=1, seed=1)


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ({"Z": [1]}, "shape: the model has no 'Z'"),
        ({"X": [3, 5]}, r"shape.X: the model takes \[2, -1\], not \[3, 5\]"),
        ({"X": [2]}, r"shape.X: the model takes \[2, -1\], not \[2\]"),
    ],
)
def test_shapes_that_do_not_fit(shape, told):
    with pytest.raises(AskError, match=told):
        made_up.tensors(CONFIG, Ask(url=URL, tensor="m", shape=shape), rows=1, seed=1)


def test_dimensions_of_any_size_are_1_where_nobody_says_more():
    text, ids, x = (to_numpy(one) for one in made_up.tensors(CONFIG, Ask(url=URL, tensor="m"), rows=2, seed=1))
    assert (text.shape, ids.shape, x.shape) == ((2, 1), (2, 1), (2, 2, 1))
