"""Readers of streams: as many as are asked for, each asking again as soon as its stream has ended."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from tests.bench.suite.bench import Failed
from tests.bench.suite.paced import EVENTS, MARK, PAUSE_S
from tests.bench.suite.servers import Target

LENGTH_S: Final = EVENTS * PAUSE_S  # of one stream
PATIENCE_S: Final = 60.0
FEWEST: Final = 20  # times of which a percentile says something
_END: Final = b"\r\n0\r\n\r\n"
_TAIL: Final = len(MARK) - 1  # kept of what was read, so that no mark is missed between two reads and none seen twice


@dataclass(kw_only=True)
class Tally:
    """What the readers saw. Only what begins or comes while `is_counting` is counted."""

    is_counting: bool = False
    is_over: bool = False
    events: int = 0
    first_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    reading: int = 0
    none_reads: asyncio.Event = field(default_factory=asyncio.Event)


class Reader(asyncio.Protocol):
    """One connection: a request, its stream, the next request."""

    def __init__(self, request: bytes, tally: Tally) -> None:
        self._request, self._tally = request, tally
        self._is_reading = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Ask for the first time."""
        self._transport = transport
        self._tally.reading += 1
        self._ask()

    def _ask(self) -> None:
        self._is_reading, self._seen, self._tail = True, 0, b""
        self._is_counted = self._tally.is_counting
        self._began = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """A part of the stream."""
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._is_reading = False
            self._tally.faults.append(f"the answer was {data[:1000].decode(errors='replace')}")
            self._transport.abort()
            return
        held = self._tail + data
        count = held.count(MARK)
        if count:
            if not self._seen and self._is_counted:
                self._tally.first_s.append(time.perf_counter() - self._began)
            self._seen += count
            if self._tally.is_counting:
                self._tally.events += count
        self._tail = held[-_TAIL:]
        if held.endswith(_END):
            self._ended(held)

    def _ended(self, held: bytes) -> None:
        self._is_reading = False
        if self._seen != EVENTS:
            self._tally.faults.append(f"a stream had {self._seen} of {EVENTS} events: {held[-300:]!r}")
        if self._tally.is_over or self._tally.faults:
            self._transport.close()
        else:
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """The last one tells."""
        if self._is_reading:
            self._tally.faults.append(f"a stream broke: {exc}")
        self._tally.reading -= 1
        if not self._tally.reading:
            self._tally.none_reads.set()


def request_of(target: Target) -> bytes:
    """The request as it goes over the wire."""
    at = urlsplit(target.url)
    headers = {"host": at.netloc, "content-length": str(len(target.body)), **target.headers}
    lines = [f"POST {at.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + target.body


class Readers:
    """So many streams at the same time, spread over the length of one."""

    def __init__(self, target: Target, count: int) -> None:
        self.tally = Tally()
        self._target, self._count = target, count

    async def start(self) -> None:
        """Returns when all have asked and the first have ended."""
        loop, request, at = asyncio.get_running_loop(), request_of(self._target), urlsplit(self._target.url)
        began = loop.time()
        for number in range(self._count):
            await asyncio.sleep(max(0.0, began + number * LENGTH_S / self._count - loop.time()))
            await loop.create_connection(lambda: Reader(request, self.tally), at.hostname, at.port)
        await asyncio.sleep(LENGTH_S / 4)
        self._raise()

    async def count(self, seconds: float) -> float:
        """Count for so long; how long it was."""
        self.tally.is_counting, began = True, time.perf_counter()
        await asyncio.sleep(seconds)
        self.tally.is_counting = False
        return time.perf_counter() - began

    async def stop(self) -> None:
        """Let every stream come to its end. Raises `Failed` where one broke."""
        self.tally.is_over = True
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.tally.none_reads.wait()
        except TimeoutError:
            raise Failed(f"{self.tally.reading} streams did not end within {PATIENCE_S:g} s") from None
        self._raise()

    def _raise(self) -> None:
        if self.tally.faults:
            raise Failed(f"{len(self.tally.faults)} streams failed, the first: {self.tally.faults[0]}")


def first_ms(first_s: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile of the times to the first event; nothing of too few to have one."""
    if len(first_s) < FEWEST:
        return {}
    cuts = statistics.quantiles(first_s, n=100)
    return {"first p50 ms": cuts[49] * 1000, "first p99 ms": cuts[98] * 1000}
