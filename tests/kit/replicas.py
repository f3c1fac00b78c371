"""Several gateway processes over one Redis, an upstream that logs what it executes, and callers who see the order.

Everything but the gateways runs in one event loop, whose *rounds* are the measure of order: all bytes that lie ready
when the loop looks belong to one round, and within it nobody can say which came first. What was sent before is never
seen in a later round than what was sent after it, whatever processes and sockets it came from: the kernel hands
loopback bytes over while it sends them.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from redis.asyncio import Redis

from gateway.stores.stored_rules import worker_key, workers_key
from tests.kit.http_requests import Requests
from tests.kit.serving import KEY, Serving, children, serving
from tests.kit.upstream import completion
from tests.kit.wait import until_async

HOST = "127.0.0.1"
TIMEOUT_S = 120.0
_MARK = re.compile(rb'"content": ?"([^" ]+) ?([^"]*)"')
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Rounds:
    """Numbers the rounds of the running loop in which anything is seen."""

    def __init__(self) -> None:
        self._now = 0
        self._is_seen = False

    def see(self) -> int:
        """The round that is now."""
        if not self._is_seen:
            self._is_seen = True
            asyncio.get_running_loop().call_soon(self._end)
        return self._now

    def _end(self) -> None:
        self._now, self._is_seen = self._now + 1, False


# --- the upstream ----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Execution:
    """One request as the upstream had it: `mark` names it, `began` and `ended` are rounds."""

    mark: str
    began: int
    ended: int = -1


class Workshop:
    """A chat server. The prompt is a mark, and then words of what to do:

    `ms=20` takes that long, `in=7` and `out=3` are the usage that is told, `status=500` fails, `cut` hangs up.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.log: list[Execution] = []
        self.running = 0
        self.most_running = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Bench(self), HOST, 0, backlog=1024)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    @property
    def base_url(self) -> str:
        assert self._server is not None
        return f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}/v1"


class _Bench(Requests):
    """One connection of the upstream."""

    def __init__(self, of: Workshop) -> None:
        super().__init__()
        self._of = of
        self._execution: Execution | None = None
        self._timer: asyncio.TimerHandle | None = None

    def asked(self, head: bytes, body: bytes) -> None:
        said = _MARK.search(body)
        if said is None:  # a question for the models
            self._write(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})
            return
        words = dict(word.split("=") if "=" in word else (word, "1") for word in said[2].decode().split())
        self._execution = Execution(said[1].decode(), self._of.rounds.see())
        self._of.log.append(self._execution)
        self._of.running += 1
        self._of.most_running = max(self._of.most_running, self._of.running)
        self._timer = asyncio.get_running_loop().call_later(int(words.get("ms", 0)) / 1000, self._answer, words)

    def _answer(self, words: dict[str, str]) -> None:
        self._end()
        if "cut" in words:
            self.transport.abort()
        elif "status" in words:
            self._write(int(words["status"]), {"error": {"message": "so it was asked for"}})
        else:
            told = completion("ok", prompt=int(words.get("in", 3)), completion_tokens=int(words.get("out", 2)))
            self._write(200, told)

    def _write(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        head = b"HTTP/1.1 %d So\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self.transport.write(head + body)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._end()

    def _end(self) -> None:
        execution, self._execution = self._execution, None
        if execution is not None:
            execution.ended = self._of.rounds.see()
            self._of.running -= 1


# --- callers ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """What came back, and in which rounds its first and its last bytes were seen."""

    status: int
    headers: dict[str, str]
    body: bytes
    first: int
    last: int

    @property
    def ticket(self) -> int:
        return int(self.headers.get("x-ordering-ticket", 0))

    @property
    def code(self) -> str:
        """Of an error."""
        return str(json.loads(self.body)["error"]["code"]) if self.status != 200 else ""


class _Line(asyncio.Protocol):
    """One kept connection of a caller."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._buffer = b""
        self._first = -1
        self._answered: asyncio.Future[Answer] | None = None
        self.transport: Any = None
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    async def ask(self, request: bytes) -> Answer:
        self._answered, self._buffer, self._first = asyncio.get_running_loop().create_future(), b"", -1
        self.transport.write(request)
        return await self._answered

    def data_received(self, data: bytes) -> None:
        now = self._rounds.see()
        self._first = now if self._first < 0 else self._first
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if found and length and len(body) >= int(length[1]) and self._answered and not self._answered.done():
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            self._answered.set_result(Answer(int(first.split(" ")[1]), headers, body, self._first, now))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if self._answered and not self._answered.done():
            self._answered.set_exception(ConnectionResetError("the gateway is gone"))


@dataclass
class Replica:
    """One gateway process with its workers, and callers' connections to it."""

    serving: Serving
    rounds: Rounds
    is_killed: bool = False
    lines: list[_Line] = field(default_factory=list)

    async def ask(
        self, prompt: str, *, key: str = KEY, task: str = "general_llm", ordering_key: str = "", max_tokens: int = 0
    ) -> Answer:
        """A chat; cancelled, its caller hangs up. Raises `OSError` where the process is gone."""
        document = {"model": task, "messages": [{"role": "user", "content": prompt}]}
        body = json.dumps(document | ({"max_tokens": max_tokens} if max_tokens else {})).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head += f"x-ordering-key: {ordering_key}\r\n" if ordering_key else ""
        line = await self._line()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await line.ask(head.encode() + b"\r\n" + body)
        except BaseException:
            line.transport.abort()
            raise
        if answer.headers.get("connection") == "close":
            line.transport.abort()
        else:
            self.lines.append(line)
        return answer

    async def _line(self) -> _Line:
        while self.lines:
            line = self.lines.pop()
            if not line.is_closed:
                return line
        port = int(self.serving.url.rpartition(":")[2])
        _, line = await asyncio.get_running_loop().create_connection(lambda: _Line(self.rounds), HOST, port)
        return line

    def hang_up(self) -> None:
        """Close the kept connections."""
        for line in self.lines:
            line.transport.abort()
        self.lines.clear()

    def kill(self) -> None:
        """As `kill -9` of the process and all its workers."""
        self.is_killed = True
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def freeze(self) -> None:
        """Stop its workers in their tracks, until `thaw`."""
        for pid in self._pids():
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self._pids():
            os.kill(pid, signal.SIGCONT)

    def end(self) -> None:
        """Begin to stop it, without waiting."""
        self.hang_up()
        if not self.is_killed:
            self.thaw()
            self.serving.process.terminate()

    def _pids(self) -> list[int]:
        """The parent first: it shall start no other worker."""
        return [self.serving.process.pid, *children(self.serving.process.pid)]


@contextlib.asynccontextmanager
async def replicas(
    folder: Path,
    upstream: str,
    redis_urls: Sequence[str],
    prefix: str,
    *,
    workers: int = 1,
    **sections: Any,
) -> AsyncIterator[list[Replica]]:
    """As many gateways as there are Redis addresses, all `workers` of each ready; they end with the block."""
    rounds, one_by_one = sections.pop("rounds"), asyncio.Semaphore(max(1, 4 // workers))  # each has its time to start

    async def one(stack: contextlib.AsyncExitStack, number: int, url: str) -> Replica:
        place = folder / str(number)
        place.mkdir()
        store = {"url": url, "prefix": prefix}
        run = serving(place, upstream, "--workers", str(workers), redis=store, **sections)
        async with one_by_one:
            return Replica(await stack.enter_async_context(run), rounds)

    async with contextlib.AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as starts:
            started = [starts.create_task(one(stack, i, url)) for i, url in enumerate(redis_urls)]
        running = [each.result() for each in started]
        try:
            yield running
        finally:
            for replica in running:
                replica.end()


async def all_workers(client: Redis, prefix: str, count: int) -> None:
    """Wait until so many workers have reported themselves: a process is ready with its first."""

    async def are_there() -> bool:
        return int(await client.scard(f"{prefix}{{rules}}:workers")) >= count

    await until_async(are_there, timeout_s=60)


async def all_know_all(client: Redis, prefix: str, count: int) -> None:
    """Wait until each of so many workers counts them all, which is what it shares its limits out by without Redis.

    A worker counts at each report whom it has found at the one before, and by the third the second is counted.
    """
    await all_workers(client, prefix, count)
    left_ms: dict[bytes, int] = {}
    reports = Counter[bytes]()

    async def have_reported() -> bool:
        for name in await client.smembers(workers_key(prefix)):
            before_ms, left_ms[name] = left_ms.get(name, 0), await client.pttl(worker_key(prefix, name.decode()))
            reports[name] += left_ms[name] > before_ms > 0  # a report lives anew
        return sum(seen >= 3 for seen in reports.values()) >= count

    await until_async(have_reported, timeout_s=60)


# --- the books in Redis ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Books:
    """All that admissions keep in Redis, by their names without prefix and owner."""

    tats_us: dict[str, int]
    spent: dict[str, int]
    places: dict[str, int]
    waiting: dict[str, list[str]]
    numbers: dict[str, int]
    open: list[str]
    held: list[str]

    @property
    def are_at_rest(self) -> bool:
        """Whether nothing is held."""
        return not (self.places or self.waiting or self.open or self.held)


async def books(client: Redis, prefix: str) -> Books:
    """As they stand now."""
    told = Books({}, {}, {}, {}, {}, [], [])
    root = f"{prefix}adm:"
    async for key in client.scan_iter(f"{root}*", count=1000):
        form, _, name = key.decode().removeprefix(root).partition("}:")[2].partition(":")
        match form:
            case "rate":
                told.tats_us[name] = int(await client.get(key) or 0)
            case "places":
                told.places[name] = int(await client.get(key) or 0)
            case "spent":
                told.spent[name] = int(await client.hget(key, "spent") or 0)
            case "queue":
                told.waiting[name] = [one.decode() for one in await client.zrange(key, 0, -1)]
            case "number":
                told.numbers[name] = int(await client.get(key) or 0)
            case "open":
                told.open.extend(one.decode() for one in await client.zrange(key, 0, -1))
            case "held":
                told.held.extend(one.decode() for one in await client.hkeys(key))
            case _:
                raise AssertionError(f"an unknown key: {key!r}")
    return told
