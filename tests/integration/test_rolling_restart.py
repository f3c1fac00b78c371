"""Two gateways restarted one after the other under load, as a rolling update does it: nobody notices.

What stands before them (a Service, a proxy) is here a list of those that may be asked: a gateway is taken off it, told
to stop once that is known, drains, is started anew, and comes back when it is ready. Streams take four seconds here;
`GATEWAY_TEST_STREAM_S=60` makes them as long as long answers are.
"""

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.kit.serving import KEY, Serving, config, start
from tests.kit.upstream import Pause, Script, Seen, Step, Upstream, delta, event, json_reply, sse_head
from tests.kit.upstream import completion as whole
from tests.kit.wait import until, until_async

pytestmark = pytest.mark.alone

STREAM_S = int(os.environ.get("GATEWAY_TEST_STREAM_S", "4"))
PARTS = 2 * STREAM_S  # of a stream, half a second apart
RATE = 40  # requests a second; each tenth is a stream
BODY = {"model": "general_llm", "messages": [{"role": "user", "content": "hi"}]}


class Answers(Upstream):
    """Whole answers at once, streams slowly."""

    def script_for(self, seen: Seen) -> Script:
        if not seen.body:  # a probe
            return json_reply(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})
        if not seen.json().get("stream"):
            return json_reply(200, whole())
        parts: list[Step] = [sse_head()]
        for number in range(PARTS):
            parts += [event(delta(f"{number} ")), Pause(STREAM_S / PARTS)]
        return [*parts, event(delta("", finish="stop")), event("[DONE]"), b"0\r\n\r\n"]


@dataclass
class Gateway:
    """One that can be started again where it was."""

    serving: Serving
    path: Path

    async def begin(self) -> None:
        self.serving.process, _ = await start(self.path)
        await until_async(self.is_ready, timeout_s=30)

    async def is_ready(self) -> bool:
        return await self.serving.is_ready() == 200


@dataclass
class Front:
    """Those that may be asked, by turns, and what callers were answered."""

    open_: list[Gateway] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    async def ask(self, number: int) -> None:
        gateway = self.open_[number % len(self.open_)]
        async with httpx.AsyncClient(
            base_url=gateway.serving.url,
            headers={"authorization": f"Bearer {KEY}"},
            timeout=90,
            trust_env=False,
        ) as http:
            try:
                self.seen[await (self._stream(http) if number % 10 == 0 else self._whole(http))] += 1
            except httpx.HTTPError as error:
                self.seen[f"failed: {type(error).__name__}"] += 1

    async def _whole(self, http: httpx.AsyncClient) -> str:
        return f"whole {(await http.post('/v1/chat/completions', json=BODY)).status_code}"

    async def _stream(self, http: httpx.AsyncClient) -> str:
        async with http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as answer:
            lines = [line async for line in answer.aiter_lines() if line.startswith("data:")]
        is_all = lines[-1:] == ["data: [DONE]"] and sum('"content"' in line for line in lines) >= PARTS
        return f"stream {answer.status_code} {'whole' if is_all else 'cut'}"

    async def load(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as asked:
            for number in itertools.count():
                if stop.is_set():
                    return
                asked.create_task(self.ask(number))
                await asyncio.sleep(1 / RATE)


@asynccontextmanager
async def two(folder: Path, upstream: str) -> AsyncIterator[list[Gateway]]:
    gateways = []
    for name in ("a", "b"):
        (folder / name).mkdir()
        tasks = {"general_llm": {"contract": "chat", "timeout_ms": 1000 * (STREAM_S + 30)}}
        path, port, ops_port = config(folder / name, upstream, drain_timeout_s=STREAM_S + 30, tasks=tasks)
        process, log = await start(path)
        serving = Serving(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{ops_port}", log, path)
        gateways.append(Gateway(serving, path))
    try:
        for gateway in gateways:
            await until_async(gateway.is_ready, timeout_s=30)
        yield gateways
    finally:
        for gateway in gateways:
            if gateway.serving.process.returncode is None:
                gateway.serving.process.terminate()
            await gateway.serving.process.wait()


@pytest.mark.timeout(120 + 4 * STREAM_S)
async def test_a_rolling_restart_fails_no_request_and_cuts_no_stream(tmp_path):  # DB-14
    async with Answers() as upstream, two(tmp_path, upstream.base_url) as gateways:
        front, stop = Front(list(gateways)), asyncio.Event()
        running = asyncio.create_task(front.load(stop))
        try:
            for gateway in gateways:
                await until(lambda: front.seen["whole 200"] > 20, timeout_s=20)
                before = front.seen["stream 200 whole"]
                await until(lambda seen=before: front.seen["stream 200 whole"] > seen, timeout_s=STREAM_S + 20)
                front.open_.remove(gateway)
                gateway.serving.process.terminate()
                assert await gateway.serving.process.wait() == 0  # when its streams are over
                await gateway.begin()
                front.open_.append(gateway)
                count = front.seen["whole 200"]
                await until(lambda seen=count: front.seen["whole 200"] > seen + 2 * RATE, timeout_s=20)
        finally:
            stop.set()
            await running
    assert set(front.seen) == {"whole 200", "stream 200 whole"}, front.seen
