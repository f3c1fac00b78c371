"""The control plane's path about all that goes on: `/overview`, a window of seconds up to now, out of live figures."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import APIRouter, Query
from pydantic import Field

from gateway.admin.fields import Body
from gateway.admin.instants import instant
from gateway.admin.watching.workers import is_behind, newest_of, report_of
from gateway.admin_ports import FigureSource, RuleStore, WorkerState
from gateway.core.cost import NANO_USD_PER_USD
from gateway.core.errors import RulesUnavailable
from gateway.core.watching.figures import Figures, Series, Tally, percentile_us

MAX_WINDOW_S: Final = 3600  # as long as figures are kept
FINE_S: Final = 120  # windows up to this have a point for every second, longer ones for every `STEP_S`
STEP_S: Final = 5
RATE_S: Final = 10  # what "now" is for rates
SETTLING_S: Final = 4  # how long after its end a second may still grow: workers write four times in each
AGAIN_S: Final = 0.25  # callers within that see the same
STALE_S: Final = 3.0


class WorkersOut(Body):
    """How many workers there are; `refused` keep an older set than the stored one, `behind` have not taken it yet."""

    live: int = Field(description="those that tell of themselves")
    refused: int = Field(description="those that keep an older set of rules than the stored one")
    behind: int = Field(description="those that have not taken the newest rules or switches yet")


class PointOut(Body):
    """What ended in one step of the window, which begins at `t`."""

    t: str = Field(description="RFC 3339, UTC")
    requests: int = Field(description="that ended")
    errors: int = Field(description="of these, those that did not end well")
    p50_ms: float | None = Field(description="milliseconds, of whole answers; null: there were none")
    p99_ms: float | None = Field(description="milliseconds, of whole answers; null: there were none")
    tokens: int = Field(description="read and made")
    usd: float = Field(description="US dollars")


class SeriesOut(Body):
    """One task, rule and place. With no backend: requests that got no answer of a place, or a kept one."""

    task: str = Field(description="its name")
    rule: str = Field(description="its name; empty: none took them")
    backend: str = Field(description="its name")
    model: str = Field(description="its name")
    version: str = Field(description="its number; empty: none was named")
    requests: int = Field(description="that ended with its answer")
    errors: int = Field(description="of these, those that did not end well")
    p50_ms: float | None = Field(description="milliseconds, of whole answers; null: there were none")
    p99_ms: float | None = Field(description="milliseconds, of whole answers; null: there were none")
    failed_attempts: int = Field(description="there, whoever answered in the end")
    points: list[int] = Field(description="requests in each step of the window")


class OverviewOut(Body):
    """A window up to `at`."""

    at: str = Field(description="the end of the window: RFC 3339, UTC")
    window_s: int = Field(description="its length in seconds")
    is_stale: bool = Field(description="no worker has told anything for three seconds, or Redis does not answer")
    newest_s: float | None = Field(description="seconds since the newest word of a worker; null: there is none")
    workers: WorkersOut = Field(description="how many")
    requests_per_s: float = Field(description="of the last ten seconds")
    error_ratio: float = Field(description="0 to 1, of all that ended in the window")
    p50_ms: float | None = Field(description="milliseconds, of whole answers; null: there were none")
    p99_ms: float | None = Field(description="milliseconds, of whole answers; null: there were none")
    first_token_p50_ms: float | None = Field(
        description="milliseconds to streamed answers' first parts; null: there were none"
    )
    tokens_per_s: float = Field(description="of the last ten seconds, in and out")
    usd_per_hour: float = Field(description="US dollars, at the pace of the last ten seconds")
    in_flight: int = Field(description="requests at backends now")
    waiting: int = Field(description="before the backends' servers")
    points: list[PointOut] = Field(description="the oldest first")
    by: list[SeriesOut] = Field(description="each task, rule and place, those with the most requests first")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What is known, as of a second that has begun."""

    second: int
    workers: Sequence[WorkerState] = ()
    revision: int = 0
    switches: int = 0


class Live:
    """The figures of the last hour at most, kept here so that only new ones are read, and the workers as seen last.

    What is older than two minutes is kept in steps of five seconds.
    """

    def __init__(
        self, figures: FigureSource, rules: RuleStore | None, *, now_s: Callable[[], float] = time.time
    ) -> None:
        self._figures = figures
        self._rules = rules
        self._now_s = now_s
        self._lock = asyncio.Lock()
        self._seconds: dict[int, Figures] = {}
        self._steps: dict[int, dict[Series, Tally]] = {}
        self._since = self._until = 0
        self._seen: _Seen | None = None
        self._read_s = 0.0

    async def overview(self, window_s: int) -> OverviewOut:
        """The window. Raises `RulesUnavailable` where nothing was ever read."""
        is_fresh = True
        async with self._lock:
            try:
                await self._read(window_s)
            except RulesUnavailable:
                is_fresh = False
                if self._seen is None:
                    raise
        assert self._seen is not None  # noqa: S101 - what was read, now or before
        return _overview(self._seen, self._of_second, window_s, now_s=self._now_s(), is_fresh=is_fresh)

    async def _read(self, window_s: int) -> None:
        now_s = self._now_s()
        second = int(now_s)
        since = _down(second - window_s)
        is_known = self._since <= since <= self._until
        if self._seen is not None and is_known and now_s - self._read_s < AGAIN_S:
            return
        begin = max(since, _down(self._until - SETTLING_S)) if is_known else since
        found = await self._figures.read(begin, second + 1)
        self._seen = await self._look(second)
        if not is_known:
            self._seconds, self._steps, self._since = {}, {}, since
        for old in range(begin, second + 1):
            self._seconds.pop(old, None)
        self._seconds.update(found)
        self._until, self._read_s = second + 1, now_s
        self._fold(_down(second - FINE_S - STEP_S))

    def _fold(self, until: int) -> None:
        """Put seconds before `until` into their steps, and forget what is too old for any window."""
        for old in [old for old in self._seconds if old < until]:
            step = self._steps.setdefault(_down(old), {})
            for series, tally in self._seconds.pop(old).items():
                step.setdefault(series, Tally()).add(tally)
        self._since = max(self._since, _down(self._until - MAX_WINDOW_S - STEP_S))
        for old in [old for old in self._steps if old < self._since]:
            del self._steps[old]

    def _of_second(self, second: int) -> Figures:
        """What ended in it; of what is folded, at the beginning of a step all that ended in the step."""
        return self._seconds.get(second) or self._steps.get(second) or {}

    async def _look(self, second: int) -> _Seen:
        if self._rules is None:
            return _Seen(second=second)
        workers = await self._rules.workers()
        revision, switches = await newest_of(self._rules)
        return _Seen(second=second, workers=workers, revision=revision, switches=switches)


def overview_routes(figures: FigureSource, rules: RuleStore | None) -> APIRouter:
    """`/overview`."""
    router = APIRouter(tags=["overview"])
    live = Live(figures, rules)

    @router.get("/overview")
    async def get_overview(
        window_s: Annotated[int, Query(ge=1, le=MAX_WINDOW_S, description="seconds up to now")] = 300,
    ) -> OverviewOut:
        """What goes on: totals of a window, its course, and each task, rule and place.

        There is a point for every second; in windows above two minutes for every five, up to the last five that are
        over.
        """
        return await live.overview(window_s)

    return router


def _overview(
    seen: _Seen, of_second: Callable[[int], Figures], window_s: int, *, now_s: float, is_fresh: bool
) -> OverviewOut:
    sums = _Sums(of_second, seen.second, window_s)
    reports = [report_of(worker) for worker in seen.workers]
    told_ms = max((report.at_ms for report in reports), default=0)
    newest_s = round(max(0.0, now_s - told_ms / 1000), 3) if told_ms else None
    recent = sums.recent(min(RATE_S, window_s))
    pace_s = min(RATE_S, window_s)
    whole = sums.whole
    return OverviewOut(
        at=instant(seen.second * 1000),
        window_s=window_s,
        is_stale=not is_fresh or newest_s is None or newest_s > STALE_S,
        newest_s=newest_s,
        workers=WorkersOut(
            live=len(seen.workers),
            refused=sum(worker.state == "refused" for worker in seen.workers),
            behind=sum(is_behind(worker, seen.revision, seen.switches) for worker in seen.workers),
        ),
        requests_per_s=round(recent.requests / pace_s, 3),
        error_ratio=whole.errors / whole.requests if whole.requests else 0.0,
        p50_ms=_ms(whole.whole, 0.5),
        p99_ms=_ms(whole.whole, 0.99),
        first_token_p50_ms=_ms(whole.first_token, 0.5),
        tokens_per_s=round((recent.input_tokens + recent.output_tokens) / pace_s, 3),
        usd_per_hour=round(recent.cost_nano_usd / NANO_USD_PER_USD / pace_s * 3600, 6),
        in_flight=sum(sum(report.in_flight.values()) for report in reports),
        waiting=sum(sum(report.waiting.values()) for report in reports),
        points=list(sums.points()),
        by=list(sums.series()),
    )


class _Sums:
    """The sums of one window; the second that is under way, or a step that is not over, is not in it."""

    def __init__(self, of_second: Callable[[int], Figures], now: int, window_s: int) -> None:
        self._step_s = 1 if window_s <= FINE_S else STEP_S
        steps = window_s // self._step_s
        self._now, self._end = now, now if self._step_s == 1 else _down(now)
        self._begin = self._end - steps * self._step_s
        self._of_second = of_second
        self._steps = [Tally() for _ in range(steps)]
        self._series: dict[Series, Tally] = {}
        self._counts: dict[Series, list[int]] = {}
        for second in range(self._begin, self._end):
            for series, tally in of_second(second).items():
                self._add((second - self._begin) // self._step_s, series, tally)
        self.whole = Tally()
        for step in self._steps:
            self.whole.add(step)

    def _add(self, step: int, series: Series, tally: Tally) -> None:
        self._steps[step].add(tally)
        if series not in self._series:
            self._series[series], self._counts[series] = Tally(), [0] * len(self._steps)
        self._series[series].add(tally)
        self._counts[series][step] += tally.requests

    def recent(self, length_s: int) -> Tally:
        """Of the last seconds alone."""
        found = Tally()
        for second in range(self._now - length_s, self._now):
            for tally in self._of_second(second).values():
                found.add(tally)
        return found

    def points(self) -> Iterator[PointOut]:
        """One for each step."""
        for i, step in enumerate(self._steps):
            yield PointOut(
                t=instant((self._begin + i * self._step_s) * 1000),
                requests=step.requests,
                errors=step.errors,
                p50_ms=_ms(step.whole, 0.5),
                p99_ms=_ms(step.whole, 0.99),
                tokens=step.input_tokens + step.output_tokens,
                usd=step.cost_nano_usd / NANO_USD_PER_USD,
            )

    def series(self) -> Iterator[SeriesOut]:
        """Each, those with the most requests first."""
        for series, tally in sorted(self._series.items(), key=lambda one: (-one[1].requests, one[0])):
            yield SeriesOut(
                **series._asdict(),
                requests=tally.requests,
                errors=tally.errors,
                p50_ms=_ms(tally.whole, 0.5),
                p99_ms=_ms(tally.whole, 0.99),
                failed_attempts=tally.failed_attempts,
                points=self._counts[series],
            )


def _down(second: int) -> int:
    """The beginning of its step."""
    return second - second % STEP_S


def _ms(histogram: Mapping[int, int], share: float) -> float | None:
    time_us = percentile_us(histogram, share)
    return None if time_us is None else time_us / 1000
