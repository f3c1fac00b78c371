"""Which requests are equal, and what is kept of their answers."""

import msgspec.structs
import numpy as np

from local_runtime.messages import InferRequest
from local_runtime.scheduling.response_cache import ResponseCache, cache_key
from local_runtime.scheduling.validation import CheckedRequest


def checked(outputs=("Y",), request_id="", **inputs):
    source = InferRequest(model="m", inputs=inputs, request_id=request_id)
    return CheckedRequest(source=source, inputs=inputs, rows=1, batch_key=(), outputs=outputs)


def key(*arguments, owner=1, **fields):
    return cache_key(owner, checked(*arguments, **fields))


def test_equal_inputs_have_equal_keys_whatever_the_request_is_called():
    x = np.arange(4, dtype=np.float32)
    assert key(x=x, request_id="a") == key(x=x.copy(), request_id="b")


def test_everything_that_may_change_the_answer_changes_the_key():
    x = np.arange(4, dtype=np.float32)
    text = np.array([b"ab", b"c"], dtype=object)
    keys = {
        key(x=x),
        key(x=x, owner=2),
        key(("Z",), x=x),
        key(y=x),
        key(x=x.reshape(2, 2)),
        key(x=x.view(np.int32)),
        key(x=x + 1),
        key(x=text),
        key(x=np.array([b"a", b"bc"], dtype=object)),
    }
    assert len(keys) == 9


def test_a_view_of_other_memory_with_the_same_values_is_equal():
    wide = np.arange(8, dtype=np.float32)
    assert key(x=wide[::2]) == key(x=wide[::2].copy())


def test_answers_come_back_and_cannot_be_changed_by_either_side():
    cache = ResponseCache(1000)
    outputs = {"Y": np.ones(3, np.float32)}
    cache.put(b"k", outputs)
    outputs["Y"][0] = 7
    kept = cache.get(b"k").outputs
    assert kept["Y"].tolist() == [1, 1, 1]
    assert not kept["Y"].flags.writeable


def test_the_longest_unused_goes_first_and_the_room_is_never_exceeded():
    cache = ResponseCache(2000)
    for name in (b"a", b"b"):
        cache.put(name, {"Y": np.zeros(3, np.float32)})
    assert cache.get(b"a") is not None
    cache.put(b"c", {"Y": np.zeros(3, np.float32)})
    assert [cache.get(name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]


def test_what_is_larger_than_the_room_is_not_kept_and_pushes_nothing_out():
    cache = ResponseCache(2000)
    cache.put(b"a", {"Y": np.zeros(3, np.float32)})
    cache.put(b"big", {"Y": np.zeros(1000, np.float32)})
    assert (len(cache), cache.get(b"big")) == (1, None)


def test_strings_count_with_their_length():
    cache = ResponseCache(1000)
    cache.put(b"a", {"Y": np.array([b"x" * 2000], dtype=object)})
    assert len(cache) == 0


def test_putting_a_key_again_replaces_it():
    cache = ResponseCache(2000)
    cache.put(b"a", {"Y": np.zeros(3, np.float32)})
    cache.put(b"a", {"Y": np.ones(5, np.float32)})
    assert len(cache) == 1
    assert cache.get(b"a").outputs["Y"].shape == (5,)


def test_sources_differ_only_in_what_does_not_matter():
    one = checked(x=np.ones(1))
    other = msgspec.structs.replace(one, source=msgspec.structs.replace(one.source, priority=3))
    assert cache_key(1, one) == cache_key(1, other)


def test_a_hit_is_the_askers_own_and_has_the_parameters():
    cache = ResponseCache(1000)
    cache.put(b"a", {"Y": np.zeros(3, np.float32)}, {"from": "model"})
    cache.get(b"a").outputs.clear()
    assert set(cache.get(b"a").outputs) == {"Y"}
    assert cache.get(b"a").parameters == {"from": "model"}


def test_empty_answers_take_room_too():
    cache = ResponseCache(10_000)
    for number in range(1000):
        cache.put(str(number).encode(), {"Y": np.zeros(0, np.float32)})
    assert len(cache) < 20
