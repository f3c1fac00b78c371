"""A connection to an endpoint that has ended is freed at once: endpoints fail, and a search for garbage is rare."""

import asyncio
import contextlib
import gc
import weakref

import pytest

from gateway.backends.llm import http_connection
from gateway.backends.llm.http_client import HttpClient
from gateway.backends.llm.http_connection import HttpError
from tests.kit.upstream import FIN, HOLD, RST, Upstream, head, json_reply
from tests.kit.wait import until

TIMES = 3


@pytest.fixture
def ended(monkeypatch):
    """What has become of all connections that a test makes."""
    made, create = [], http_connection.Connection.__init__

    def init(self):
        made.append(weakref.ref(self))
        create(self)

    monkeypatch.setattr(http_connection.Connection, "__init__", init)
    gc.collect()
    gc.disable()
    yield made
    gc.enable()


async def asked(client: HttpClient, *, timeout_us: int = 5_000_000) -> None:
    with contextlib.suppress(HttpError):
        async with client.exchange("GET", "/x", timeout_us=timeout_us) as response:
            await response.read_all(10_000)


@pytest.mark.parametrize(
    "script",
    [
        json_reply(200, 1, {"connection": "close"}),
        [RST],
        [FIN],
        [b"no HTTP\r\n\r\n", HOLD],
        [head(200, {"content-length": "9"}), b"cut", RST],
        [head(200, {"content-length": "9"}), HOLD],
        [head(200, {"content-length": "9", "content-encoding": "br"}), b"unreadabl"],
        [head(200, {"content-length": "99999"}), b"x" * 99_999],
        [HOLD],
    ],
    ids=["close", "reset", "end", "garbled", "cut", "late body", "unreadable", "large", "late"],
)
async def test_however_it_ends(ended, script):
    async with Upstream(script) as up:
        client = HttpClient(up.base_url, headers={})
        for _ in range(TIMES):
            await asked(client, timeout_us=100_000 if script[-1] is HOLD else 5_000_000)
        await client.close()
    assert ended
    await until(lambda: not [one for one in ended if one() is not None])


async def test_one_that_was_kept_and_is_closed(ended):
    async with Upstream(json_reply(200, 1)) as up:
        client = HttpClient(up.base_url, headers={})
        for _ in range(TIMES):
            await asked(client)
        await client.close()
        await asyncio.sleep(0)
    assert len(ended) == 1
    await until(lambda: not [one for one in ended if one() is not None])
