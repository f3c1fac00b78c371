"""What became of requests, second by second, of all workers together: for the console, and for who guards canaries.

Layout: `{prefix}figures:<Unix second>`, a hash of the series (JSON) and their counts (JSON: whole numbers by the names
in `core.watching.figures.COUNTS`, and by `w<step>` and `f<step>` for the histograms of whole answers and of first
tokens), kept for some minutes; and the same of five seconds each, `{prefix}figures:<its first second>:5`, for 70
minutes: the longest that a guard looks back is an hour. Of 20 busy series that is 12 to 18 MB.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import orjson
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from gateway.core.watching import counting
from gateway.core.watching.figures import COUNTS, Figures, Series, Tally
from gateway.core.watching.record import RequestRecord
from gateway.stores.flushing import TIMEOUT_S, Flushing
from gateway.stores.redis_script import UNREACHABLE, answering, in_time, load_script

FLUSH_S: Final = 0.25
READ_TIMEOUT_S: Final = 2.0
READ_AT_ONCE: Final = 300  # seconds, or fives, in one round trip: some megabytes of a busy gateway
STEP_S: Final = 5
FINE_S: Final = 150  # how far back single seconds are read
FINE_KEPT_S: Final = 300  # clocks may differ a little
KEPT_S: Final = 4200
MAX_SERIES: Final = 2000  # in one second of one worker; servers and rules bound them far below
MAX_SECONDS: Final = 5  # that wait to be written; more are Redis's absence

_OTHERS: Final = Series("", "", "", "", "")


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
        self._script = load_script("add_figures")
        self._seconds: dict[int, dict[Series, Tally]] = {}
        self._steps: dict[int, dict[Series, Tally]] = {}  # by their first second
        self._names: dict[Series, str] = {}
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

    def _fields(self, tallies: Mapping[Series, Tally]) -> Iterator[str | bytes]:
        """Series and counts by turns, without those of nothing."""
        for series, tally in tallies.items():
            if counts := dict(_counts(tally)):
                name = self._names.get(series)
                if name is None:
                    if len(self._names) >= MAX_SERIES:
                        self._names.clear()
                    name = self._names[series] = json.dumps(series)
                yield name
                yield orjson.dumps(counts)

    async def _write(self) -> bool:
        """Five seconds together once they are over, or at the end."""
        seconds, self._seconds, self._second = self._seconds, {}, 0
        for second, tallies in seconds.items():
            step = self._steps.setdefault(_down(second), {})
            for series, tally in tallies.items():
                step.setdefault(series, Tally()).add(tally)
        over = [first for first in self._steps if self._closing.is_set() or first + STEP_S <= self._now_s()]
        written = [(f"{self._prefix}figures:{second}", FINE_KEPT_S, tallies) for second, tallies in seconds.items()]
        written += [(f"{self._prefix}figures:{first}:{STEP_S}", KEPT_S, self._steps.pop(first)) for first in over]
        arguments = [(key, (kept_s, *self._fields(tallies))) for key, kept_s, tallies in written]
        calls = [(key, given) for key, given in arguments if len(given) > 1]
        if not calls:
            return False
        try:
            async with in_time(TIMEOUT_S):
                await self._add(calls)
        except UNREACHABLE:
            self.lost += sum(map(_requests, seconds.values()))
            raise
        return True

    async def _add(self, calls: Sequence[tuple[str, Sequence[int | str | bytes]]]) -> None:
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

    def __init__(self, client: Redis, prefix: str, *, now_s: Callable[[], float] = time.time) -> None:
        self._client = client
        self._prefix = prefix
        self._now_s = now_s

    async def read(self, since_s: int, until_s: int) -> Mapping[int, Figures]:
        """Those in which nothing ended are left out. Raises `RulesUnavailable` when Redis does not answer."""
        fine_s = _down(int(self._now_s()) - FINE_S)
        coarse = range(-_down(-since_s), min(until_s, fine_s), STEP_S)
        keys = {first: f"{self._prefix}figures:{first}:{STEP_S}" for first in coarse}
        keys |= {second: f"{self._prefix}figures:{second}" for second in range(max(since_s, fine_s), until_s)}
        found: dict[int, Figures] = {}
        known: dict[bytes, Series | None] = {}
        seconds = list(keys)
        for begin in range(0, len(seconds), READ_AT_ONCE):
            some = seconds[begin : begin + READ_AT_ONCE]
            for second, fields in zip(some, await self._stored([keys[one] for one in some]), strict=True):
                if fields:
                    found[second] = _figures(fields, known)
        return found

    async def _stored(self, keys: Iterable[str]) -> list[dict[bytes, bytes]]:
        async with answering("the figures", READ_TIMEOUT_S), self._client.pipeline(transaction=False) as steps:
            for key in keys:
                steps.hgetall(key)
            return await steps.execute()


def _requests(tallies: Mapping[Series, Tally]) -> int:
    return sum(tally.requests for tally in tallies.values())


def _down(second: int) -> int:
    """The first of its five."""
    return second - second % STEP_S


def _counts(tally: Tally) -> Iterator[tuple[str, int]]:
    """Without what is 0."""
    for measure in COUNTS:
        if count := getattr(tally, measure):
            yield measure, count
    for letter, histogram in (("w", tally.whole), ("f", tally.first_token)):
        for step, count in histogram.items():
            yield f"{letter}{step}", count


def _figures(fields: Mapping[bytes, bytes], known: dict[bytes, Series | None]) -> Figures:
    """What cannot be read is left out: another version may write it."""
    found: dict[Series, Tally] = {}
    for name, counts in fields.items():
        series = known[name] if name in known else known.setdefault(name, _series(name))
        if series is not None:
            found[series] = _tally(orjson.loads(counts))
    return found


def _tally(counts: Mapping[str, Any]) -> Tally:
    tally = Tally()
    for measure, count in counts.items():
        if measure in _KNOWN:
            setattr(tally, measure, int(count))
        elif measure[:1] in ("w", "f") and measure[1:].isdigit():
            histogram = tally.whole if measure[0] == "w" else tally.first_token
            histogram[int(measure[1:])] = int(count)
    return tally


_KNOWN: Final = frozenset(COUNTS)


def _series(name: bytes) -> Series | None:
    try:
        return Series(*json.loads(name))
    except (ValueError, TypeError):
        return None
