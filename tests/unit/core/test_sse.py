"""The event stream parser: every legal spelling, cut anywhere."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.sse import SseParser, SseTooLarge
from gateway.core.types import Deltas


def parsed(stream, cuts=()):
    parser = SseParser()
    events = []
    last = 0
    for cut in [*sorted(cuts), len(stream)]:
        events += parser.feed(stream[last:cut])
        last = cut
    return events, parser.at_boundary


TABLE = {
    "plain": (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
    "no space after the colon": (b'data:{"a":1}\n\n', [b'{"a":1}']),
    "only one space is taken": (b"data:  a\n\n", [b" a"]),
    "crlf": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    "cr": (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    "mixed line ends": (b"data: a\r\n\ndata: b\n\r\ndata: c\r\n\r", [b"a", b"b", b"c"]),
    "multi-line data": (b"data: {\ndata: }\n\n", [b"{\n}"]),
    "comments": (b": ping\n\ndata: a\n: note\n\n", [b"a"]),
    "other fields": (b"event: x\nid: 1\nretry: 5\ndata: a\nfoo\n\n", [b"a"]),
    "no data, no event": (b"event: x\n\nid: 1\n\n", []),
    "empty data is an event": (b"data:\n\ndata\n\n", [b"", b""]),
    "a field that only begins like data": (b"database: x\ndata: a\n\n", [b"a"]),
    "bom": (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    "bom only at the start": (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),
    "many blank lines": (b"\n\n\ndata: a\n\n\n\n\ndata: b\n\n\n", [b"a", b"b"]),
    "text with colons": (b"data: a: b\n\n", [b"a: b"]),
    "unicode": ("data: 数🙂é\n\n".encode(), ["数🙂é".encode()]),
    "unicode line separators are no line ends": (
        "data: a\u2028b\u0085c\n\n".encode(),
        ["a\u2028b\u0085c".encode()],
    ),
    "done": (b"data: {}\n\ndata: [DONE]\n\n", [b"{}", b"[DONE]"]),
}


@pytest.mark.parametrize(("stream", "events"), TABLE.values(), ids=TABLE)
def test_spellings(stream, events):
    assert parsed(stream) == (events, True)


@pytest.mark.parametrize(("stream", "events"), TABLE.values(), ids=TABLE)
def test_one_byte_at_a_time(stream, events):
    assert parsed(stream, range(1, len(stream))) == (events, True)


@pytest.mark.parametrize(("stream", "events"), TABLE.values(), ids=TABLE)
def test_every_single_cut(stream, events):
    for cut in range(1, len(stream)):
        assert parsed(stream, [cut]) == (events, True), cut


NAMED = {
    "named": (b"event: x\ndata: a\n\n", [(b"x", b"a")]),
    "no name": (b"data: a\n\n", [(b"", b"a")]),
    "a name is of one event": (b"event: x\ndata: a\n\ndata: b\n\n", [(b"x", b"a"), (b"", b"b")]),
    "the name may come last": (b"data: a\nevent:x\n\n", [(b"x", b"a")]),
    "the last name counts": (b"event: x\nevent: y\ndata: a\n\n", [(b"y", b"a")]),
    "a name without data": (b"event: x\n\ndata: a\n\n", [(b"", b"a")]),
    "an empty name": (b"event\ndata: a\n\n", [(b"", b"a")]),
    "crlf": (b"event: x\r\ndata: a\r\n\r\n", [(b"x", b"a")]),
    "cr": (b"event: x\rdata: a\rdata: b\r\r", [(b"x", b"a\nb")]),
    "comments": (b": c\nevent: x\n: c\ndata: a\n\n: c\n\n", [(b"x", b"a")]),
    "bom": (b"\xef\xbb\xbfevent: x\ndata: a\n\n", [(b"x", b"a")]),
}


@pytest.mark.parametrize(("stream", "events"), NAMED.values(), ids=NAMED)
def test_names_however_the_stream_is_cut(stream, events):
    for step in (1, 2, 3, len(stream)):
        parser = SseParser()
        found = [event for at in range(0, len(stream), step) for event in parser.feed_named(stream[at : at + step])]
        assert found == events, step


@pytest.mark.parametrize(("stream", "events"), TABLE.values(), ids=TABLE)
def test_named_events_have_the_same_payloads(stream, events):
    assert [payload for _, payload in SseParser().feed_named(stream)] == events


@pytest.mark.parametrize("stream", [b"data: a", b"data: a\n", b"d", b"data: a\n\ndata", b"\xef\xbb", b"data: a\r"])
def test_a_cut_stream_is_not_at_a_boundary(stream):
    assert parsed(stream)[1] is False


PIECES = st.sampled_from(
    [b"data: a", b"data:", b"data", b": c", b"event: x", b"\n", b"\r", b"\r\n", b"\n\n", b"\xef\xbb\xbf", "é".encode()]
)


@given(st.lists(PIECES, max_size=30).map(b"".join), st.data())
@example(b"data: a\r\n\r\n", None)
def test_any_split_gives_the_same_events(stream, data):
    size = len(stream)
    cuts = range(size) if data is None else data.draw(st.lists(st.integers(0, size), max_size=12))
    assert parsed(stream, cuts) == parsed(stream)


@given(st.lists(st.binary(max_size=30).filter(lambda text: not {10, 13} & set(text)), max_size=6), st.data())
def test_what_is_sent_comes_out(payloads, data):
    line_end = data.draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    stream = b"".join(b"data: " + payload + line_end * 2 for payload in payloads)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    assert parsed(stream, cuts) == (payloads, True)


def bounded(stream, limit, step):
    parser = SseParser(max_event_bytes=limit)
    events = []
    try:
        for start in range(0, len(stream), step):
            events += parser.feed(stream[start : start + step])
    except SseTooLarge as error:
        return [*events, *error.complete, "too large"]
    return events


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_the_bound_is_the_same_however_the_stream_is_cut(step):
    fits, over = b"data: " + b"x" * 14, b"data: " + b"x" * 15
    assert bounded(fits + b"\n\n\n\n" + fits + b"\n\n", 20, step) == [b"x" * 14, b"x" * 14]
    assert bounded(fits + b"\n\n\n" + over + b"\n\n", 20, step) == [b"x" * 14, "too large"]


def test_an_endless_event_is_stopped_before_its_end():
    parser = SseParser(max_event_bytes=20)
    parser.feed(b"data: " + b"x" * 14)
    with pytest.raises(SseTooLarge):
        parser.feed(b"x")


OBJECT = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20).map(
    lambda text: b"{%b}" % text.encode()
)


@given(st.lists(OBJECT, min_size=1, max_size=5))
def test_a_read_of_whole_objects_is_taken_as_it_is(objects):
    read = b"".join(b"data: %b\n\n" % one for one in objects)
    parser = SseParser()
    assert parser.takes_whole(read)
    assert [one.data for one in Deltas(wire=read).each()] == objects == parsed(read)[0]
    assert parser.at_boundary
    assert parser.feed(b"data: a\n\n") == [b"a"]


@given(st.lists(st.sampled_from([b"data: {", b"}", b"\n", b"\n\n", b"\r", b"a", b": "]), max_size=12).map(b"".join))
@example(b"data: {}\n\ndata: {}\n\n")
@example(b"data: {}\n\n\ndata: {}\n\n")
@example(b"data: {}\n\na\n\ndata: {}\n\n")
@example(b"data: {}\ndata: {}\n\n")
@example(b"data: {\r}\n\n")
def test_whatever_is_taken_as_it_is_has_the_same_events(read):
    if SseParser().takes_whole(read):
        assert [one.data for one in Deltas(wire=read).each()] == parsed(read)[0]


@pytest.mark.parametrize("before", [b"data: {", b"data: {}\n\n\r", b"event: x\n"])
def test_no_read_is_taken_as_it_is_behind_a_part_of_another(before):
    parser = SseParser()
    parser.feed(before)
    assert not parser.takes_whole(b"data: {}\n\n")
