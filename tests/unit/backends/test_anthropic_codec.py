import orjson
import pytest

from gateway.backends.llm.openai_faults import Waiting
from gateway.core.errors import FaultKind
from gateway.core.types import Usage
from tests.kit.anthropic import CODEC, ERRORS, FINISHES, NOW_S, call, encoded, error, fault_of, fed, sse, text, use

# --- whole answers ----------------------------------------------------------------------------------------


def answered(**fields):
    answer = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": [text("hi")],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 3, "output_tokens": 2},
        **fields,
    }
    return encoded({}).message(orjson.dumps(answer))


def test_a_whole_answer_in_openais_form():
    message = answered()
    assert message.usage == Usage(input_tokens=3, output_tokens=2)
    assert orjson.loads(message.body) == {
        "id": "msg_1",
        "object": "chat.completion",
        "created": NOW_S,
        "model": "claude-x",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ([], {"content": ""}),
        ([text("a"), text("b")], {"content": "ab"}),
        (
            [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("a")],
            {"content": "a", "reasoning_content": "hm"},
        ),
        ([{"type": "redacted_thinking", "data": "x"}, text("a")], {"content": "a"}),
        ([use({"city": "Rome"})], {"content": None, "tool_calls": [call('{"city":"Rome"}')]}),
        ([text("a"), use({}), use({}, "c2")], {"content": "a", "tool_calls": [call("{}"), call("{}", "c2")]}),
        ([{"type": "of_tomorrow"}], {"content": ""}),
    ],
)
def test_blocks(content, wanted):
    (choice,) = orjson.loads(answered(content=content).body)["choices"]
    assert choice["message"] == {"role": "assistant", "refusal": None} | wanted


@pytest.mark.parametrize(("stop_reason", "finish_reason"), FINISHES)
def test_why_it_ended(stop_reason, finish_reason):
    (choice,) = orjson.loads(answered(stop_reason=stop_reason).body)["choices"]
    assert choice["finish_reason"] == finish_reason


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        (
            {"cache_read_input_tokens": 5, "cache_creation_input_tokens": 7, "input_tokens": 3, "output_tokens": 2},
            Usage(input_tokens=15, output_tokens=2, cached_tokens=5),
        ),
        (
            {"input_tokens": 3, "output_tokens": 9, "output_tokens_details": {"thinking_tokens": 4}},
            Usage(input_tokens=3, output_tokens=9, reasoning_tokens=4),
        ),
        ({"input_tokens": 3, "output_tokens": None}, Usage(input_tokens=3)),
        ({"input_tokens": 2**64 - 1, "cache_read_input_tokens": 2**64 - 1, "output_tokens": 2**63}, Usage()),
        ({"input_tokens": -1, "output_tokens": True, "cache_read_input_tokens": "x"}, Usage()),
        (None, Usage()),
    ],
)
def test_usage(told, usage):
    message = answered(usage=told)
    assert message.usage == usage
    shown = orjson.loads(message.body).get("usage")
    assert (shown is None) == (usage.input_tokens is None or usage.output_tokens is None)
    if shown is not None and usage.cached_tokens is not None:
        assert shown["prompt_tokens_details"] == {"cached_tokens": usage.cached_tokens}


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"<html>", b"{}", b'{"content":"x"}', b'{"content":["x"]}', b"\xff"]
)
def test_a_200_that_is_no_answer_is_broken(body):
    assert fault_of(encoded({}).message, body).kind is FaultKind.BROKEN


@pytest.mark.parametrize("field", ["id", "name", "input"])
def test_an_answer_that_cannot_be_written_anew_is_broken(field):
    deep = b"[" * 400 + b"]" * 400
    body = b'{"type":"message","content":[{"type":"tool_use","' + field.encode() + b'":' + deep + b"}]}"
    assert fault_of(encoded({}).message, body).kind is FaultKind.BROKEN


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "kind", "words", "wanted"), ERRORS)
def test_an_error_means_the_same_by_its_status_and_without(status, kind, words, wanted):
    body = orjson.dumps(error(kind, words))
    by_status = CODEC.fault(status, body, Waiting(retry_after="3"))
    in_answer = fault_of(encoded({}).message, body)
    in_stream = fault_of(fed, sse(error(kind, words)))
    assert [fault.kind for fault in (by_status, in_answer, in_stream)] == [wanted] * 3
    if wanted is FaultKind.OVERLOADED:
        assert by_status.retry_after_us == 3_000_000
    if wanted in (FaultKind.REFUSED_INPUT, FaultKind.CONTEXT_TOO_LONG):
        assert by_status.status == in_stream.status == (413 if status == 413 else 400)
        assert by_status.message == words
    is_long = wanted is FaultKind.CONTEXT_TOO_LONG
    assert (by_status.code == in_stream.code == "context_length_exceeded") is is_long


@pytest.mark.parametrize(
    ("status", "body", "wanted"),
    [
        # llama.cpp and vLLM answer here as everywhere
        (400, {"error": {"code": 400, "message": "bad", "type": "invalid_request_error"}}, FaultKind.REFUSED_INPUT),
        (
            400,
            {"error": {"code": 400, "message": "request too big", "type": "exceed_context_size_error"}},
            FaultKind.CONTEXT_TOO_LONG,
        ),
        (500, {"error": {"code": 500, "message": "image input is not supported"}}, FaultKind.UNSUPPORTED),
        (404, {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}, FaultKind.UNSUPPORTED),
        (404, {"detail": "Not Found"}, FaultKind.UNSUPPORTED),
        (500, "<html>", FaultKind.BROKEN),
        (502, "", FaultKind.BROKEN),
    ],
)
def test_errors_of_other_servers(status, body, wanted):
    sent_body = body.encode() if isinstance(body, str) else orjson.dumps(body)
    assert CODEC.fault(status, sent_body, Waiting()).kind is wanted
