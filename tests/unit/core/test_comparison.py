"""How much two answers are alike, by tables; that every measure is symmetric, and 1 for an answer and itself."""

import difflib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.shadows import comparison, said
from gateway.core.shadows.comparison import MAX_CHARACTERS, MAX_TOKENS, Comparison, alike, common, tokens_of
from gateway.core.tensors import from_numpy
from gateway.core.types import Answer, Delta, Message, Part, Tensor, Tensors

WEATHER = {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}


def compared(real: list[Part], shadow: list[Part]) -> Comparison:
    return comparison.compare(comparison.reading(real), comparison.reading(shadow))


def answer(**output) -> list[Part]:
    return [Answer(output=output)]


def body(document: object) -> list[Part]:
    return [Message(body=document if isinstance(document, bytes) else json.dumps(document).encode())]


def chat(content: object = None, *calls: object, **more) -> list[Part]:
    message = {"role": "assistant", "content": content, **more}
    if calls:
        message["tool_calls"] = [{"id": f"c{n}", "type": "function", "function": call} for n, call in enumerate(calls)]
    return body({"choices": [{"index": 0, "message": message}]})


def deltas(*documents: object, event: str = "") -> list[Part]:
    return [Delta(data=json.dumps(one).encode(), event=event.encode()) for one in documents]


def said_in(*pieces: str, index: int = 0) -> list[object]:
    return [{"choices": [{"index": index, "delta": {"content": piece}}]} for piece in pieces]


def response(*items: object) -> dict[str, object]:
    return {"object": "response", "output": list(items)}


def spoken(text: str) -> dict[str, object]:
    return {"type": "message", "content": [{"type": "output_text", "text": text}]}


def tensors(**arrays: np.ndarray) -> list[Part]:
    return [Tensors(outputs=tuple(from_numpy(name, array) for name, array in arrays.items()), version="1")]


def raw(datatype: str, shape: tuple[int, ...], data: bytes) -> list[Part]:
    return [Tensors(outputs=(Tensor(name="o", datatype=datatype, shape=shape, data=data),), version="1")]


def labels(*names: str) -> list[Part]:
    return answer(labels=[{"name": name, "index": n, "score": 0.1} for n, name in enumerate(names)])


FLOATS = np.array([1.0, -2.0, 0.0, np.nan, np.inf], np.float32)
UNIT = np.array([[1.0, 0.0], [0.0, 1.0]])

CASES = [
    # name, real, shadow, agreed, similarity, what
    ("best label and all others", labels("a", "b"), labels("a", "b"), True, 1.0, "label"),
    ("best label alone", labels("a", "b"), labels("a", "c"), True, 0.5, "label"),
    ("other best label, same labels", labels("a", "b"), labels("b", "a"), False, 1.0, "label"),
    ("more labels", labels("a"), labels("a", "b"), True, 0.5, "label"),
    ("label", answer(label="a", scores=[0.7, 0.3]), answer(label="a", scores=[0.9, 0.1]), True, 0.8, "label"),
    ("other label", answer(label="a", scores=[0.7, 0.3]), answer(label="b", scores=[0.2, 0.8]), False, 0.5, "label"),
    ("label without scores", answer(label="a"), answer(label="b", scores=[1.0]), False, 0.0, "label"),
    ("embeddings, the least", answer(embeddings=UNIT), answer(embeddings=UNIT[[0, 0]]), False, 0.0, "embedding"),
    ("one embedding", answer(embedding=[1.0, 0.0]), answer(embedding=[0.995, 0.0999]), True, 0.995, "embedding"),
    ("opposite", answer(embedding=[1.0, 0.0]), answer(embedding=[-1.0, 0.0]), False, -1.0, "embedding"),
    ("no direction", answer(embedding=[1.0, 0.0]), answer(embedding=[0.0, 0.0]), False, 0.0, "embedding"),
    ("other size", answer(embedding=[1.0, 0.0]), answer(embedding=[1.0]), False, None, "embedding"),
    ("no numbers", answer(embedding=[1.0]), answer(embedding=[np.nan]), None, None, "embedding"),
    ("speech", answer(speech_probability=0.5), answer(speech_probability=0.54), True, 0.96, "probability"),
    ("no speech", answer(speech_probability=0.9), answer(speech_probability=0.1), False, 0.2, "probability"),
    ("ocr", answer(text="one two", lines=[]), answer(text="one  two", lines=[1]), True, 1.0, "text"),
    ("ocr, other word", answer(text="one two", lines=[]), answer(text="one ten", lines=[]), False, 0.5, "text"),
    ("chat", chat("Rome is old."), chat("Rome is  old."), True, 1.0, "text"),
    ("chat in parts", chat("ab c"), chat([{"type": "text", "text": "ab "}, {"text": "c"}]), True, 1.0, "text"),
    ("chat as a task", answer(message={"content": "a b"}), answer(message={"content": "a b"}), True, 1.0, "text"),
    ("refusal", chat(None, refusal="I cannot."), chat("I cannot."), True, 1.0, "text"),
    ("nothing said", chat(None), chat(""), True, 1.0, "text"),
    ("something and nothing", chat("a"), chat(""), False, 0.0, "text"),
    ("one word of twenty", chat("w " * 19 + "a"), chat("w " * 19 + "b"), True, 0.95, "text"),
    ("han", chat("今天天气很好"), chat("今天天气不好"), False, 5 / 6, "text"),
    ("calls", chat(None, WEATHER), chat("Let me see.", WEATHER | {"arguments": '{"days":2,"city":"Rome"}'}), True, 1.0,
     "tool_calls"),
    ("calls in another order", chat(None, WEATHER, {"name": "x"}), chat(None, {"name": "x"}, WEATHER), True, 1.0,
     "tool_calls"),
    ("other arguments", chat(None, WEATHER), chat(None, WEATHER | {"arguments": '{"city": "Bonn"}'}), False, 0.0,
     "tool_calls"),
    ("arguments that are no JSON", chat(None, WEATHER | {"arguments": "{"}), chat(None, WEATHER | {"arguments": "{"}),
     True, 1.0, "tool_calls"),
    ("a call and none", chat(None, WEATHER), chat("Rome is warm."), False, 0.0, "tool_calls"),
    ("old form of calls", chat(None, function_call=WEATHER), chat(None, WEATHER), True, 1.0, "tool_calls"),
    ("completion", body({"choices": [{"text": "a b"}]}), body({"choices": [{"text": "a b"}]}), True, 1.0, "text"),
    ("choices, the least", body({"choices": [{"text": "a"}, {"text": "b"}]}),
     body({"choices": [{"text": "a"}, {"text": "c"}]}), False, 0.0, "text"),
    ("more choices", body({"choices": [{"text": "a"}]}), body({"choices": [{"text": "a"}] * 2}), False, 0.0, "text"),
    ("responses", body(response(spoken("a b"))), body(response({"type": "reasoning"}, spoken("a b"))), True, 1.0,
     "text"),
    ("calls of responses", body(response({"type": "function_call", **WEATHER})), chat(None, WEATHER), True, 1.0,
     "tool_calls"),
    ("stream, cut elsewhere", deltas(*said_in("Ro", "me is", " old")), deltas(*said_in("Rome is old")), True, 1.0,
     "text"),
    ("stream of two choices", deltas(*said_in("a"), *said_in("b", index=1)),
     deltas(*said_in("b", index=1), *said_in("a")), True, 1.0, "text"),
    ("stream of a completion", deltas({"choices": [{"text": "a "}]}, {"choices": [{"text": "b"}]}),
     deltas({"choices": [{"text": "a b"}]}), True, 1.0, "text"),
    ("stream and usage", deltas(*said_in("a"), {"choices": [], "usage": {}}), deltas(*said_in("a")), True, 1.0, "text"),
    ("stream of calls",
     deltas({"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "weather"}}]}}]},
            {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Rome",'}}]}}]},
            {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '"days": 2}'}}]}}]}),
     deltas({"choices": [{"delta": {"tool_calls": [{"index": 0, "function": WEATHER}]}}]}), True, 1.0, "tool_calls"),
    ("stream of responses", deltas({"response": response(spoken("a b"))}, event="response.completed"),
     deltas({"type": "response.output_text.delta", "delta": "a"}, {"type": "response.output_text.delta", "delta": " b"},
            event="response.output_text.delta"), True, 1.0, "text"),
    ("tensors", tensors(a=FLOATS, b=np.arange(3)), tensors(b=np.arange(3), a=FLOATS), True, 1.0, "tensors"),
    ("near enough", tensors(a=FLOATS), tensors(a=FLOATS * np.float32(1.005)), True, 1.0, "tensors"),
    ("near zero", tensors(a=FLOATS), tensors(a=FLOATS + np.float32(0.0009)), True, 1.0, "tensors"),
    ("one element is another", tensors(a=FLOATS), tensors(a=FLOATS + np.float32([0, 0.1, 0, 0, 0])), False, 0.8,
     "tensors"),
    ("infinity and a number", tensors(a=np.float32([np.inf])), tensors(a=np.float32([1])), False, 0.0, "tensors"),
    ("the other infinity", tensors(a=np.float32([np.inf])), tensors(a=np.float32([-np.inf])), False, 0.0, "tensors"),
    ("largest doubles", tensors(a=np.array([1e308])), tensors(a=np.array([-1e308])), False, 0.0, "tensors"),
    ("whole numbers", tensors(a=np.array([1, 2, 3, 4])), tensors(a=np.array([1, 2, 3, 5])), False, 0.75, "tensors"),
    ("texts", tensors(a=np.array([b"x", b"y"], object)), tensors(a=np.array([b"x", b"y"], object)), True, 1.0,
     "tensors"),
    ("other texts", tensors(a=np.array([b"x", b"y"], object)), tensors(a=np.array([b"x", b"z"], object)), False, 0.0,
     "tensors"),
    ("other names", tensors(a=FLOATS), tensors(b=FLOATS), False, 0.0, "tensors"),
    ("one output more", tensors(a=FLOATS), tensors(a=FLOATS, b=FLOATS), False, 0.0, "tensors"),
    ("other datatype", tensors(a=FLOATS), tensors(a=FLOATS.astype(np.float64)), False, 0.0, "tensors"),
    ("other shape", tensors(a=np.ones((2, 3))), tensors(a=np.ones((3, 2))), False, 0.0, "tensors"),
    ("one answer more", tensors(a=FLOATS), tensors(a=FLOATS) * 2, False, 0.0, "tensors"),
    ("bfloat", raw("BF16", (2,), b"\x80\x3f\x00\x40"), raw("BF16", (2,), b"\x81\x3f\x00\x41"), False, 0.5, "tensors"),
    ("broken tensor", raw("FP32", (2,), b"1234"), raw("FP32", (2,), b"4321"), False, 0.0, "tensors"),
    ("no JSON", body(b"{"), chat("a"), None, None, "nothing"),
    ("no object", body([1]), chat("a"), None, None, "nothing"),
    ("no choices", body({"a": 1}), chat("a"), None, None, "nothing"),
    ("a choice that is none", body({"choices": [1]}), chat("a"), None, None, "nothing"),
    ("nothing in the stream", deltas({"choices": []}), deltas(*said_in("a")), None, None, "nothing"),
    ("too long", body(b" " * (said.MAX_BYTES + 1)), chat("a"), None, None, "nothing"),
    ("no answer", [], chat("a"), None, None, "nothing"),
    ("an unknown task", answer(weight=1), answer(weight=1), None, None, "nothing"),
    ("another form", answer(labels=None), labels("a"), None, None, "nothing"),
    ("two kinds", answer(label="a"), chat("a"), None, None, "nothing"),
]  # fmt: skip
NAMED = [pytest.param(*case[1:], id=case[0]) for case in CASES]


@pytest.mark.parametrize(("real", "shadow", "agreed", "similarity", "what"), NAMED)
def test_answers(real, shadow, agreed, similarity, what):
    found = compared(real, shadow)
    assert (found.agreed, found.what) == (agreed, what)
    assert found.similarity == (None if similarity is None else pytest.approx(similarity, abs=1e-3))
    assert bool(found.reason) == (agreed is not True)
    assert compared(shadow, real) == found


@pytest.mark.parametrize(("real", "shadow", "agreed", "similarity", "what"), NAMED)
def test_each_answer_is_itself(real, shadow, agreed, similarity, what):
    if what == "nothing":
        assert compared(real, real).agreed in (None, True)
        return
    for parts in (real, shadow):
        itself = compared(parts, parts)
        if agreed is not None:
            assert (itself.agreed, itself.similarity, itself.reason) == (True, 1.0, "")


def test_a_reason_has_no_words_of_an_answer():
    reasons = {compared(real, shadow).reason for _, real, shadow, *_ in CASES}
    assert not [reason for reason in reasons if "Rome" in reason or "weather" in reason or "old" in reason]


# --- texts ---------------------------------------------------------------------------------------------

WORDS = st.lists(st.sampled_from("abcde"), max_size=40)


def by_table(one: list[str], other: list[str]) -> int:
    """The longest common subsequence as textbooks have it."""
    above = [0] * (len(other) + 1)
    for token in one:
        row = [0]
        for at, there in enumerate(other):
            row.append(above[at] + 1 if token == there else max(above[at + 1], row[at]))
        above = row
    return above[-1]


@given(WORDS, WORDS)
def test_the_common_part_is_the_longest(one, other):
    assert common(one, other) == common(other, one) == by_table(one, other)


@given(WORDS, WORDS)
def test_the_measure_is_symmetric_and_never_below_difflib(one, other):
    ratio = alike(one, other)
    assert ratio == alike(other, one)
    assert 0 <= ratio <= 1
    assert (ratio == 1) == (one == other)
    # The matching blocks of difflib are a common subsequence too, but not always the longest.
    assert ratio >= difflib.SequenceMatcher(None, one, other, autojunk=False).ratio() - 1e-12


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        (" \n\t", []),
        ("It's 3.5 km!", ["It", "'", "s", "3", ".", "5", "km", "!"]),
        ("déjà vu", ["déjà", "vu"]),
        ("abc東京x", ["abc", "東", "京", "x"]),
        ("สวัสดี", list("สวัสดี")),
        ("한국 사람", ["한국", "사람"]),
        ("🙂🙂", ["🙂", "🙂"]),
        ("a_b", ["a_b"]),
    ],
)
def test_tokens(text, tokens):
    assert tokens_of(text) == tokens


@given(st.text())
def test_any_text_has_tokens_and_is_itself(text):
    assert all(token.strip() for token in tokens_of(text))
    assert compared(chat(text), chat(text)).similarity == 1.0


@pytest.mark.parametrize("text", ["a " * 10**6, "a" * 10**6, " " * 10**6, "漢" * 10**6, "\n!" * 10**6])
def test_a_bounded_part_of_a_text_is_looked_at(text):
    tokens = tokens_of(text)
    assert len(tokens) <= MAX_TOKENS
    assert sum(map(len, tokens)) <= MAX_CHARACTERS


def test_where_one_beginning_is_known_the_others_beginning_is_held_against_it():
    # Tokens in pieces: 3,000 events have 1,000 words, of which the first 2,000 events are read.
    pieces = [piece for n in range(1000) for piece in (" w", str(n), "x")]
    whole = " ".join(f"w{n}x" for n in range(1000))
    assert compared(deltas(*said_in(*pieces)), deltas(*said_in(whole))).similarity > 0.99
    short = " ".join(f"w{n}x" for n in range(100))
    assert compared(deltas(*said_in(*pieces)), deltas(*said_in(short))).similarity < 0.3


def test_a_long_answer_is_not_a_short_one_that_it_begins_with():
    assert compared(chat("a b " * 5000), chat("a b " * 500)).similarity == pytest.approx(2 / 3, abs=0.01)


# --- whatever servers answer ------------------------------------------------------------------------------

NAMES = (
    "choices message content text delta tool_calls function name arguments index output type function_call refusal"
    " response"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.sampled_from(NAMES.split()), one, max_size=4),
    max_leaves=12,
)


@given(JSON, JSON, st.booleans())
def test_nothing_that_a_server_answers_raises(one, other, is_stream):
    made = deltas if is_stream else body
    found = compared(made({"choices": one}), made(other if isinstance(other, dict) else {"choices": other}))
    assert found.agreed in (None, True, False)
    assert found.similarity is None or 0 <= found.similarity <= 1


@given(st.lists(st.floats(width=32), max_size=6), st.lists(st.floats(width=32), max_size=6))
def test_floats_are_compared_both_ways_alike(one, other):
    real, shadow = tensors(a=np.array(one, np.float32)), tensors(a=np.array(other, np.float32))
    assert compared(real, shadow) == compared(shadow, real)
    assert compared(real, real).similarity == 1.0
