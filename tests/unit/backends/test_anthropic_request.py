import orjson
import pytest

from gateway.core.errors import FaultKind
from tests.kit.anthropic import CODEC, call, encoded, fault_of, text, use, user

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}}
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def sent(stream=False, **body):
    return orjson.loads(encoded(body, stream=stream).body)


# --- what is sent -----------------------------------------------------------------------------------------


def test_a_plain_request_has_what_the_api_wants():
    body = {"model": "ours", "messages": [user()], "x_unknown": 1}
    before = orjson.dumps(body)
    request = encoded(body)
    assert request.path == "/messages"
    assert request.stream is None
    assert orjson.loads(request.body) == {
        "model": "claude",
        "max_tokens": 4096,
        "messages": [user([text("hi")])],
        "stream": False,
    }
    assert orjson.dumps(body) == before


def test_the_key_and_the_version_are_headers():
    assert CODEC.headers("k") == {"anthropic-version": "2023-06-01", "x-api-key": "k"}
    assert CODEC.headers(None) == {"anthropic-version": "2023-06-01"}
    assert CODEC.probe_path == "/models"


@pytest.mark.parametrize("api", ["completions", "responses", "embeddings"])
def test_other_apis_have_no_counterpart(api):
    assert fault_of(encoded, {}, api=api).kind is FaultKind.UNSUPPORTED


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 8}, {"max_tokens": 8}),
        ({"max_tokens": 7, "max_completion_tokens": 8}, {"max_tokens": 8}),
        ({"max_tokens": None}, {"max_tokens": 4096}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 1.0, "top_p": 0.5, "top_k": 3}, {"temperature": 1.0, "top_p": 0.5, "top_k": 3}),
        ({"stop": "END"}, {"stop_sequences": ["END"]}),
        ({"stop": ["a", "b"]}, {"stop_sequences": ["a", "b"]}),
        ({"user": "u1"}, {"metadata": {"user_id": "u1"}}),
        ({"reasoning_effort": "minimal"}, {"output_config": {"effort": "low"}}),
        ({"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": WEATHER},
                }
            },
            {"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}},
        ),
        ({"n": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "modalities": ["text"]}, {}),
        ({"presence_penalty": 0, "frequency_penalty": 0.0, "audio": None}, {}),
        ({"seed": 1, "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "stream_options": None}, {}),
    ],
)
def test_each_field_has_its_counterpart(body, wanted):
    assert sent(**body) == sent() | wanted


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("functions", [{"name": "f"}]),
        ("web_search_options", {}),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_what_would_change_the_answer_is_not_dropped(field, value):
    fault = fault_of(encoded, {field: value})
    assert (fault.kind, fault.field) == (FaultKind.UNSUPPORTED, field)
    assert field in fault.message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"temperature": 1.5}, "temperature"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [user(5)]}, "messages[0].content"),
        ({"messages": [user("\ud83d")]}, None),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
        ({"tools": "x"}, "tools"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(body, field):
    fault = fault_of(encoded, body)
    assert (fault.kind, fault.field, fault.status) == (FaultKind.REFUSED_INPUT, field, 400)


# --- messages and tools -----------------------------------------------------------------------------------


def test_system_prompts_come_together_and_neighbours_of_one_role_too():
    request = sent(
        messages=[
            {"role": "system", "content": "A"},
            user("b"),
            {"role": "developer", "content": [text("C")]},
            user([text("d")]),
            {"role": "assistant", "content": "e", "reasoning_content": "hm"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "f"}]},
        ]
    )
    assert request["system"] == [text("A"), text("C")]
    assert request["messages"] == [
        user([text("b"), text("d")]),
        {"role": "assistant", "content": [text("e"), text("f")]},
    ]


def test_a_round_of_tool_calls_becomes_two_turns():
    request = sent(
        messages=[
            user("?"),
            {"role": "assistant", "content": "", "tool_calls": [call('{"city":"Rome"}'), call("", "c2")]},
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
            {"role": "tool", "tool_call_id": "c2", "content": [text("rain")]},
            user("so?"),
        ]
    )
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "sun"}
    assert request["messages"] == [
        user([text("?")]),
        {"role": "assistant", "content": [use({"city": "Rome"}), use({}, "c2")]},
        user([result, result | {"tool_use_id": "c2", "content": [text("rain")]}, text("so?")]),
    ]


@pytest.mark.parametrize(
    ("url", "source"),
    [
        (PIXEL, {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}),
        ("data:image/jpeg;x=1;base64,AA==", {"type": "base64", "media_type": "image/jpeg", "data": "AA=="}),
        ("https://a.example/b.png", {"type": "url", "url": "https://a.example/b.png"}),
        ("http://a.example/b.png", {"type": "url", "url": "http://a.example/b.png"}),
    ],
)
def test_images(url, source):
    image = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    assert sent(messages=[user([text("what?"), image])])["messages"] == [
        user([text("what?"), {"type": "image", "source": source}])
    ]


@pytest.mark.parametrize("url", ["data:image/png,abc", "data:image/png;base64", "file:///etc/passwd", "", None, 5])
def test_an_image_that_is_none_is_refused(url):
    fault = fault_of(encoded, {"messages": [user([{"type": "image_url", "image_url": {"url": url}}])]})
    assert (fault.kind, fault.field) == (FaultKind.REFUSED_INPUT, "messages[0].content[0].image_url.url")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (user([{"type": "input_audio", "input_audio": {}}]), "messages[0].content[0].type"),
        (user(["words"]), "messages[0].content[0].type"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ("hi", "messages[0].role"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}, "messages[0].tool_calls[0]"),
        ({"role": "system", "content": [{"type": "image_url", "image_url": PIXEL}]}, "messages[0].content"),
    ],
)
def test_parts_without_a_counterpart(message, field):
    fault = fault_of(encoded, {"messages": [message]})
    assert (fault.kind, fault.field) == (FaultKind.UNSUPPORTED, field)


@pytest.mark.parametrize(
    "arguments", ["{", "[]", "5", '"x"', {"city": "Rome"}, "\ud83d", '{"x":[' + "{}," * 100_000 + "{}]}"]
)
def test_arguments_that_are_no_object_are_refused(arguments):
    fault = fault_of(encoded, {"messages": [user(), {"role": "assistant", "tool_calls": [call(arguments)]}]})
    assert (fault.kind, fault.field) == (FaultKind.REFUSED_INPUT, "messages[1].tool_calls[0].function.arguments")


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        ({}, None),
        ({"tool_choice": "auto"}, {"type": "auto"}),
        ({"tool_choice": "none"}, {"type": "none"}),
        ({"tool_choice": "required"}, {"type": "any"}),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, {"type": "tool", "name": "weather"}),
        ({"parallel_tool_calls": True}, None),
        ({"parallel_tool_calls": False}, {"type": "auto", "disable_parallel_tool_use": True}),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"type": "any", "disable_parallel_tool_use": True},
        ),
        ({"tool_choice": "none", "parallel_tool_calls": False}, {"type": "none"}),
    ],
)
def test_tools_and_their_choice(asked, choice):
    request = sent(tools=[TOOL], **asked)
    assert request["tools"] == [{"name": "weather", "description": "of a city", "input_schema": WEATHER}]
    assert request.get("tool_choice") == choice


def test_a_tool_may_have_no_parameters_and_may_be_strict():
    (tool,) = sent(tools=[{"type": "function", "function": {"name": "now", "strict": True}}])["tools"]
    assert tool == {"name": "now", "input_schema": {"type": "object", "properties": {}}, "strict": True}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ],
)
def test_tools_without_a_counterpart(body, field):
    fault = fault_of(encoded, body)
    assert (fault.kind, fault.field) == (FaultKind.UNSUPPORTED, field)
