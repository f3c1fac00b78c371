"""What callers say of caches, and which requests are the same."""

import pytest

from gateway.core.answers import CacheControl, cache_control
from gateway.core.fingerprints import canonical, digest
from gateway.core.rules import Rule, parse_rules
from gateway.core.types import Caller, InferenceRequest
from gateway.recall import cache_key
from gateway.tasks.chat import ChatInput
from gateway.tasks.text_embedding import TextInput


@pytest.mark.parametrize(
    ("header", "control"),
    [
        ("", CacheControl()),
        ("max-stale=3, x", CacheControl()),
        ("No-Store", CacheControl(use=False)),
        ("no-cache, max-age=5", CacheControl(max_age_us=-1)),
        ("no-cache, no-store", CacheControl(use=False)),
        ("max-age=0", CacheControl(max_age_us=0)),
        ('max-age="12"', CacheControl(max_age_us=12_000_000)),
        ("max-age=x", CacheControl()),
        ("max-age=\u0663", CacheControl()),
    ],
)
def test_cache_control(header: str, control: CacheControl) -> None:
    assert cache_control(header) == control


def test_a_digest_tells_borders() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("ab") == digest(b"ab")


def test_what_has_no_normal_form() -> None:
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    assert canonical(deep) is None
    assert canonical({1, 2}) is None


def rule(**changes: object) -> Rule:
    document = {"name": "r", "match": {"task": "*"}, "split": [{"backend": "b", "model": "m"}], **changes}
    return parse_rules([document])[0]


def request(given: object, *, tenant: str = "t", stream: bool = False, task: str = "chat") -> InferenceRequest:
    caller = Caller(key_id="k", tenant=tenant)
    return InferenceRequest(id="i", task=task, caller=caller, input=given, received_us=0, deadline_us=9, stream=stream)


def chat(**body: object) -> ChatInput:
    return ChatInput(body={"model": "m", "messages": [{"role": "user", "content": "hi"}], **body})


def test_the_order_of_fields_does_not_matter_and_who_asks_neither() -> None:
    one = chat(temperature=0.5, top_p=1, user="me", metadata={"a": "b"}, prompt_cache_key="k")
    other = ChatInput(body=dict(reversed({**one.body, "user": "you"}.items())))
    assert cache_key(request(one), rule()) == cache_key(request(other, tenant="u"), rule())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chat(), chat(temperature=0)),
        (chat(), chat(messages=[{"content": "ho", "role": "user"}])),
        (chat(stop=["a", "b"]), chat(stop=["b", "a"])),
        (chat(), ChatInput(body=chat().body, is_task=True)),
        (chat(), ChatInput(body=chat().body, api="completions")),
        (chat(stream_options={}), chat(stream_options={"include_usage": True})),
        (ChatInput(body={"user": "a"}, api="responses"), ChatInput(body={"user": "b"}, api="responses")),
    ],
)
def test_what_an_answer_depends_on_does_matter(one: ChatInput, other: ChatInput) -> None:
    assert cache_key(request(one), rule()) != cache_key(request(other), rule())


def test_task_stream_and_places_matter_and_weights_do_not() -> None:
    here, there = {"backend": "b", "model": "m"}, {"backend": "b", "model": "n"}
    keys = [
        cache_key(request(chat()), rule()),
        cache_key(request(chat(), stream=True), rule()),
        cache_key(request(chat(), task="other"), rule()),
        cache_key(request(chat()), rule(split=[here, there])),
        cache_key(request(chat()), rule(split=[{**here, "parameters": {"seed": 1}}])),
        cache_key(request(TextInput(texts=("a",), is_list=True)), rule()),
        cache_key(request({"image": b"1"}), rule()),
        cache_key(request({"image": b"2"}), rule()),
    ]
    assert len(set(keys)) == len(keys)
    assert None not in keys
    weighed = [{**there, "weight": 9}, {**here, "weight": 1}]
    assert cache_key(request(chat()), rule(split=weighed)) == keys[3]


def test_an_input_without_a_normal_form_has_no_key() -> None:
    assert cache_key(request({"x": object()}), rule()) is None
