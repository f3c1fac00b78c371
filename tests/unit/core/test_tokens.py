import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.tokens import (
    GUESSED_OUTPUT,
    MEDIA_TOKENS,
    MESSAGE_TOKENS,
    MOST_CHOICES,
    MOST_TOKENS,
    StreamCount,
    estimate,
    of_answer,
    prefix_of,
    work_of,
)
from gateway.core.types import OpenAIApi, OpenAIPayload, Work

APIS = get_args(OpenAIApi)
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5_000_000}}


def work(api: OpenAIApi = "chat/completions", **body: Any) -> Work:
    return work_of(OpenAIPayload(body=body, api=api))


def prefix(api: OpenAIApi = "chat/completions", **body: Any) -> bytes:
    return prefix_of(OpenAIPayload(body=body, api=api))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


# --- estimates: what SmolLM2's tokenizer and Mistral's Tekken count ----------------------------------

ENGLISH = (
    "The gateway stands between the callers and the servers. It reads each request, looks at the rules, and sends it "
    "to the first place that can answer. When a server does not answer in time, the next one is asked."
)
CODE = """def total(prices: list[int]) -> int:
    result = 0
    for price in prices:
        result += price
    return result
"""
JSON_TEXT = '{"id":12,"name":"Anna","email":"anna@example.com","tags":["red","admin"],"active":true}'
GERMAN = "Die Bibliothek öffnet um neun Uhr, und am Wochenende bleibt sie geschlossen, weil das Gebäude renoviert wird."
CHINESE = "今天的天气很好，我们去公园散步，然后在河边的餐馆吃午饭。"  # noqa: RUF001 - as Chinese is written
JAPANESE = "今日は天気が良いので、公園を散歩してから川沿いのレストランで昼食を食べます。"


@pytest.mark.parametrize(
    ("text", "tekken"),
    [
        pytest.param(ENGLISH, 47, id="English"),
        pytest.param(CODE, 33, id="Python"),
        pytest.param(JSON_TEXT, 28, id="JSON"),
        pytest.param(GERMAN, 23, id="German"),
        pytest.param(CHINESE, 26, id="Chinese"),
        pytest.param(JAPANESE, 32, id="Japanese"),
        pytest.param("great 😀 thanks 🎉🎉 ok 🚀", 16, id="emoji"),
        pytest.param("3.14159 2.71828 1.41421", 23, id="numbers"),
    ],
)
def test_an_estimate_is_near_what_a_tokenizer_counts(text: str, tekken: int):
    assert 0.7 * tekken <= estimate(text) <= 1.35 * tekken


@pytest.mark.parametrize(("text", "expected"), [("", 0), (" ", 1), ("a", 1), ("\n", 2), ("\ud83d", 1), ("\x00", 1)])
def test_the_shortest_texts(text: str, expected: int):
    assert estimate(text) == expected


@given(st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=())))
def test_any_text_is_taken_and_more_text_is_never_less(one: str, other: str):
    assert max(estimate(one), estimate(other)) <= estimate(one + other) <= 5 * len(one + other)


# --- work -------------------------------------------------------------------------------------


def test_a_chat_counts_its_messages_and_what_stands_around_each():
    assert work(messages=[user(ENGLISH)]).input_tokens == estimate(ENGLISH) + MESSAGE_TOKENS
    assert work(messages=[system("Hi"), user("Hi")]).input_tokens == 2 * (estimate("Hi") + MESSAGE_TOKENS)


def test_parts_are_as_good_as_a_text():
    parts = [{"type": "text", "text": ENGLISH[:60]}, {"type": "text", "text": ENGLISH[60:]}]
    assert work(messages=[user(parts)]).input_tokens == work(messages=[user(ENGLISH)]).input_tokens


@pytest.mark.parametrize(
    "part",
    [
        PICTURE,
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "input_image", "image_url": PICTURE["image_url"]["url"]},
        {"type": "input_audio", "input_audio": {"data": "A" * 100_000, "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
    ],
)
def test_a_picture_or_the_like_counts_as_a_constant(part: dict[str, Any]):
    assert work(messages=[user([part])]).input_tokens == MEDIA_TOKENS + MESSAGE_TOKENS


def test_tools_and_schemas_are_a_part_of_the_prompt():
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    bare = work(messages=[user("Hi")]).input_tokens
    with_tools = work(messages=[user("Hi")], tools=[tool]).input_tokens
    assert 0.5 * estimate(json.dumps(tool)) < with_tools - bare < 1.5 * estimate(json.dumps(tool))
    assert work(messages=[user("Hi")], response_format={"type": "json_schema"}).input_tokens > bare


def test_calls_of_tools_count():
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Berlin"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert work(messages=[message]).input_tokens == estimate('weather {"city": "Berlin"}') + MESSAGE_TOKENS


@pytest.mark.parametrize(
    ("prompt", "tokens", "prompts"),
    [
        (ENGLISH, estimate(ENGLISH), 1),
        ([ENGLISH, "Hi"], estimate(ENGLISH) + estimate("Hi"), 2),
        (["x"] * 1000, 1000, 1000),  # a token each, however short
        ([1, 2, 3], 3, 1),
        ([[1, 2, 3], [4]], 4, 2),
        ([], 0, 1),
        (None, 0, 1),
    ],
)
def test_prompts_of_completions_and_embeddings(prompt: Any, tokens: int, prompts: int):
    told = work("completions", prompt=prompt, max_tokens=10)
    assert (told.input_tokens, told.output_tokens) == (tokens, 10 * prompts)
    told = work("embeddings", input=prompt, max_tokens=10)
    assert (told.input_tokens, told.output_tokens) == (tokens, 0)


def test_responses_take_a_text_or_items():
    expected = estimate(ENGLISH) + MESSAGE_TOKENS
    assert work("responses", input=ENGLISH).input_tokens == expected
    items = [{"role": "user", "content": [{"type": "input_text", "text": ENGLISH}]}]
    assert work("responses", input=items).input_tokens == expected
    expected = estimate(f"{ENGLISH} {CODE}") + MESSAGE_TOKENS
    assert work("responses", input=ENGLISH, instructions=CODE).input_tokens == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, GUESSED_OUTPUT),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 5, "max_tokens": 7}, 5),
        ({"max_output_tokens": 9}, 9),
        ({"max_tokens": 7, "n": 3}, 21),
        ({"n": 3}, 3 * GUESSED_OUTPUT),
        ({"max_tokens": 0}, GUESSED_OUTPUT),
        ({"max_tokens": -1}, GUESSED_OUTPUT),
        ({"max_tokens": True}, GUESSED_OUTPUT),
        ({"max_tokens": "7"}, GUESSED_OUTPUT),
        ({"max_tokens": 1.5}, GUESSED_OUTPUT),
        ({"max_tokens": 10**300}, MOST_TOKENS),
        ({"max_tokens": 2, "n": 10**9}, 2 * MOST_CHOICES),
        ({"max_tokens": 2, "n": None}, 2),
    ],
)
def test_output_is_what_is_asked_for_at_most(fields: dict[str, Any], expected: int):
    assert work(messages=[user("Hi")], **fields).output_tokens == expected


odd = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=20)
    | st.sampled_from(["user", "system", "text", "image_url", "data:image/png;base64,AAAA", "input_audio"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "image_url", "tool_calls", "function", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
fields = st.sampled_from(
    [
        "messages",
        "tools",
        "functions",
        "prompt",
        "input",
        "instructions",
        "text",
        "response_format",
        "prompt_cache_key",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
    ]
)


@given(st.dictionaries(fields, odd), st.sampled_from(APIS))
def test_no_body_raises(body: dict[str, Any], api: OpenAIApi):
    told = work(api, **body)
    assert told.input_tokens >= 0
    assert 0 <= told.output_tokens <= MOST_TOKENS


def test_a_body_of_many_levels_is_taken():
    deep: Any = "end"
    for _ in range(5000):
        deep = [{"content": deep}]
    assert work(messages=deep).input_tokens == estimate("end") + MESSAGE_TOKENS


# --- prefixes -----------------------------------------------------------------------------------

TURNS = [system("Be brief."), user("Who was Ada?"), {"role": "assistant", "content": "A mathematician."}, user("More?")]


def test_all_turns_of_a_conversation_have_one_prefix():
    first = prefix(messages=TURNS[:2])
    assert first
    assert prefix(messages=TURNS) == first


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [system("Be long."), *TURNS[1:]]},
        {"messages": [TURNS[0], user("Who was Bob?")]},
        {"messages": TURNS[1:]},
        {"messages": TURNS, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [TURNS[0], user([{"type": "text", "text": "Who was Ada?"}, PICTURE])]},
        {"messages": TURNS, "prompt_cache_key": "mine"},
    ],
)
def test_other_beginnings_have_other_prefixes(body: dict[str, Any]):
    assert prefix(**body) != prefix(messages=TURNS)


def test_conversations_under_one_long_system_prompt_are_told_apart():
    long = system("You are the assistant of a bank. " * 500)
    assert prefix(messages=[long, user("Who was Ada?")]) != prefix(messages=[long, user("Who was Bob?")])


def test_what_comes_late_in_a_long_beginning_does_not_count():
    long = "word " * 1000
    assert prefix(messages=[user(long + "a")]) == prefix(messages=[user(long + "b")])


def test_a_cache_key_stands_above_the_text():
    same = {prefix(messages=[user(text)], prompt_cache_key="mine") for text in ("a", "b", "c")}
    assert len(same) == 1
    assert prefix(messages=[user("a")], prompt_cache_key="other") not in same


def test_pictures_are_told_apart_by_how_they_begin():
    def with_picture(url: str) -> bytes:
        return prefix(messages=[user([{"type": "image_url", "image_url": {"url": url}}])])

    assert with_picture("data:image/png;base64,AAAA") != with_picture("data:image/png;base64,AAAB")
    assert with_picture("data:image/png;base64,AAAA") == with_picture("data:image/png;base64,AAAA")


@pytest.mark.parametrize(
    ("api", "same", "other"),
    [
        ("completions", [{"prompt": "a b"}, {"prompt": "a b", "n": 2}], {"prompt": "a c"}),
        ("completions", [{"prompt": [1, 2]}, {"prompt": [1, 2], "n": 2}], {"prompt": [1, 3]}),
        (
            "responses",
            [{"input": "a"}, {"input": [user("a")]}, {"input": [user("a"), user("b")]}],
            {"input": "a", "instructions": "x"},
        ),
    ],
)
def test_prefixes_of_the_other_apis(api: OpenAIApi, same: list[dict[str, Any]], other: dict[str, Any]):
    prefixes = {prefix(api, **body) for body in same}
    assert len(prefixes) == 1
    assert prefix(api, **other) not in prefixes


@pytest.mark.parametrize("api", APIS)
def test_no_prompt_has_no_prefix(api: OpenAIApi):
    assert prefix(api) == b""


def test_a_prefix_is_the_same_in_every_process():
    assert prefix(messages=TURNS).hex() == "e935938752778e615ef355397360c434"


# --- answers ------------------------------------------------------------------------------------


def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
    """As llama.cpp writes it; vLLM's and OpenAI's differ in the order of fields."""
    choice = {"finish_reason": reason, "index": 0, "delta": delta, **more}
    document = {"choices": [choice], "created": 1700000000, "id": "chatcmpl-1", "object": "chat.completion.chunk"}
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def counted(*events: bytes, name: bytes = b"") -> int:
    count = StreamCount()
    for event in events:
        count.add(event, name)
    return count.tokens


WORDS = ENGLISH.split(" ")
START, END = chunk({"role": "assistant", "content": None}), chunk({}, "stop", timings={"predicted_ms": 1.5, "n": 9})
TOKENS = [chunk({"content": " " + word}) for word in WORDS]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([], 0, id="nothing"),
        pytest.param([START], 1, id="the caller left before the first token"),
        pytest.param([START, TOKENS[0]], 1, id="one token"),
        pytest.param([START, *TOKENS], len(WORDS), id="cut off"),
        pytest.param([START, *TOKENS, END], len(WORDS), id="whole"),
        pytest.param(
            [chunk({"role": "assistant", "content": ""}), *TOKENS, END], len(WORDS), id="an empty text is no token"
        ),
        pytest.param([chunk({"content": "", "reasoning_content": " so"})] * 5, 5, id="thoughts"),
        pytest.param([chunk({"tool_calls": [{"function": {"arguments": '{"a"'}}]})] * 5, 5, id="calls of tools"),
        pytest.param([chunk({"content": 'a \\ "b"'})] * 5, 11, id="escapes are counted as they stand"),
        pytest.param(
            [chunk({"content": "a"}, logprobs={"content": [{"token": "a", "bytes": [97] * 99}]})] * 5, 5, id="logprobs"
        ),
        pytest.param([json.dumps({"choices": [{"text": "ab"}]}).encode()] * 5, 5, id="completions, with spaces"),
        pytest.param([b'{"unheard":"of"}'] * 5, 5, id="names that nobody knows"),
        pytest.param([b'{"content":"cut'] * 3, 3, id="no JSON"),
    ],
)
def test_tokens_of_a_stream(events: list[bytes], expected: int):
    assert counted(*events) == expected
    together = StreamCount()
    if events:
        together.add_all(b"".join(b"data: %b\n\n" % event for event in events))
    assert together.tokens == expected


@pytest.mark.parametrize("size", [5, 10, 30])
def test_tokens_of_a_stream_with_several_in_each_event(size: int):
    events = [chunk({"content": " ".join(WORDS[at : at + size])}) for at in range(0, len(WORDS), size)]
    assert estimate(ENGLISH) * 0.8 < counted(START, *events, END) < estimate(ENGLISH) * 1.25


def test_of_named_events_only_deltas_count():
    count = StreamCount()
    count.add(b'{"response":{"output":[]}}', b"response.created")
    for _ in range(5):
        count.add(b'{"type":"response.output_text.delta","delta":" word"}', b"response.output_text.delta")
    count.add(b'{"text":" word word word word word"}', b"response.output_text.done")
    assert count.tokens == 5


@given(st.lists(st.binary(max_size=60) | st.binary(max_size=30).map(lambda b: b'{"content":"' + b)))
def test_any_bytes_are_counted(events: list[bytes]):
    assert 0 <= counted(*events) <= len(events) + sum(map(len, events)) / 4


@pytest.mark.parametrize(
    ("api", "answer", "expected"),
    [
        ("chat/completions", {"choices": [{"message": {"role": "assistant", "content": ENGLISH}}]}, estimate(ENGLISH)),
        (
            "chat/completions",
            {
                "choices": [{"message": {"content": "a", "reasoning_content": "b"}, "logprobs": {"content": ENGLISH}}]
                * 2
            },
            2 * estimate("a b"),
        ),
        (
            "chat/completions",
            {"choices": [{"message": {"content": None, "tool_calls": [{"id": "1", "function": {"arguments": CODE}}]}}]},
            estimate(CODE),
        ),
        ("completions", {"choices": [{"text": ENGLISH}]}, estimate(ENGLISH)),
        (
            "responses",
            {"output": [{"type": "message", "id": "m", "content": [{"type": "output_text", "text": ENGLISH}]}]},
            estimate(ENGLISH),
        ),
        ("embeddings", {"data": [{"embedding": [0.1] * 100}]}, 0),
        ("chat/completions", {"choices": None}, 0),
        ("chat/completions", {"choices": [None, 1, {"message": 3}]}, 1),
        ("chat/completions", [], 0),
    ],
)
def test_tokens_of_a_whole_answer(api: OpenAIApi, answer: Any, expected: int):
    assert of_answer(json.dumps(answer).encode(), api) == expected


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"{", b"null", b"[" * 100_000])
def test_no_answer_raises(api: OpenAIApi, body: bytes):
    assert of_answer(body, api) >= 0
