import orjson
import pytest

from gateway.backends.llm.openai_codec import MAX_CALLS
from gateway.core.errors import BackendError, FaultKind
from gateway.core.types import Delta, Metered, Usage
from tests.kit.anthropic import (
    ERRORS,
    FINISHES,
    NOW_S,
    block,
    ending,
    error,
    fault_of,
    fed,
    more,
    sse,
    start,
    stop,
    stream_of,
    text,
    use,
)

PING = {"type": "ping"}
END = {"type": "message_stop"}
TALK = (
    start(cache_read_input_tokens=4),
    PING,
    block(0, {"type": "thinking", "thinking": ""}),
    more(0, type="thinking_delta", thinking="hé"),
    more(0, type="signature_delta", signature="s"),
    stop(0),
    block(1, text("")),
    more(1, type="text_delta", text="Let"),
    PING,
    more(1, type="text_delta", text=" me\n\n🙂"),
    stop(1),
    block(2, use({})),
    more(2, type="input_json_delta", partial_json=""),
    more(2, type="input_json_delta", partial_json='{"city":'),
    more(2, type="input_json_delta", partial_json='"Rome"}'),
    stop(2),
    block(3, use({}, "c2")),
    stop(3),
    {"type": "of_tomorrow"},
    ending("tool_use"),
    END,
)


DEEP = b"[" * 400 + b"]" * 400


def chunks(events):
    return [orjson.loads(event.data) for event in events if isinstance(event, Delta)]


def deltas(events):
    return [choice["delta"] for chunk in chunks(events) for choice in chunk["choices"]]


def test_a_stream_in_openais_form():
    events = fed(sse(*TALK))
    (first, *_, last) = chunks(events)
    assert first == {
        "id": "msg_1",
        "object": "chat.completion.chunk",
        "created": NOW_S,
        "model": "claude-x",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
    }
    function = {"name": "weather", "arguments": ""}
    assert deltas(events) == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hé"},
        {"content": "Let"},
        {"content": " me\n\n🙂"},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert not any(b"\n" in event.data for event in events if isinstance(event, Delta))


def test_usage_is_for_our_books_where_the_caller_did_not_ask():
    events = fed(sse(*TALK))
    first, *middle, last = events
    assert first == Metered(usage=Usage(input_tokens=7, cached_tokens=4))  # a stream that breaks has more than told
    assert last == Metered(usage=Usage(input_tokens=7, cached_tokens=4, output_tokens=9))
    assert all(isinstance(event, Delta) and event.usage is None for event in middle)


def test_usage_is_a_chunk_where_the_caller_asked():
    events = fed(sse(*TALK), stream_options={"include_usage": True})
    assert events[-1].usage == Usage(input_tokens=7, cached_tokens=4, output_tokens=9)
    last = chunks(events)[-1]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 9,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert all(chunk["usage"] is None for chunk in chunks(events)[:-1])


def test_the_last_counts_of_a_stream_count():
    told = ending(input_tokens=11, output_tokens=5, cache_read_input_tokens=0)
    events = fed(sse(start(cache_read_input_tokens=4), told, END))
    assert events[-1] == Metered(usage=Usage(input_tokens=11, cached_tokens=0, output_tokens=5))


@pytest.mark.parametrize(("stop_reason", "finish_reason"), FINISHES)
def test_why_a_stream_ended(stop_reason, finish_reason):
    (*_, last) = chunks(fed(sse(start(), ending(stop_reason), END)))
    assert last["choices"][0]["finish_reason"] == finish_reason


def test_nothing_is_said_before_the_model_says_something():
    """Until then another endpoint can be asked."""
    events = fed(sse(start(), PING, block(0, text(""))))
    assert [type(event) for event in events] == [Metered]


def test_a_block_may_begin_with_its_content():
    events = fed(sse(start(), block(0, text("a")), block(1, use({"city": "Rome"})), stop(1)))
    assert deltas(events)[1] == {"content": "a"}
    assert deltas(events)[-1] == {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":"Rome"}'}}]}


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_a_stream_may_be_cut_anywhere(line_end):
    whole = sse(*TALK).replace(b"\n", line_end) + (b"\n" if line_end == b"\r" else b"")
    wanted = fed(whole)
    assert len(wanted) == 12
    assert fed(*(whole[i : i + 1] for i in range(len(whole)))) == wanted
    for cut in range(0, len(whole), 7):
        assert fed(whole[:cut], whole[cut:]) == wanted


def test_the_stream_is_done_at_its_own_end_alone():
    stream = stream_of()
    list(stream.feed(sse(*TALK[:-1])))
    assert not stream.is_done
    assert "message_stop" in fault_of(lambda: list(stream.end())).message
    list(stream.feed(sse(END) + b"data: [DONE]\n\n"))
    assert stream.is_done
    assert list(stream.end()) == []
    assert list(stream.feed(sse(more(0, type="text_delta", text="late")))) == []


def test_a_body_that_ends_early_is_broken_wherever_that_is():
    whole = sse(*TALK)
    for cut in range(0, len(whole) - 2, 11):
        stream = stream_of()
        list(stream.feed(whole[:cut]))
        assert fault_of(lambda stream=stream: list(stream.end())).kind is FaultKind.BROKEN


@pytest.mark.parametrize(("status", "kind", "words", "wanted"), ERRORS)
def test_an_error_in_mid_stream_comes_behind_what_was_said(status, kind, words, wanted):
    stream = stream_of()
    events = stream.feed(sse(*TALK[:8], error(kind, words), *TALK[8:]))
    said = []
    with pytest.raises(BackendError) as caught:
        said += events  # which keeps what came before
    assert caught.value.fault.kind is wanted
    assert deltas(said)[-1] == {"content": "Let"}
    assert not stream.is_done


@pytest.mark.parametrize(
    "payload",
    [
        b"{",
        b"[]",
        b"[DONE]",
        b'{"type":"message_start"}',
        b'{"type":"message_start","message":5}',
        b'{"type":"content_block_start","index":0}',
        b'{"type":"content_block_delta","index":[],"delta":"x"}',
        b'{"type":"message_delta"}',
        b'{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":' + DEEP + b"}}",
        b'{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","input":' + DEEP + b"}}",
    ],
)
def test_an_event_that_is_none_is_broken(payload):
    assert fault_of(fed, sse(start()) + b"data: " + payload + b"\n\n").kind is FaultKind.BROKEN


@pytest.mark.parametrize("payload", [b'{"type":[]}', b"{}", b'{"type":"content_block_stop","index":{}}'])
def test_an_event_without_meaning_is_passed_over(payload):
    assert len(fed(sse(start()) + b"data: " + payload + b"\n\n")) == 1


def test_an_upstream_that_has_run_away_is_bounded():
    calls = sse(*(event for i in range(MAX_CALLS + 1) for event in (block(i, use({})), stop(i))))
    assert "too many tool calls" in fault_of(fed, sse(start()), calls).message
    assert fault_of(fed, b"data: " + b"x" * (5 << 20)).kind is FaultKind.BROKEN


def test_a_stream_of_vllm_and_llama_cpp():
    """As they send it: no usage but at the ends, no cache counts (vLLM), fields in another order."""
    whole = (
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"chatcmpl-8","type":"message","role":'
        b'"assistant","content":[],"model":"m","stop_reason":null,"usage":{"input_tokens":37,"output_tokens":0}}}'
        b'\n\nevent: content_block_start\ndata: {"type":"content_block_start","content_block":{"type":"text","text":""}'
        b',"index":0}\n\nevent: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta",'
        b'"text":" Paris"},"index":0}\n\nevent: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        b'"usage":{"input_tokens":37,"output_tokens":8}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'
    )
    events = fed(whole)
    assert deltas(events) == [{"role": "assistant", "content": ""}, {"content": " Paris"}, {}]
    assert events[-1] == Metered(usage=Usage(input_tokens=37, output_tokens=8))
