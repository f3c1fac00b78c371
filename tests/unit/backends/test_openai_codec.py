import orjson
import pytest

from gateway.backends.llm.openai_codec import ChatStream, encode, message, usage_of
from gateway.core.errors import BackendError, FaultKind
from gateway.core.types import Delta, Metered, OpenAIPayload, Usage


def sent(body, *, stream=False):
    return orjson.loads(encode(OpenAIPayload(body=body, stream=stream), "theirs").body)


def test_the_body_passes_with_only_the_model_changed():
    body = {"model": "ours", "messages": [{"role": "user", "content": "é"}], "x_unknown": {"a": [1]}, "seed": None}
    before = orjson.dumps(body)
    assert sent(body) == body | {"model": "theirs"}
    assert orjson.dumps(body) == before


@pytest.mark.parametrize(
    ("options", "sent_options", "added"),
    [
        (None, {"include_usage": True}, True),
        ({}, {"include_usage": True}, True),
        ({"include_usage": False, "x": 1}, {"include_usage": True, "x": 1}, True),
        ({"include_usage": True}, {"include_usage": True}, False),
        ("nonsense", "nonsense", False),
    ],
)
def test_usage_is_asked_for_in_a_copy(options, sent_options, added):
    body = {"messages": [], "stream": True, "stream_options": options}
    before = orjson.dumps(body)
    request = encode(OpenAIPayload(body=body, stream=True), "m")
    assert orjson.loads(request.body)["stream_options"] == sent_options
    assert request.added_usage is added
    assert orjson.dumps(body) == before


def test_stream_follows_the_payload():
    assert sent({}, stream=True)["stream"] is True
    assert sent({"stream": True})["stream"] is False
    assert "stream" not in sent({})
    assert "stream_options" not in sent({})


def test_text_that_is_not_unicode_is_the_callers_fault():
    with pytest.raises(BackendError) as caught:
        encode(OpenAIPayload(body={"messages": "\ud83d"}), "m")
    assert caught.value.fault.kind is FaultKind.REFUSED_INPUT


def test_a_whole_answer_passes_as_its_own_bytes():
    body = b'{ "choices": [],\n "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'
    assert message(body).body is body
    assert message(body).usage == Usage(input_tokens=3, output_tokens=2)
    assert message(b'{"choices":[]}').usage == Usage()


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"<html>", b'"x"', b'{"choices":[}', b"{}", b'{"choices":null}', b"\xff"]
)
def test_a_200_that_is_no_answer_is_broken(body):
    with pytest.raises(BackendError) as caught:
        message(body)
    assert caught.value.fault.kind is FaultKind.BROKEN


def test_a_200_with_an_error_inside():
    with pytest.raises(BackendError) as caught:
        message(b'{"error":{"message":"slow down","code":429}}')
    assert caught.value.fault.kind is FaultKind.OVERLOADED


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 0}, Usage(input_tokens=3, output_tokens=0)),
        ({"prompt_tokens": -1, "completion_tokens": "2"}, Usage()),
        ({"prompt_tokens": True}, Usage()),
        ({}, Usage()),
        (None, None),
        ([], None),
    ],
)
def test_usage(usage, counted):
    assert usage_of({"usage": usage}) == counted


CHUNK = b'{"choices":[{"delta":{"content":"a"}}],"usage":null}'
PLAIN = b'{"choices":[{"delta":{"content":"b"}}]}'
USAGE = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
BOTH = b'{"choices":[{"delta":{}}],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
COUNTS = Usage(input_tokens=3, output_tokens=2)


def sse(*payloads):
    return b"".join(b"data: " + payload + b"\n\n" for payload in payloads)


def deltas(stream, *, drop_usage=True, step=None):
    chat = ChatStream(drop_usage=drop_usage)
    step = step or max(1, len(stream))
    found = [delta for at in range(0, len(stream), step) for delta in chat.feed(stream[at : at + step])]
    chat.end()
    return found


@pytest.mark.parametrize("step", [1, 5, None])
def test_chunks_pass_untouched(step):
    assert deltas(sse(CHUNK, PLAIN, b"[DONE]"), step=step) == [Delta(data=CHUNK), Delta(data=PLAIN)]


def test_our_own_usage_chunk_is_not_to_be_sent():
    assert deltas(sse(PLAIN, USAGE, b"[DONE]"))[1:] == [Metered(usage=COUNTS)]


def test_the_callers_usage_chunk_is():
    assert deltas(sse(PLAIN, USAGE, b"[DONE]"), drop_usage=False)[1:] == [Delta(data=USAGE), Metered(usage=COUNTS)]


def test_usage_beside_choices_stays_where_it_is():
    assert deltas(sse(BOTH, b"[DONE]")) == [Delta(data=BOTH), Metered(usage=COUNTS)]


def test_a_chunk_without_choices_or_usage_passes():
    first = b'{"choices":[],"prompt_filter_results":[]}'
    assert deltas(sse(first, b"[DONE]")) == [Delta(data=first)]


def test_a_chunk_over_two_lines_is_one_line_after():
    stream = b'data: {"choices":\ndata: []}\n\ndata: [DONE]\n\n'
    assert deltas(stream) == [Delta(data=b'{"choices": []}')]


def test_words_like_error_and_usage_in_content_change_nothing():
    chunk = orjson.dumps({"choices": [{"delta": {"content": '"error": "usage"'}}], "error": None})
    assert deltas(sse(chunk, b"[DONE]")) == [Delta(data=chunk)]


def test_nothing_counts_after_done():
    assert deltas(sse(PLAIN, b"[DONE]", PLAIN, b"junk")) == [Delta(data=PLAIN)]
    assert deltas(sse(PLAIN, b" [DONE] ")) == [Delta(data=PLAIN)]


def test_empty_events_are_skipped():
    assert deltas(b"data:\n\n: ping\n\n" + sse(PLAIN, b"[DONE]")) == [Delta(data=PLAIN)]


def fault_of(stream):
    with pytest.raises(BackendError) as caught:
        deltas(stream)
    return caught.value.fault


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (b'{"error":{"message":"boom"}}', FaultKind.FAILED),
        (b'{"error":{"message":"full","code":503}}', FaultKind.OVERLOADED),
        (b'{"object":"error","message":"boom","code":400}', FaultKind.REFUSED_INPUT),
        (b"junk", FaultKind.BROKEN),
        (b"null", FaultKind.BROKEN),
        (b'{"choices":"a\ndata: b"}', FaultKind.BROKEN),
        (b'["usage"]', FaultKind.BROKEN),
    ],
)
def test_a_bad_event_ends_the_stream(bad, kind):
    assert fault_of(sse(bad)).kind is kind


def test_what_came_before_a_bad_event_is_still_given():
    chat = ChatStream(drop_usage=True)
    feed = chat.feed(sse(PLAIN, b'{"error":"x"}'))
    assert next(feed) == Delta(data=PLAIN)
    with pytest.raises(BackendError):
        next(feed)


@pytest.mark.parametrize("stream", [b"", sse(PLAIN), sse(PLAIN) + b"data: {", sse(PLAIN) + b": ping\n\n"])
def test_an_end_without_done_is_broken(stream):
    assert fault_of(stream).kind is FaultKind.BROKEN


def test_an_endless_event_is_broken():
    assert fault_of(b"data: " + b"x" * 5_000_000).kind is FaultKind.BROKEN
