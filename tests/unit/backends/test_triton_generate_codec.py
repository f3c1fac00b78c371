import orjson
import pytest

from gateway.backends.llm.chat_templates import ChatTemplate, load
from gateway.backends.llm.openai_faults import Waiting
from gateway.backends.llm.triton_generate_codec import TritonGenerateCodec
from gateway.core.errors import BackendError, FaultKind
from gateway.core.types import Delta, Metered, OpenAIPayload, Usage

NOW_US = 1_700_000_000_000_001
HI = {"messages": [{"role": "user", "content": "Hi"}]}
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def codec(engine="vllm", template="chatml", now_us=NOW_US):
    return TritonGenerateCodec(engine=engine, template=load(template), now_us=lambda: now_us)


def encoded(body, *, engine="vllm", api="chat/completions", stream=False, model="llama"):
    return codec(engine).encode(OpenAIPayload(body=body, api=api, stream=stream), model)


def sent(engine="vllm", **fields):
    return orjson.loads(encoded(HI | fields, engine=engine).body)


def sampling(**fields):
    return orjson.loads(sent(**fields)["sampling_parameters"])


def refusal(body, **options):
    with pytest.raises(BackendError) as caught:
        encoded(body, **options)
    return caught.value.fault


def test_what_vllms_backend_is_sent():
    assert sent() == {
        "text_input": PROMPT,
        "stream": False,
        "exclude_input_in_output": True,
        "sampling_parameters": '{"max_tokens":1024}',
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    assert encoded(HI).path == "/v2/models/llama/generate"
    assert encoded(HI, stream=True).path == "/v2/models/llama/generate_stream"
    assert orjson.loads(encoded(HI, stream=True).body)["stream"] is True
    assert encoded(HI, model="a/b ?").path == "/v2/models/a%2Fb%20%3F/generate"


def test_what_tensorrt_llm_is_sent():
    assert sent("tensorrt_llm") == {
        "text_input": PROMPT,
        "stream": False,
        "exclude_input_in_output": True,
        "max_tokens": 1024,
    }


GIVEN = {
    "max_completion_tokens": 9,
    "top_p": 1,
    "top_k": 5,
    "seed": 7,
    "stop": ["a", "b"],
    "presence_penalty": 0.5,
    "min_tokens": 2,
    "user": "dropped",
    "x_unknown": {"a": 1},
}


def test_sampling_of_vllm():
    assert sampling(**GIVEN, temperature=0) == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 5,
        "presence_penalty": 0.5,
        "min_tokens": 2,
        "seed": 7,
        "stop": ["a", "b"],
        "max_tokens": 9,
    }


def test_sampling_of_tensorrt_llm():
    found = sent("tensorrt_llm", **GIVEN, temperature=0.5)
    assert (
        found.items()
        >= {
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": 5,
            "seed": 7,
            "random_seed": 7,
            "max_tokens": 9,
            "stop_words": ["a", "b"],
        }.items()
    )
    assert not found.keys() & {"stop", "user", "x_unknown"}


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(0, {"top_k": 1}), (0.7, {"temperature": 0.7, "top_p": 1.0}), (None, {})],
)
def test_tensorrt_llm_is_greedy_unless_told_otherwise_and_knows_no_temperature_of_0(temperature, expected):
    assert sent("tensorrt_llm", temperature=temperature) == sent("tensorrt_llm") | expected


def test_a_completions_prompt_is_taken_as_it_is():
    for prompt in ("Once", ["Once"]):
        request = encoded({"prompt": prompt}, api="completions")
        body = orjson.loads(request.body)
        assert (body["text_input"], body["sampling_parameters"]) == ("Once", '{"max_tokens":16}')


def test_messages_become_what_the_template_makes_of_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "S"}, {"role": "user", "content": parts}, {"role": "assistant"}]
    text = orjson.loads(encoded({"messages": messages}).body)["text_input"]
    assert text.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n<")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"tools": [{}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ],
)
def test_what_has_no_counterpart_is_left_to_another_endpoint(fields, field):
    fault = refusal(HI | fields)
    assert (fault.kind, fault.field) == (FaultKind.UNSUPPORTED, field)


@pytest.mark.parametrize(
    ("asked", "kind"), [(0, FaultKind.UNSUPPORTED), *((x, FaultKind.REFUSED_INPUT) for x in (-1, "9", 2.0, True, [1]))]
)
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_bounds_that_are_none(field, asked, kind):
    fault = refusal({"prompt": "x", field: asked}, api="completions", stream=True)
    assert (fault.kind, fault.field) == (kind, field)


@pytest.mark.parametrize("prompt", [["a", "b"], [1, 2], [[1]], None])
def test_prompts_that_are_not_one_text(prompt):
    fault = refusal({"prompt": prompt}, api="completions")
    assert (fault.kind, fault.field) == (FaultKind.UNSUPPORTED, "prompt")


@pytest.mark.parametrize("api", ["responses", "embeddings"])
def test_other_apis(api):
    assert refusal({}, api=api).kind is FaultKind.UNSUPPORTED


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}, "tool_choice": "auto"},
        {"store": True, "metadata": {}, "reasoning_effort": "low", "stream_options": {"include_usage": True}},
    ],
)
def test_fields_that_ask_for_nothing_are_dropped(fields):
    assert sent(**fields) == sent()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}{{ 1 // 0 }}", "the model's chat template does not take these messages"),
    ],
)
def test_messages_that_the_template_does_not_take(source, told):
    made = TritonGenerateCodec(engine="vllm", template=ChatTemplate(source), now_us=lambda: 0)
    with pytest.raises(BackendError) as caught:
        made.encode(OpenAIPayload(body=HI), "m")
    fault = caught.value.fault
    assert (fault.kind, fault.field, fault.message, fault.status) == (FaultKind.REFUSED_INPUT, "messages", told, 400)


# --- answers --------------------------------------------------------------------------------------


def test_a_whole_answer():
    answer = {"model_name": "m", "text_output": "Hello", "finish_reason": "length"}
    found = encoded(HI).message(orjson.dumps(answer | {"num_input_tokens": 4, "num_output_tokens": 2}))
    body = orjson.loads(found.body)
    assert body.pop("id").startswith("chatcmpl-")
    assert body == {
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "llama",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6},
    }
    assert found.usage == Usage(input_tokens=4, output_tokens=2)


def test_a_whole_answer_of_an_engine_that_tells_its_text_alone():
    found = encoded({"prompt": "x"}, api="completions").message(b'{"text_output":["Hello"]}')
    body = orjson.loads(found.body)
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert (body["object"], body["id"][:5], found.usage) == ("text_completion", "cmpl-", Usage())
    assert "usage" not in body


def test_no_two_answers_have_one_id():
    requests = [codec(now_us=now).encode(OpenAIPayload(body=HI), "m") for now in (1, 2)]
    ids = {orjson.loads(request.message(b'{"text_output":""}').body)["id"] for request in requests}
    assert len(ids) == 2


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"text_output":1}', b'{"text_output":["a","b"]}'])
def test_a_200_that_is_no_answer_is_broken(body):
    with pytest.raises(BackendError) as caught:
        encoded(HI).message(body)
    assert caught.value.fault.kind is FaultKind.BROKEN


def sse(*answers):
    return b"".join(b"data: " + orjson.dumps(answer) + b"\n\n" for answer in answers)


def pieces(*texts, **last):
    answers = [
        {"text_output": text, **({"finish_reason": "None"} if "finish_reason" in last else {})} for text in texts
    ]
    answers[-1] |= last
    return sse(*answers)


def streamed(stream, *, step=None, **fields):
    reader = encoded(HI | fields, stream=True).stream()
    step = step or max(1, len(stream))
    found = [event for at in range(0, len(stream), step) for event in reader.feed(stream[at : at + step])]
    assert not reader.is_done
    found += reader.end()
    assert reader.is_done
    return found


def said(found):
    chunks = [orjson.loads(event.data) for event in found if isinstance(event, Delta)]
    return [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks if c["choices"]]


ROLE = ({"role": "assistant", "content": ""}, None)


@pytest.mark.parametrize("step", [1, 9, None])
def test_a_stream(step):
    found = streamed(pieces("Hel", "", "lo"), step=step)
    assert said(found) == [ROLE, ({"content": "Hel"}, None), ({"content": "lo"}, None), ({}, "stop")]
    assert len(found) == 4  # nothing was told of usage


def test_an_empty_answer_is_an_answer():
    assert said(streamed(pieces(""))) == [ROLE, ({}, "stop")]


def test_nothing_is_said_before_there_is_something_to_say():
    assert list(encoded(HI, stream=True).stream().feed(pieces("", ""))) == []


@pytest.mark.parametrize(
    ("texts", "last", "finish"),
    [
        (["a", "b"], {}, "length"),
        (["a", ""], {}, "stop"),
        (["a", "b"], {"finish_reason": "stop"}, "stop"),
        (["a"], {"finish_reason": "length"}, "length"),
        (["a"], {"finish_reason": ["length"]}, "length"),
        (["a"], {"finish_reason": "something_new"}, "stop"),
    ],
)
def test_finish_reasons(texts, last, finish):
    assert said(streamed(pieces(*texts, **last), max_tokens=2))[-1] == ({}, finish)


@pytest.mark.parametrize("finish", ["None", "", "abort"])
def test_a_stream_that_ends_before_its_engine_has_finished_is_broken(finish):
    with pytest.raises(BackendError) as caught:
        streamed(pieces("a", "b", finish_reason=finish))
    assert caught.value.fault.kind is FaultKind.BROKEN


def test_usage_is_added_up():
    stream = sse(
        {"text_output": "a", "num_input_tokens": 5, "num_output_tokens": 1},
        {"text_output": "b", "num_input_tokens": 5, "num_output_tokens": 3},
    )
    usage = Usage(input_tokens=5, output_tokens=4)
    assert streamed(stream)[-1] == Metered(usage=usage)
    asked = streamed(stream, stream_options={"include_usage": True})
    assert asked[-1].usage == usage
    assert orjson.loads(asked[-1].data)["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert isinstance(streamed(pieces("a"), stream_options={"include_usage": True})[-1], Delta)


def test_a_stream_of_a_completion():
    reader = encoded({"prompt": "x"}, api="completions", stream=True).stream()
    found = [*reader.feed(pieces("a")), *reader.end()]
    assert [orjson.loads(event.data)["choices"][0] for event in found] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"},
    ]


@pytest.mark.parametrize("stream", [b"", b": ping\n\n", pieces("a", "b")[:-1], b"data: {}\n\n", b"data: junk\n\n"])
def test_streams_that_are_none(stream):
    with pytest.raises(BackendError) as caught:
        streamed(stream)
    assert caught.value.fault.kind is FaultKind.BROKEN


# --- errors ---------------------------------------------------------------------------------------

CONTEXT = "The prompt is longer than the maximum model length. Make sure that `max_model_len` is no smaller"
WORDS = [
    ("engine died", FaultKind.FAILED),
    (CONTEXT, FaultKind.CONTEXT_TOO_LONG),
    ("Request for unknown model: 'm' is not found", FaultKind.UNKNOWN_MODEL),
    ("Exceeds maximum queue size", FaultKind.OVERLOADED),
    ("Stub process 'm_0_0' is not healthy.", FaultKind.BROKEN),
    ("[request id: x] missing required input(s) ['x'] for model 'm'", FaultKind.MISFIT),
]


@pytest.mark.parametrize(("text", "kind"), WORDS)
def test_an_error_means_the_same_wherever_it_stands(text, kind):
    body = orjson.dumps({"error": text})
    faults = [codec().fault(400, body, Waiting()), codec().fault(400, b"data: " + body + b"\n\n", Waiting())]
    with pytest.raises(BackendError) as caught:
        encoded(HI).message(body)
    faults.append(caught.value.fault)
    with pytest.raises(BackendError) as caught:
        streamed(pieces("a") + b"data: " + body + b"\n\n")
    faults.append(caught.value.fault)
    assert {fault.kind for fault in faults} == {kind}
    assert all(fault.reply is None and not fault.dead_model for fault in faults)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, b'{"error":"Request for unknown model: \'m\' is not found"}', FaultKind.UNKNOWN_MODEL),
        (503, b'{"error":"Server is not ready"}', FaultKind.UNAVAILABLE),
        (501, b'{"error":"no"}', FaultKind.UNSUPPORTED),
        (500, b'{"error":"oops"}', FaultKind.FAILED),
        (500, b"oops", FaultKind.BROKEN),
        (404, b"", FaultKind.BROKEN),
        (429, b'{"error":"slow down"}', FaultKind.OVERLOADED),
        (400, b"data: junk", FaultKind.REFUSED_INPUT),
    ],
)
def test_statuses(status, body, kind):
    assert codec().fault(status, body, Waiting()).kind is kind


def test_headers():
    assert codec().headers("k") == {"authorization": "Bearer k"}
    assert codec().headers(None) == {}
