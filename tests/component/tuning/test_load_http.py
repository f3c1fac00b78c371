"""Load against scripted servers: every request ends once, whatever comes back."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from gateway.tuning.load import runner, targets
from gateway.tuning.load.asks import Ask, AskError
from gateway.tuning.load.outcomes import Outcome
from gateway.tuning.load.runner import Watch
from gateway.tuning.traffic import TrafficClass
from tests.kit.serving import free_port
from tests.kit.upstream import (
    DONE,
    FIN,
    HOLD,
    LAST_CHUNK,
    RST,
    Upstream,
    chunk,
    delta,
    event,
    head,
    json_reply,
    sse_head,
    usage_chunk,
)

TASK = {"task": "text-embedding", "input": {"text": "a cat"}}
GOOD = json_reply(200, {"output": {"x": 1}})
STREAM = [sse_head() + event(delta("a")), event(delta("b")), event(usage_chunk(completion=7)) + DONE]


async def load(url, traffic, *, connections=100, watch=None, ask=None, **options):
    async with targets.clients(connections=connections) as clients:
        target = await clients.target(Ask(url=url, **(ask or TASK)), traffic)
        options = {"duration_s": 0.5, "grace_s": 0.2, **options}
        return await runner.run(target, [traffic], watch=watch, **options)


async def codes(*scripts, ask=None, count=4):
    """How so many requests, one after another, end."""
    async with Upstream(*scripts) as up:
        traffic = TrafficClass(trace=tuple(n / 20 for n in range(count)))
        found = await load(up.base_url.removesuffix("/v1"), traffic, ask=ask)
    assert sum(found.whole.codes.values()) + found.whole.unfinished == found.whole.sent == count
    return {**found.whole.codes, **({"unfinished": found.whole.unfinished} if found.whole.unfinished else {})}


CHAT = {"chat": "hello"}


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (GOOD, "ok"),
        ([head(200, {"transfer-encoding": "chunked"}), chunk(b'{"out'), chunk(b'put": 1}'), LAST_CHUNK], "ok"),
        ([head(200) + b'{"output": 1}', FIN], "ok"),  # as long as the connection
        ([head(100), head(200, {"content-length": "13"}) + b'{"output": 1}'], "ok"),
        ([head(200, {"content-length": "13", "connection": "close"}) + b'{"output": 1}', FIN], "ok"),
        (json_reply(200, {"no": "output"}), "wrong_answer"),
        (json_reply(429, {"code": "rate_limited"}, {"retry-after": "7"}), "rate_limited"),
        (json_reply(500, {}), "http_500"),
        ([RST], "connection_closed"),
        ([FIN], "connection_closed"),
        ([head(200, {"content-length": "100"}) + b"{", FIN], "truncated"),
        ([head(200, {"transfer-encoding": "chunked"}), chunk(b"{"), RST], "truncated"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "not_http"),
        ([b"\x00\xff" * 1000, HOLD], "not_http"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"], "not_http"),
        ([HOLD], "unfinished"),
        ([b"HTTP/1.1 200 OK\r\nx: ", HOLD], "unfinished"),
        ([head(200, {"content-length": "100"}) + b"{", HOLD], "unfinished"),
    ],
)
async def test_each_request_ends_once_with_a_code(script, code):
    assert await codes(script) == {code: 4}


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (STREAM, "ok"),
        ([sse_head() + event(delta("a")), event({"error": {"code": "backend_error"}}), FIN], "backend_error"),
        ([sse_head() + event(delta("a")), LAST_CHUNK], "truncated"),
        ([sse_head() + event(delta("a")), RST], "truncated"),
        (json_reply(503, {"error": {"code": "no_healthy_backend"}}), "no_healthy_backend"),
    ],
)
async def test_each_stream_ends_once_with_a_code(script, code):
    assert await codes(script, ask=CHAT) == {code: 4}


async def test_requests_end_whatever_is_mixed():
    scripts = [GOOD, [RST], GOOD, json_reply(429, {"code": "queue_full"}), [HOLD], GOOD, [b"x\r\n\r\n"], [HOLD]]
    assert await codes(*scripts, GOOD, count=9) == {
        "ok": 4,
        "connection_closed": 1,
        "queue_full": 1,
        "not_http": 1,
        "unfinished": 2,
    }


async def test_a_second_answer_to_one_request_is_nobodys():
    async with Upstream([*GOOD, *json_reply(500, {})], GOOD) as up:
        found = await load(up.base_url.removesuffix("/v1"), TrafficClass(trace=(0, 0.1, 0.2)))
        assert found.whole.codes == {"ok": 3}
        assert up.connections == 2


async def test_connections_are_kept():
    async with Upstream(GOOD) as up:
        found = await load(up.base_url.removesuffix("/v1"), TrafficClass(concurrency=3))
        assert found.whole.codes["ok"] == found.whole.sent > 3
        assert up.connections == 3
    assert any("closed loop" in note for note in found.notes)


async def test_streams_tell_tokens_and_when_they_came():
    async with Upstream(STREAM) as up:
        found = await load(up.base_url.removesuffix("/v1"), TrafficClass(trace=(0, 0.1)), ask=CHAT)
        body = up.requests[0].json()
    assert (body["stream"], body["max_tokens"], body["model"]) == (True, 32, "general_llm")
    whole = found.whole
    assert whole.tokens_per_s == 2 * 7 / found.seconds
    assert 0 < whole.first_token.p50 <= whole.latency.max
    assert whole.inter_token is not None


async def test_who_nobody_listens_to():
    found = await load(f"http://127.0.0.1:{free_port()}", TrafficClass(trace=(0, 0.1)))
    assert found.whole.codes == {"connection_refused": 2}
    found = await load("http://no-such-host.invalid:80", TrafficClass(trace=(0,)))
    assert found.whole.codes == {"connection_failed": 1}


async def test_retry_after_and_answers_of_a_cache_are_told():
    scripts = (
        json_reply(429, {"code": "rate_limited"}, {"retry-after": "7"}),
        json_reply(200, {"output": 1}, {"age": "3"}),
    )
    async with Upstream(*scripts) as up:
        found = await load(up.base_url.removesuffix("/v1"), TrafficClass(trace=(0, 0.1, 0.2)))
    assert any("up to 7 s" in note for note in found.notes)
    assert any(note.startswith("2 answers had been made") for note in found.notes)


@contextlib.asynccontextmanager
async def stalling(after: int, seconds: float) -> AsyncIterator[str]:
    """A server that answers at once, but for a time after its so manyeth request in which it answers nobody."""
    seen = 0
    goes_on = asyncio.Event()
    goes_on.set()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(len(b'{"input":{"text":"a cat"}}'))
                seen += 1
                if seen == after:
                    goes_on.clear()
                    asyncio.get_running_loop().call_later(seconds, goes_on.set)
                await goes_on.wait()
                writer.write(GOOD[0])

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_a_server_that_stands_still_is_charged_for_all_who_would_have_come():
    async with stalling(after=30, seconds=1.0) as url:
        traffic = TrafficClass(rate=100, arrivals="constant")
        found = await load(url, traffic, duration_s=2.0, grace_s=5.0)
    assert found.whole.codes == {"ok": found.whole.sent}
    # Those that were due in its first half waited for half a second at least: some 50 of 200.
    assert found.whole.latency.p90 >= 500
    assert found.whole.latency.p99 >= 900
    assert found.whole.latency.p50 < found.whole.latency.p90


async def test_that_holds_though_connections_are_few():
    async with stalling(after=30, seconds=1.0) as url:
        found = await load(url, TrafficClass(rate=100, arrivals="constant"), duration_s=2.0, grace_s=5.0, connections=2)
    assert found.whole.codes == {"ok": found.whole.sent}
    assert found.whole.latency.p90 >= 500


async def test_warm_up_is_not_counted():
    async with Upstream(GOOD) as up:
        traffic = TrafficClass(rate=100, arrivals="constant")
        found = await load(up.base_url.removesuffix("/v1"), traffic, warmup_s=0.5, duration_s=0.5)
        assert len(up.requests) == 99
    assert found.whole.sent == 50
    assert found.timeline[0].at_s == 0.0
    assert found.seconds == 0.5


async def test_a_run_can_be_stopped_and_tells_what_it_has():
    stop = asyncio.Event()
    progress = []

    def on_progress(now):
        progress.append(now)
        stop.set()

    async with Upstream(GOOD) as up:
        url = up.base_url.removesuffix("/v1")
        classes = TrafficClass(rate=50), TrafficClass(name="b", concurrency=1, think_ms=60_000)
        async with targets.clients() as clients:
            asked = [await clients.target(Ask(url=url, **TASK), one) for one in classes]
            watch = Watch(stop=stop, on_progress=on_progress)
            found = await runner.run(asked, classes, duration_s=600, watch=watch)
    assert 0 < progress[0].sent <= found.whole.sent
    assert 0 < found.seconds < 600
    assert found.classes[1].sent == 1
    assert any(note.startswith("stopped after") for note in found.notes)
    assert found.whole.unfinished == 0


async def test_a_fault_of_a_target_is_no_result():
    class Broken:
        async def send(self, _due, /):
            raise KeyError("a fault of ours")

    for traffic in (TrafficClass(rate=50), TrafficClass(concurrency=2)):
        with pytest.raises(KeyError, match="a fault of ours"):
            await runner.run(Broken(), [traffic], duration_s=30)


async def test_any_target_can_be_put_under_load():
    class Own:
        def __init__(self):
            self.due = []

        async def send(self, due, /):
            self.due.append(due)
            return Outcome(code="ok" if len(self.due) % 2 else "full")

    own = Own()
    found = await runner.run(own, [TrafficClass(trace=(0, 0.05, 0.1, 0.15), speed=2)], duration_s=0.2)
    assert found.whole.codes == {"ok": 2, "full": 2}
    gaps = [b - a for a, b in zip(own.due, own.due[1:], strict=False)]
    assert gaps == pytest.approx([0.025] * 3)


async def test_callers_who_are_refused_do_not_ask_without_a_pause():
    class Full:
        async def send(self, _due, /):
            return Outcome(code="full")

    found = await runner.run(Full(), [TrafficClass(concurrency=2)], duration_s=0.5)
    assert 0 < found.whole.sent <= 2 * (0.5 / runner.FAILED_PAUSE_S + 1)


async def test_a_model_that_is_not_there_is_told_before_anything_is_sent():
    async with Upstream(json_reply(404, {"error": "unknown model"})) as up:
        with pytest.raises(AskError, match="/v2/models/m/config: http_404"):
            await load(up.base_url.removesuffix("/v1"), TrafficClass(rate=1), ask={"tensor": "m"})
    with pytest.raises(AskError, match="connection_refused"):
        await load(f"http://127.0.0.1:{free_port()}", TrafficClass(rate=1), ask={"tensor": "m"})
    with pytest.raises(AskError, match="triton: 127"):
        async with targets.clients() as clients:
            await clients.target(Ask(triton=f"127.0.0.1:{free_port()}", tensor="m"), TrafficClass(rate=1))


async def test_what_the_generator_never_came_to_send_was_due_all_the_same():
    class Hog:
        """Takes the processor from the generator."""

        async def send(self, _due, /):
            end = time.monotonic() + 0.05
            while time.monotonic() < end:
                pass
            return Outcome()

    traffic = TrafficClass(rate=1000, arrivals="constant")
    found = await runner.run(Hog(), [traffic], duration_s=0.3, grace_s=0.0)
    whole = found.whole
    assert whole.sent == 299
    assert sum(whole.codes.values()) + whole.unfinished == 299
    assert whole.unfinished > 0
    assert any("never sent" in note for note in found.notes)
