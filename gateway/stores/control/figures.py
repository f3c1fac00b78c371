"""What became of requests, second by second, of all workers together: for the console, and for who guards canaries.

Layout: `{prefix}figures:<Unix second>`, a hash whose fields are `<series as JSON>|<measure>`, all whole numbers.
Measures are the names in `core.watching.figures.COUNTS`, and `w<step>` and `f<step>` for the histograms of whole
answers and of first tokens. It expires 1 h 10 min after its last word: the longest that a guard looks back is an hour.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from gateway.core.watching import counting
from gateway.core.watching.figures import COUNTS, Figures, Series, Tally
from gateway.core.watching.record import RequestRecord
from gateway.stores.flushing import TIMEOUT_S, Flushing
from gateway.stores.redis_script import UNREACHABLE, answering, in_time, load_script

FLUSH_S: Final = 0.25
READ_TIMEOUT_S: Final = 2.0
READ_AT_ONCE: Final = 300  # seconds in one round trip: an hour of a busy gateway is some ten megabytes
KEPT_S: Final = 4200
MAX_SERIES: Final = 2000  # in one second of one worker; servers and rules bound them far below
MAX_SECONDS: Final = 5  # that wait to be written; more are Redis's absence

_OTHERS: Final = Series("", "", "", "", "")
_log = logging.getLogger(__name__)


class RedisFigures(Flushing):
    """An `Observer` that adds up what becomes of requests, and writes it four times a second.

    What Redis does not take is let go, since a late count would be taken for one of now; `lost` says how many requests
    that were. More series than a second may have are counted together, under no name.
    """

    def __init__(self, client: Redis, prefix: str, *, now_s: Callable[[], float] = time.time) -> None:
        super().__init__("figures", FLUSH_S)
        self._client = client
        self._prefix = prefix
        self._now_s = now_s
        self._script = load_script("add_counts")
        self._seconds: dict[int, dict[Series, Tally]] = {}
        self._second, self._tallies = 0, dict[Series, Tally]()

    def began(self, task: str) -> None:
        """Nothing is known of it yet."""

    def refused(self, record: RequestRecord) -> None:
        """It has come to no rule: metrics and the log have it."""

    def ended(self, record: RequestRecord) -> None:
        """Count it in the second in which it ended."""
        self._turn()
        counting.count(record, self._tally)

    def compared(self, series: Series, *, agreed: bool) -> None:
        """The answer of this series' place was held against its shadow's."""
        self._turn()
        tally = self._tally(series)
        if agreed:
            tally.agreed += 1
        else:
            tally.disagreed += 1

    def _turn(self) -> None:
        """Go on to the second that it is now."""
        second = int(self._now_s())
        if second != self._second:
            if len(self._seconds) >= MAX_SECONDS:
                self.lost += _requests(self._seconds.pop(min(self._seconds)))
            self._second, self._tallies = second, self._seconds.setdefault(second, {})

    def _tally(self, series: Series) -> Tally:
        tally = self._tallies.get(series)
        if tally is None:
            if len(self._tallies) >= MAX_SERIES:
                series = _OTHERS
            tally = self._tallies.setdefault(series, Tally())
        return tally

    async def _write(self) -> bool:
        seconds, self._seconds, self._second = self._seconds, {}, 0
        arguments = {second: list(_fields(tallies)) for second, tallies in seconds.items()}
        calls = [
            (f"{self._prefix}figures:{second}", (KEPT_S, *fields)) for second, fields in arguments.items() if fields
        ]
        if not calls:
            return False
        try:
            async with in_time(TIMEOUT_S):
                await self._add(calls)
        except UNREACHABLE:
            self.lost += sum(map(_requests, seconds.values()))
            raise
        return True

    async def _add(self, calls: Sequence[tuple[str, Sequence[str | int]]]) -> None:
        """Run the script for each key with its arguments: one round trip; where Redis has forgotten it, two."""
        async with self._client.pipeline(transaction=False) as steps:
            for key, arguments in calls:
                steps.evalsha(self._script.sha, 1, key, *arguments)
            answers = await steps.execute(raise_on_error=False)
        for (key, arguments), answer in zip(calls, answers, strict=True):
            if isinstance(answer, NoScriptError):
                await self._script.run(self._client, [key], arguments)
            elif isinstance(answer, Exception):
                raise answer


class RedisFigureSource:
    """See `admin_ports.FigureSource`."""

    def __init__(self, client: Redis, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    async def read(self, since_s: int, until_s: int) -> Mapping[int, Figures]:
        """By second, those in which nothing ended left out. Raises `RulesUnavailable` when Redis does not answer."""
        found: dict[int, Figures] = {}
        known: dict[bytes, Series | None] = {}
        for begin in range(since_s, until_s, READ_AT_ONCE):
            seconds = range(begin, min(begin + READ_AT_ONCE, until_s))
            for second, fields in zip(seconds, await self._stored(seconds), strict=True):
                if fields:
                    found[second] = _figures(fields, known)
        return found

    async def _stored(self, seconds: Iterable[int]) -> list[dict[bytes, bytes]]:
        async with answering("the figures", READ_TIMEOUT_S), self._client.pipeline(transaction=False) as steps:
            for second in seconds:
                steps.hgetall(f"{self._prefix}figures:{second}")
            return await steps.execute()


def _requests(tallies: Mapping[Series, Tally]) -> int:
    return sum(tally.requests for tally in tallies.values())


def _fields(tallies: Mapping[Series, Tally]) -> Iterator[str | int]:
    """Tallies as fields of a hash and their counts, without what is 0."""
    for series, tally in tallies.items():
        name = json.dumps(series)
        for measure in COUNTS:
            if count := getattr(tally, measure):
                yield from (f"{name}|{measure}", count)
        for letter, histogram in (("w", tally.whole), ("f", tally.first_token)):
            for step, count in histogram.items():
                yield from (f"{name}|{letter}{step}", count)


def _figures(fields: Mapping[bytes, bytes], known: dict[bytes, Series | None]) -> Figures:
    """The inverse. A measure that this version does not know is left out: another version may write it."""
    found: dict[Series, Tally] = {}
    for field, value in fields.items():
        name, _, measure = field.rpartition(b"|")
        series = known[name] if name in known else known.setdefault(name, _series(name))
        if series is None:
            continue
        tally = found.get(series)
        if tally is None:
            tally = found[series] = Tally()
        _set(tally, measure.decode(), int(value))
    return found


def _set(tally: Tally, measure: str, count: int) -> None:
    if measure in _KNOWN:
        setattr(tally, measure, count)
    elif measure[:1] in ("w", "f") and measure[1:].isdigit():
        histogram = tally.whole if measure[0] == "w" else tally.first_token
        histogram[int(measure[1:])] = count


_KNOWN: Final = frozenset(COUNTS)


def _series(name: bytes) -> Series | None:
    try:
        return Series(*json.loads(name))
    except (ValueError, TypeError):
        return None
