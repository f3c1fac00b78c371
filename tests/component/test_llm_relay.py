"""What the relay does with each event of a long stream: it is looked at as bytes, and not read as JSON."""

import json

import orjson
import pytest

from tests.kit.app import Harness
from tests.kit.llm_plane import CHAT, COMPLETIONS, RESPONSES, Endpoint, llm_plane, response_events, text_delta
from tests.kit.upstream import LAST_CHUNK, Script, Upstream, delta, event, named, sse_head, usage_chunk

EVENTS = 1000
FEW = 3  # the request, the event that tells usage, and one to spare


@pytest.fixture
def parsed(monkeypatch):
    """All that any part of the gateway reads as JSON from here on."""
    read: list[bytes | str] = []

    def counting(real):
        def loads(text, **options):
            read.append(text)
            return real(text, **options)

        return loads

    for parser in (orjson, json):
        monkeypatch.setattr(parser, "loads", counting(parser.loads))
    return read


def words(count: int) -> list[str]:
    return [f"w{number} " for number in range(count)]


def chat(count: int) -> Script:
    return [
        sse_head(),
        *(event(delta(word)) for word in words(count)),
        event(usage_chunk()),
        event("[DONE]"),
        LAST_CHUNK,
    ]


def completions(count: int) -> Script:
    return [sse_head(), *(event(text_delta(word)) for word in words(count)), event("[DONE]"), LAST_CHUNK]


def responses(count: int) -> Script:
    return [sse_head(), *(named(one["type"], one) for one in response_events(*words(count))), LAST_CHUNK]


async def relayed(gw: Harness, path: str, **asked: object) -> str:
    body = {"model": "general_llm", "stream": True, **asked}
    answer = await gw.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize(
    ("path", "script", "asked"),
    [
        (CHAT, chat, {"messages": [{"role": "user", "content": "hi"}]}),
        (COMPLETIONS, completions, {"prompt": "hi"}),
        (RESPONSES, responses, {"input": "hi"}),
    ],
)
async def test_of_a_thousand_events_next_to_none_is_read_as_json(path, script, asked, parsed):
    reads = []
    for count in (1, EVENTS):
        async with llm_plane(Endpoint(upstreams=(Upstream(script(count)),))) as gw:
            parsed.clear()
            text = await relayed(gw, path, **asked)
            assert all(word in text for word in words(count))
            reads.append(len(parsed))
    assert reads[0] == reads[1] <= FEW
