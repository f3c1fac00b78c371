"""The last requests of all workers, each with how it was decided: for who asks why one went where it went.

Layout: `{prefix}requests`, a stream of about 10,000 entries with the fields `id` (the request's) and `document` (the
JSON of `core.watching.request_documents`).

A worker writes 200 a second at most: those that failed first, the others drawn by chance, all alike. Each says how many
it stands for, so that shares counted over the log are right on average.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, cast

import orjson
from redis.asyncio import Redis

from gateway.core.errors import ClientClosed, InvalidInput
from gateway.core.watching.record import RequestRecord
from gateway.core.watching.request_documents import Ended, document, ended
from gateway.ports import JsonObject
from gateway.stores.flushing import TIMEOUT_S, Flushing
from gateway.stores.redis_script import UNREACHABLE, answering, in_time, load_script

FLUSH_S: Final = 0.25
KEPT: Final = 10_000
MOST: Final = 50  # at a time: 200 a second
MOST_FAILED: Final = 40  # of these, so that some that went well are always seen
AT_ONCE: Final = 10  # documents made in one turn of the event loop, some 0.1 ms: requests wait meanwhile
_CURSOR: Final = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
SHORTEST: Final = 8  # characters of an id by which it can be found; of random ones hardly two begin alike
PAGE: Final = 1000  # entries read at once while one is looked for

_log = logging.getLogger(__name__)


class _Sample:
    """So many of those that come, each with the same chance (Vitter's algorithm R); `seen` is how many came."""

    __slots__ = ("kept", "seen", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.seen = 0
        self.kept: list[Ended] = []

    def slot(self) -> int | None:
        """Where the next one is to be put; None where it is not among the sample."""
        self.seen += 1
        if self.seen <= self.size:
            return len(self.kept)
        at = int(random.random() * self.seen)  # noqa: S311 - a sample, no secret
        return at if at < self.size else None

    def put(self, at: int, one: Ended) -> None:
        """Put it there."""
        if at == len(self.kept):
            self.kept.append(one)
        else:
            self.kept[at] = one


class RedisRequests(Flushing):
    """An `Observer` that writes down requests, four times a second; what Redis does not take is let go.

    `worker_id` names this worker; `matched_headers` gives the names of the headers that rules match on now.
    """

    def __init__(
        self,
        client: Redis,
        prefix: str,
        *,
        worker_id: str,
        matched_headers: Callable[[], frozenset[str]],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("requests", FLUSH_S)
        self._client = client
        self._key = f"{prefix}requests"
        self._worker = worker_id
        self._matched_headers = matched_headers
        self._now_s = now_s
        self._script = load_script("add_requests")  # one call: the client would spend 20 us on each of many
        self._failed, self._well = _Sample(MOST_FAILED), _Sample(MOST)

    def began(self, task: str) -> None:
        """Nothing is known of it yet."""

    def ended(self, record: RequestRecord) -> None:
        """Take it down, if it is among the sample."""
        is_well = record.error is None or record.error.code == ClientClosed.code
        self._take(self._well if is_well else self._failed, record)

    def refused(self, record: RequestRecord) -> None:
        """The same; a flood at the door must not hide what fails behind it."""
        self._take(self._well, record)

    def _take(self, sample: _Sample, record: RequestRecord) -> None:
        at = sample.slot()
        if at is not None:
            at_ms = int(self._now_s() * 1000)
            sample.put(at, ended(record, at_ms=at_ms, matched_headers=self._matched_headers()))

    async def _write(self) -> bool:
        failed, well = self._failed, self._well
        if not failed.seen and not well.seen:
            return False
        self._failed, self._well = _Sample(MOST_FAILED), _Sample(MOST)
        room = MOST - len(failed.kept)
        if len(well.kept) > room:
            well.kept = random.sample(well.kept, room)
        drawn = sorted([*_drawn(failed), *_drawn(well)], key=lambda each: each[0].at_ms)
        arguments: list[str | bytes | int] = [KEPT]
        for number, (one, stands_for) in enumerate(drawn):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            arguments += (one.id, orjson.dumps(document(one, worker=self._worker, stands_for=stands_for)))
        try:
            async with in_time(TIMEOUT_S):
                await self._script.run(self._client, [self._key], arguments)
        except UNREACHABLE:
            self.lost += len(drawn)
            raise
        return True


def _drawn(sample: _Sample) -> list[tuple[Ended, int]]:
    """The sample, each with how many it stands for: together for all that came."""
    if not sample.kept:
        return []
    each, rest = divmod(sample.seen, len(sample.kept))
    return [(one, each + (i < rest)) for i, one in enumerate(sample.kept)]


class RedisRequestLog:
    """See `admin_ports.RequestLog`."""

    def __init__(self, client: Redis, prefix: str, timeout_s: float = 2.0) -> None:
        self._client = client
        self._key = f"{prefix}requests"
        self._timeout_s = timeout_s

    async def page(self, *, before: str = "", size: int = 100) -> tuple[list[JsonObject], str | None]:
        """The newest first; each with its own `cursor`, which names those after it.

        Raises `RulesUnavailable` when Redis does not answer, `InvalidInput` where `before` is no cursor.
        """
        if before and not _CURSOR.fullmatch(before):
            raise InvalidInput("cursor: must be `next` of a page, or the cursor of a request", field="cursor")
        entries = await self._entries(before, size)
        found = [_read(at, fields) for at, fields in entries if b"document" in fields]
        return found, entries[-1][0].decode() if len(entries) == size else None

    async def find(self, request_id: str) -> JsonObject | None:
        """The newest of that id; else, of those of which all that begin so have one id, the newest."""
        before, wanted = "", request_id.encode()
        beginning: dict[bytes, JsonObject] = {}
        while True:
            entries = await self._entries(before, PAGE)
            for at, fields in entries:
                found = fields.get(b"id", b"")
                if b"document" not in fields or not found.startswith(wanted):
                    continue
                if found == wanted:
                    return _read(at, fields)
                if len(wanted) >= SHORTEST and len(beginning) < 2 and found not in beginning:  # noqa: PLR2004 - not the only one
                    beginning[found] = _read(at, fields)
            if len(entries) < PAGE:
                return next(iter(beginning.values())) if len(beginning) == 1 else None
            before = entries[-1][0].decode()

    async def _entries(self, before: str, size: int) -> Sequence[tuple[bytes, dict[bytes, bytes]]]:
        async with self._bounded():
            newest = f"({before}" if before else "+"
            entries = await self._client.xrevrange(self._key, max=newest, min="-", count=size)
        return cast("Sequence[tuple[bytes, dict[bytes, bytes]]]", entries)

    def _bounded(self) -> AbstractAsyncContextManager[None]:
        return answering("the log of requests", self._timeout_s)


def _read(at: bytes, fields: dict[bytes, bytes]) -> JsonObject:
    """One entry of the stream."""
    return {**orjson.loads(fields[b"document"]), "cursor": at.decode()}
