"""What an answer is worth."""

import json

import pytest

from gateway.tuning.load import judging
from gateway.tuning.load.http_wire import Answer


def answer(body=b"", *, status=200, trouble="", headers=None, parts=None):
    parts = [body] if parts is None else parts
    at = [1.0 + index for index in range(len(parts))]
    return Answer(status=status, trouble=trouble, headers=headers or {}, parts=parts, at=at, ended_at=9.0)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"output": {}}', "ok"),
        (b'{"id": 1}', "wrong_answer"),
        (b"[]", "wrong_answer"),
        (b"<html>", "wrong_answer"),
        (b"", "wrong_answer"),
        (b'{"output": "' + b"x" * judging.WHOLE_BYTES + b'"}\n', "ok"),
        (b'{"output": "' + b"x" * judging.WHOLE_BYTES, "wrong_answer"),
    ],
)
def test_an_answer_of_a_task_has_an_output(body, code):
    assert judging.task(answer(body)).code == code


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"code": "queue_full"}', "queue_full"),
        (b'{"error": {"code": "rate_limited", "type": "t"}}', "rate_limited"),
        (b'{"error": {"code": null, "type": "server_error"}}', "server_error"),
        (b'{"error": "text"}', "http_503"),
        (b'{"code": "x\\u001b[2J"}', "http_503"),
        (b"oops", "http_503"),
    ],
)
@pytest.mark.parametrize("judge", [judging.task, judging.tensors, judging.chat])
def test_an_error_is_told_by_its_code(judge, body, code):
    found = judge(answer(body, status=503, headers={b"retry-after": b"7"}))
    assert (found.code, found.retry_after_s, found.ended_at) == (code, 7, 9.0)


@pytest.mark.parametrize("judge", [judging.task, judging.tensors, judging.chat])
def test_what_kept_an_answer_from_being_whole_is_its_code(judge):
    assert judge(answer(b"", trouble="connection_closed", status=0, parts=[])).code == "connection_closed"


def tensors(document, raw=b"", length=None):
    head = json.dumps(document).encode()
    shown = str(len(head) if length is None else length).encode()
    return judging.tensors(answer(head + raw, headers={b"inference-header-content-length": shown})).code


def test_tensors_are_as_long_as_their_head_says():
    outputs = [{"name": "Y", "parameters": {"binary_data_size": 4}}, {"name": "Z", "data": [1]}]
    assert tensors({"outputs": outputs}, b"1234") == "ok"
    assert tensors({"outputs": outputs}, b"123") == "wrong_answer"
    assert tensors({"outputs": []}) == "wrong_answer"
    assert tensors({"outputs": [7]}) == "wrong_answer"
    assert tensors({"outputs": [{"parameters": 7}]}) == "wrong_answer"
    assert tensors({"outputs": outputs}, b"1234", length="x") == "wrong_answer"
    assert judging.tensors(answer(b'{"outputs": [{"name": "Y", "data": [1]}]}')).code == "ok"


def event(document):
    return b"data: " + (document if isinstance(document, bytes) else json.dumps(document).encode()) + b"\n\n"


def words(text):
    return event({"choices": [{"delta": {"content": text}}]})


DONE = event(b"[DONE]")


def test_a_stream_tells_its_first_token_and_the_gaps_after_it():
    usage = event({"choices": [], "usage": {"completion_tokens": 5}})
    role = event({"choices": [{"delta": {"role": "assistant"}}]})
    found = judging.chat(answer(parts=[role, words("a"), words("b") + words("c"), usage, DONE]))
    assert (found.code, found.first_token_at, found.tokens) == ("ok", 2.0, 5)
    assert found.gaps_ms == [1000.0, 0.0]
    assert judging.chat(answer(parts=[words("a") + DONE])).tokens == 1


@pytest.mark.parametrize(
    ("parts", "trouble", "code"),
    [
        ([words("a"), event({"error": {"code": "backend_error", "message": "m"}})], "", "backend_error"),
        ([words("a"), event({"error": "m"}), DONE], "", "wrong_answer"),
        ([words("a")], "", "truncated"),
        ([words("a")], "truncated", "truncated"),
        ([b"data: {"], "not_http", "not_http"),
        ([event(b"{"), DONE], "", "wrong_answer"),
        ([b'{"output": 1}'], "", "wrong_answer"),
        ([], "", "wrong_answer"),
        ([b"data: " + b"x" * 5_000_000], "", "wrong_answer"),
    ],
)
def test_a_stream_that_went_wrong(parts, trouble, code):
    assert judging.chat(answer(parts=parts, trouble=trouble)).code == code


def test_an_answer_that_was_made_before_says_so():
    assert judging.task(answer(b'{"output": 1}', headers={b"age": b"3"})).is_repeated
    assert not judging.task(answer(b'{"output": 1}')).is_repeated


@pytest.mark.parametrize("judge", [judging.task, judging.tensors, judging.chat])
def test_documents_without_end_are_not_read(judge):
    body = b'{"code": "queue_full", "more": "' + b"x" * judging.JSON_BYTES + b'"}'
    assert judge(answer(body, status=503)).code == "http_503"
