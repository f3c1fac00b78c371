import orjson
import pytest

from gateway.backends.llm import openai_codec
from gateway.backends.llm.openai_codec import ChatStream, OpenAICodec, ResponsesStream, message, usage_of
from gateway.core.errors import BackendError, FaultKind
from gateway.core.types import Delta, Message, Metered, OpenAIPayload, Usage

GENERATIVE = ["chat/completions", "completions", "responses"]
APIS = [*GENERATIVE, "embeddings"]


def encoded(body, *, api="chat/completions", stream=False, codec=None):
    return (codec or OpenAICodec()).encode(OpenAIPayload(body=body, api=api, stream=stream), "theirs")


def sent(body, **asked):
    return orjson.loads(encoded(body, **asked).body)


def fault_of(function, *args, **options):
    with pytest.raises(BackendError) as caught:
        function(*args, **options)
    return caught.value.fault


# --- what is sent -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", APIS)
def test_the_body_passes_with_only_the_model_changed(api):
    body = {"model": "ours", "messages": [{"role": "user", "content": "é"}], "x_unknown": {"a": [1]}, "seed": None}
    before = orjson.dumps(body)
    assert sent(body, api=api) == body | {"model": "theirs"}
    assert orjson.dumps(body) == before
    assert encoded(body, api=api).path == f"/{api}"


@pytest.mark.parametrize("api", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("options", "sent_options", "is_ours"),
    [
        (None, {"include_usage": True}, True),
        ({}, {"include_usage": True}, True),
        ({"include_usage": False, "x": 1}, {"include_usage": True, "x": 1}, True),
        ({"include_usage": True}, {"include_usage": True}, False),
        ("nonsense", "nonsense", False),
    ],
)
def test_usage_is_asked_for_in_a_copy(api, options, sent_options, is_ours):
    body = {"messages": [], "stream": True, "stream_options": options}
    before = orjson.dumps(body)
    request = encoded(body, api=api, stream=True)
    assert orjson.loads(request.body)["stream_options"] == sent_options
    assert orjson.dumps(body) == before
    (told,) = request.stream().feed(sse(USAGE))
    assert isinstance(told, Metered) is is_ours


def test_responses_and_embeddings_are_not_asked_for_usage():
    assert sent({"input": "a"}, api="responses", stream=True) == {"model": "theirs", "input": "a", "stream": True}
    assert sent({"input": "a"}, api="embeddings", stream=True) == {"model": "theirs", "input": "a"}
    assert encoded({"input": "a"}, api="embeddings", stream=True).stream is None


@pytest.mark.parametrize("api", GENERATIVE)
def test_stream_follows_the_payload(api):
    assert sent({}, api=api, stream=True)["stream"] is True
    assert sent({"stream": True}, api=api)["stream"] is False
    assert "stream" not in sent({}, api=api)
    assert "stream_options" not in sent({}, api=api)
    assert encoded({}, api=api).stream is None


@pytest.mark.parametrize("api", APIS)
def test_an_api_that_the_endpoint_lacks_is_not_asked(api):
    codec = OpenAICodec([other for other in APIS if other != api])
    assert fault_of(encoded, {}, api=api, codec=codec).kind is FaultKind.UNSUPPORTED


@pytest.mark.parametrize("api", APIS)
def test_text_that_is_not_unicode_is_the_callers_fault(api):
    fault = fault_of(encoded, {"messages": "\ud83d"}, api=api)
    assert (fault.kind, fault.status) == (FaultKind.REFUSED_INPUT, 400)


def test_the_key_is_a_bearer_token():
    assert OpenAICodec().headers("k") == {"authorization": "Bearer k"}
    assert OpenAICodec().headers(None) == {}


# --- whole answers ----------------------------------------------------------------------------------------

WHOLE = {
    "chat/completions": b'{ "choices": [],\n "usage": {"prompt_tokens": 3, "completion_tokens": 2}}',
    "completions": b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}',
    "responses": b'{"object":"response","error":null,"usage":{"input_tokens":3,"output_tokens":2}}',
    "embeddings": b'{"data":[],"usage":{"prompt_tokens":3,"total_tokens":3}}',
}


@pytest.mark.parametrize("api", APIS)
def test_a_whole_answer_passes_as_its_own_bytes(api):
    body = WHOLE[api]
    output = None if api == "embeddings" else 2
    assert encoded({}, api=api).message(body) == Message(body=body, usage=Usage(input_tokens=3, output_tokens=output))
    assert message(body, api=api).body is body


def test_usage_may_be_missing():
    assert message(b'{"choices":[]}').usage == Usage()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"<html>", b'"x"', b'{"choices":[}', b"{}", b"\xff"])
def test_a_200_that_is_no_answer_is_broken(body, api):  # FB-12
    assert fault_of(message, body, api=api).kind is FaultKind.BROKEN


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("chat/completions", b'{"choices":null}'),
        ("chat/completions", WHOLE["responses"]),
        ("responses", WHOLE["completions"]),
        ("embeddings", b'{"data":{}}'),
    ],
)
def test_an_answer_of_another_api_is_broken(api, body):
    assert fault_of(message, body, api=api).kind is FaultKind.BROKEN


@pytest.mark.parametrize("api", APIS)
def test_a_200_with_an_error_inside(api):
    fault = fault_of(message, b'{"object":"response","error":{"message":"slow down","code":429}}', api=api)
    assert fault.kind is FaultKind.OVERLOADED


def test_a_response_that_failed_without_an_error_is_an_answer():
    body = b'{"object":"response","status":"failed","error":null,"output":[]}'
    assert message(body, api="responses").body is body
    broken = b'{"object":"response","status":"failed","error":{"code":"server_error","message":"x"}}'
    assert fault_of(message, broken, api="responses").kind is FaultKind.FAILED


def test_an_answer_of_too_many_parts_is_not_read():
    assert "too many parts" in fault_of(message, b'{"choices":[' + b"{}," * 1_000_000 + b"{}]}").message


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 0}, Usage(input_tokens=3, output_tokens=0)),
        ({"input_tokens": 3, "output_tokens": 2}, Usage(input_tokens=3, output_tokens=2)),
        ({"prompt_tokens": -1, "completion_tokens": "2"}, Usage()),
        ({"prompt_tokens": True}, Usage()),
        ({"prompt_tokens": 2**64 - 1, "completion_tokens": 1e30}, Usage()),
        (
            {"prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens_details": {"reasoning_tokens": 1}},
            Usage(cached_tokens=2, reasoning_tokens=1),
        ),
        (
            {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}},
            Usage(cached_tokens=0, reasoning_tokens=0),
        ),
        ({"prompt_cache_hit_tokens": 5, "prompt_tokens_details": None}, Usage(cached_tokens=5)),
        ({"completion_tokens_details": None, "prompt_tokens_details": []}, Usage()),
        ({}, Usage()),
        (None, None),
        ([], None),
    ],
)
def test_usage(usage, counted):
    assert usage_of({"usage": usage}) == counted


# --- streams of chat and completions -----------------------------------------------------------------------

CHUNK = b'{"choices":[{"delta":{"content":"a"}}],"usage":null}'
PLAIN = b'{"choices":[{"delta":{"content":"b"}}]}'
USAGE = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
BOTH = b'{"choices":[{"delta":{}}],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
COUNTS = Usage(input_tokens=3, output_tokens=2)


def sse(*payloads):
    return b"".join(b"data: " + payload + b"\n\n" for payload in payloads)


def deltas(stream, *, drop_usage=True, step=None):
    return fed(ChatStream(drop_usage=drop_usage), stream, step)


def fed(reader, stream, step=None):
    step = step or max(1, len(stream))
    found = [delta for at in range(0, len(stream), step) for delta in reader.feed(stream[at : at + step])]
    return [*found, *reader.end()]


@pytest.mark.parametrize("step", [1, 5, None])
def test_chunks_pass_untouched(step):
    assert deltas(sse(CHUNK, PLAIN, b"[DONE]"), step=step) == [Delta(data=CHUNK), Delta(data=PLAIN)]


def test_nothing_is_parsed_that_need_not_be(monkeypatch):
    def refuse(_):
        raise AssertionError("parsed")

    monkeypatch.setattr(openai_codec, "read_object", refuse)
    plain = (
        CHUNK,
        PLAIN,
        b'{"choices":[{"delta":{"content":"a","tool_calls":null}}],"usage" : null,"error": null}',
        b'{"choices":[{"delta":{},"finish_reason":"tool_calls"}]}',
        b'{"choices":[{"delta":{"content":"x","tool_calls":[]}}]}',
    )
    assert deltas(sse(*plain, b"[DONE]")) == [Delta(data=data) for data in plain]
    named = b"event: response.output_text.delta\n" + sse(b'{"delta":"a"}')
    assert list(ResponsesStream().feed(named)) == [Delta(data=b'{"delta":"a"}', event=b"response.output_text.delta")]


def test_our_own_usage_chunk_is_not_to_be_sent():
    assert deltas(sse(PLAIN, USAGE, b"[DONE]"))[1:] == [Metered(usage=COUNTS)]


def test_the_callers_usage_chunk_is():
    assert deltas(sse(PLAIN, USAGE, b"[DONE]"), drop_usage=False)[1:] == [Delta(data=USAGE, usage=COUNTS)]


def test_usage_beside_choices_stays_where_it_is():
    assert deltas(sse(BOTH, b"[DONE]")) == [Delta(data=BOTH, usage=COUNTS)]


def test_a_chunk_without_choices_or_usage_passes():
    first = b'{"choices":[],"prompt_filter_results":[]}'
    assert deltas(sse(first, b"[DONE]")) == [Delta(data=first)]


def test_a_chunk_over_two_lines_is_one_line_after():
    stream = b'data: {"choices":\ndata: []}\n\ndata: [DONE]\n\n'
    assert deltas(stream) == [Delta(data=b'{"choices": []}')]


def test_words_like_error_and_usage_in_content_change_nothing():
    text = '"error": "usage": {"tool_calls":[{'
    chunk = orjson.dumps({"choices": [{"delta": {"content": text}}], "error": None})
    assert deltas(sse(chunk, b"[DONE]")) == [Delta(data=chunk)]


def test_nothing_counts_after_done():
    assert deltas(sse(PLAIN, b"[DONE]", PLAIN, b"junk")) == [Delta(data=PLAIN)]
    assert deltas(sse(PLAIN, b" [DONE] ")) == [Delta(data=PLAIN)]


def test_empty_events_are_skipped():
    assert deltas(b"data:\n\n: ping\n\n" + sse(PLAIN, b"[DONE]")) == [Delta(data=PLAIN)]


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (b'{"error":{"message":"boom"}}', FaultKind.FAILED),
        (b'{"error" : {"message":"full","code":503}}', FaultKind.OVERLOADED),
        (b'{"object":"error","message":"boom","code":400}', FaultKind.REFUSED_INPUT),
        (b"junk", FaultKind.BROKEN),
        (b"null", FaultKind.BROKEN),
        (b'{"choices":"a\ndata: b"}', FaultKind.BROKEN),
        (b'["usage"]', FaultKind.BROKEN),
        (b'{"usage":{}', FaultKind.BROKEN),
    ],
)
def test_a_bad_event_ends_the_stream(bad, kind):
    assert fault_of(deltas, sse(bad)).kind is kind


@pytest.mark.parametrize("bad", [sse(b'{"error":"x"}'), b"data: " + b"x" * 5_000_000])
def test_what_came_before_a_bad_event_is_still_given(bad):
    feed = ChatStream(drop_usage=True).feed(sse(PLAIN) + bad)
    assert next(feed) == Delta(data=PLAIN)
    with pytest.raises(BackendError):
        next(feed)


@pytest.mark.parametrize("stream", [b"", sse(PLAIN), sse(PLAIN) + b"data: {", sse(PLAIN) + b": ping\n\n"])
def test_an_end_without_done_is_broken(stream):
    assert fault_of(deltas, stream).kind is FaultKind.BROKEN


def test_an_endless_event_is_broken():
    assert fault_of(deltas, b"data: " + b"x" * 5_000_000).kind is FaultKind.BROKEN


# --- tool calls (ST-12) ------------------------------------------------------------------------------------


def calls(*pieces, choice=0):
    return orjson.dumps({"choices": [{"index": choice, "delta": {"tool_calls": list(pieces)}}]})


def piece(arguments, *, index=None, call_id=None, name=None):
    function = {"arguments": arguments} | ({"name": name} if name else {})
    given = {"index": index, "id": call_id}
    return {key: value for key, value in given.items() if value is not None} | {"function": function}


def joined(chunks):
    """The calls as a client puts them together: by choice and index."""
    found = {}
    for delta in deltas(sse(*chunks, b"[DONE]")):
        for choice in orjson.loads(delta.data)["choices"]:
            for call in choice["delta"]["tool_calls"]:
                at = found.setdefault((choice["index"], call["index"]), {"id": None, "arguments": ""})
                at["id"] = call.get("id") or at["id"]
                at["arguments"] += call["function"]["arguments"]
    return [(at, call["id"], orjson.loads(call["arguments"])) for at, call in found.items()]


TWO_CALLS = [((0, 0), "a", {"x": 1}), ((0, 1), "b", {"y": 2})]
INDEXED = [
    calls(piece('{"x"', index=0, call_id="a", name="f")),
    calls(piece('{"y"', index=1, call_id="b", name="g")),
    calls(piece(":1}", index=0)),
    calls(piece(":2}", index=1)),
]


def test_numbered_calls_pass_untouched():
    assert deltas(sse(*INDEXED, b"[DONE]")) == [Delta(data=chunk) for chunk in INDEXED]
    assert joined(INDEXED) == TWO_CALLS


@pytest.mark.parametrize(
    "chunks",
    [
        [
            calls(piece('{"x"', call_id="a", name="f")),
            calls(piece(":1}")),
            calls(piece('{"y"', call_id="b", name="g")),
            calls(piece(":2}")),
        ],
        [  # every piece has its id, and the pieces are interleaved
            calls(piece('{"x"', call_id="a"), piece('{"y"', call_id="b")),
            calls(piece(":2}", call_id="b")),
            calls(piece(":1}", call_id="a")),
        ],
        [calls(piece('{"x":1}', call_id="a"), piece('{"y":2}', call_id="b"))],
        [calls(piece('{"x":1}', call_id="a", index=0)), calls(piece('{"y":2}', call_id="b"))],
    ],
)
def test_calls_without_numbers_get_them(chunks):
    assert joined(chunks) == TWO_CALLS


def test_a_name_without_an_id_begins_a_call_too():
    chunks = [calls(piece('{"x":1}', name="f")), calls(piece('{"y"', name="f")), calls(piece(":2}"))]
    assert [(at, arguments) for at, _, arguments in joined(chunks)] == [((0, 0), {"x": 1}), ((0, 1), {"y": 2})]


def test_each_choice_counts_for_itself():
    chunks = [calls(piece('{"x":1}', call_id="a")), calls(piece('{"y":2}', call_id="b"), choice=1)]
    assert [at for at, *_ in joined(chunks)] == [(0, 0), (1, 0)]


def test_the_rest_of_a_chunk_is_kept_where_a_number_is_added():
    chunk = (
        b'{"id":"c","choices":[{"index":0,"delta":{"tool_calls":[{"id":"a","x":1}]},"finish_reason":null}],"y":[1.5]}'
    )
    (found,) = deltas(sse(chunk, b"[DONE]"))
    expected = orjson.loads(chunk)
    expected["choices"][0]["delta"]["tool_calls"][0]["index"] = 0
    assert orjson.loads(found.data) == expected


@pytest.mark.parametrize(
    "odd",
    [
        b'{"choices":[{"delta":{"tool_calls":[{"id":[1]}]}}]}',
        b'{"choices":[{"index":{},"delta":{"tool_calls":[{"function":7}]}}]}',
        b'{"choices":[7,{"delta":{"tool_calls":[{},7]}}]}',
        b'{"choices":{"tool_calls":[{}]}}',
    ],
)
def test_odd_shapes_of_calls_pass(odd):
    (found,) = deltas(sse(odd, b"[DONE]"))
    assert isinstance(found, Delta)


@pytest.mark.parametrize(
    "odd",
    [
        b'{"deep":' + b"[" * 400 + b"]" * 400 + b',"choices":[{"delta":{"tool_calls":[{"id":"a"}]}}]}',
        b'{"choices":[{"delta":{"tool_calls":[{"id":"a","index":18446744073709551615},{"id":"b"}]}}]}',
    ],
)
def test_calls_that_cannot_be_written_anew_are_broken(odd):
    assert fault_of(deltas, sse(odd)).kind is FaultKind.BROKEN


def test_calls_without_end_are_broken():
    chunks = (calls(piece("", call_id=str(number))) for number in range(2000))
    assert fault_of(deltas, sse(*chunks)).kind is FaultKind.BROKEN


# --- streams of responses ----------------------------------------------------------------------------------


def named(name, **fields):
    return b"event: %s\n" % name.encode() + sse(orjson.dumps({"type": name} | fields))


CREATED = named("response.created", response={"status": "in_progress", "usage": None})
TEXT = named("response.output_text.delta", delta="a")
END = {"response": {"object": "response", "usage": {"input_tokens": 3, "output_tokens": 2}}}
COMPLETED = named("response.completed", **END)


@pytest.mark.parametrize("end", ["response.completed", "response.incomplete", "response.failed"])
@pytest.mark.parametrize("step", [1, 7, None])
@pytest.mark.parametrize("rest", [b"", sse(b"[DONE]"), TEXT])
def test_a_response_ends_with_its_own_event(end, step, rest):
    found = fed(ResponsesStream(), CREATED + b": ping\n\n" + TEXT + named(end, **END) + rest, step)
    assert [delta.event.decode() for delta in found] == ["response.created", "response.output_text.delta", end]
    assert [delta.usage for delta in found] == [None, None, COUNTS]
    assert orjson.loads(found[1].data) == {"type": "response.output_text.delta", "delta": "a"}


@pytest.mark.parametrize(
    "cut", [b"", CREATED, CREATED + TEXT, CREATED + b"event: response.comp", CREATED + sse(b"[DONE]")]
)
def test_a_response_without_its_end_is_broken(cut):
    assert fault_of(fed, ResponsesStream(), cut).kind is FaultKind.BROKEN


def test_events_without_names_are_told_by_their_types():
    stream = sse(b'{"type":"response.created"}', orjson.dumps({"type": "response.completed", **END}))
    found = fed(ResponsesStream(), stream)
    assert [(delta.event, delta.usage) for delta in found] == [(b"", None), (b"", COUNTS)]


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (named("error", code="server_error", message="boom", param=None), FaultKind.FAILED),
        (named("error", error={"message": "full", "code": 503}), FaultKind.OVERLOADED),
        (sse(b'{"type":"error","code":"rate_limit_exceeded","message":"x"}'), FaultKind.OVERLOADED),
        (named("response.failed", response={"error": {"code": "server_error", "message": "x"}}), FaultKind.FAILED),
        (named("response.failed", response={}), FaultKind.FAILED),
        (named("response.completed"), FaultKind.BROKEN),
        (b"event: x\ndata: junk\n\n", FaultKind.BROKEN),
        (b"event: response.completed\ndata: {\n\n", FaultKind.BROKEN),
        (b"data: " + b"x" * 5_000_000, FaultKind.BROKEN),
    ],
)
def test_a_response_that_goes_wrong(stream, kind):
    assert fault_of(fed, ResponsesStream(), stream).kind is kind


def test_a_type_that_is_no_text_is_no_end():
    data = b'{"type":' + b"[" * 900 + b"]" * 900 + b',"item":{"type":"error"}}'
    assert list(ResponsesStream().feed(sse(data))) == [Delta(data=data)]


def test_an_error_after_the_first_event_ends_a_response():
    feed = ResponsesStream().feed(CREATED + named("error", message="x"))
    assert next(feed).event == b"response.created"
    with pytest.raises(BackendError):
        next(feed)
