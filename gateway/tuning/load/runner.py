"""A run: asks at the instants that the traffic says, waits for what is still under way, and tells what came of it."""

import asyncio
import contextlib
import heapq
import itertools
import random
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Final

from gateway.tuning.load.alarm import Alarm
from gateway.tuning.load.asks import AskError
from gateway.tuning.load.outcomes import Outcome, Target
from gateway.tuning.load.statistics import Statistics
from gateway.tuning.report import OK, Percentiles, Report, ServerReport, Tally, class_report, percentiles, timeline
from gateway.tuning.traffic import TrafficClass, arrivals

GRACE_S: Final = 5.0
HURRIED_GRACE_S: Final = 1.0  # of a run that somebody stops
BURST: Final = 16  # requests that are begun in a row where the generator is late, before answers get their turn
FAILED_PAUSE_S: Final = 0.01  # of a caller of a closed loop: refusals come quickly, and must not be all that is done
TICK_S: Final = 0.5
LATE_MS: Final = 0.5  # at p99: what is below is nothing beside any network
LATE_SHARE: Final = 0.05  # of the median latency, the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How a run goes: its instant, and the last `TICK_S` of answers. Latencies are in ms."""

    at_s: float
    whole_s: float
    sent: int
    answered_per_s: float
    failed: int
    in_flight: int
    p50: float | None
    p99: float | None


OnProgress = Callable[[Progress], None]


@dataclass(slots=True, kw_only=True)
class _Lane:
    """One class under way."""

    traffic: TrafficClass
    target: Target
    tally: Tally
    rng: random.Random


@dataclass(slots=True)
class _Seen:
    """What does not belong to a class."""

    late_s: "array[float]" = field(default_factory=lambda: array("d"))
    sent: int = 0
    unsent: int = 0
    answered: int = 0
    failed: int = 0
    repeated: int = 0
    put_off: int = 0
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Who looks on.

    Attributes:
        statistics: what the servers count; where they cannot be seen, a note of the report says so.
        on_progress: told twice a second how it goes.
        stop: set to end the run early: the report is of what was measured.
    """

    statistics: Statistics | None = None
    on_progress: OnProgress | None = None
    stop: asyncio.Event | None = None


async def run(
    target: Target | Sequence[Target],
    classes: Sequence[TrafficClass],
    *,
    duration_s: float,
    warmup_s: float = 0.0,
    seed: int = 0,
    grace_s: float = GRACE_S,
    watch: Watch | None = None,
) -> Report:
    """Offer traffic, wait for the last answers, and tell what came of it.

    Args:
        target: whom all classes ask, or one target for each of them.
        classes: the traffic.
        duration_s: how long it is counted, after `warmup_s` in which it comes all the same.
        warmup_s: see there.
        seed: of the arrivals.
        grace_s: how long answers are waited for at the end; what is under way then is `unfinished`.
        watch: who looks on.
    """
    watch = watch or Watch()
    whole_s = warmup_s + duration_s
    targets = tuple(target) if isinstance(target, Sequence) else (target,) * len(classes)
    lanes = [
        _Lane(
            traffic=traffic,
            target=one,
            tally=Tally(name=traffic.name, slo_ms=traffic.slo_ms, rows=traffic.rows, from_s=warmup_s, until_s=whole_s),
            rng=random.Random(f"{seed} {index} {traffic.name}"),
        )
        for index, (traffic, one) in enumerate(zip(classes, targets, strict=True))
    ]
    notes: list[str] = []
    statistics = await _begun(watch.statistics, notes)
    begun_cpu = time.process_time()
    course = _Run(lanes, whole_s=whole_s, watch=watch)
    ended_s = await course.play(grace_s)
    cpu_s = time.process_time() - begun_cpu
    servers = await _ended(statistics, notes)
    if ended_s < whole_s:
        notes.append(f"stopped after {ended_s:.1f} s of {whole_s:g} s")
    report = _report(lanes, seconds=max(1e-9, min(ended_s, whole_s) - warmup_s))
    late = percentiles([one * 1e3 for one in course.seen.late_s])
    notes += _notes(classes, course.seen, late, p50=report.whole.latency.p50 if report.whole.latency else None)
    generator = _generator(course.seen, late, cpu_s=cpu_s, played_s=course.played_s)
    return replace(report, setting={"generator": generator}, servers=servers, notes=tuple(notes))


def _report(lanes: Sequence[_Lane], *, seconds: float) -> Report:
    tallies = [lane.tally for lane in lanes]
    each = [class_report([one], name=one.name, seconds=seconds) for one in tallies]
    return Report(
        kind="load",
        title="load",
        setting={},
        seconds=seconds,
        whole=class_report(tallies, name="all", seconds=seconds),
        classes=tuple(each) if len(each) > 1 else (),
        timeline=timeline(tallies),
    )


class _Run:
    """One run under way."""

    def __init__(self, lanes: Sequence[_Lane], *, whole_s: float, watch: Watch) -> None:
        self.seen = _Seen()
        self.played_s = 0.0
        self._lanes = lanes
        self._whole_s = whole_s
        self._on_progress = watch.on_progress
        self._stop = watch.stop or asyncio.Event()
        self._start = 0.0
        self._over = asyncio.Event()  # no more is asked
        self._under_way: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        ways = [
            zip(arrivals(lane.traffic, lane.rng, duration_s=whole_s), itertools.repeat(lane))
            for lane in lanes
            if lane.traffic.is_open
        ]
        self._to_come: Iterator[tuple[float, _Lane]] = heapq.merge(*ways, key=itemgetter(0))
        self._next: Sequence[tuple[float, _Lane]] = ()  # is waited for

    async def play(self, grace_s: float) -> float:
        """Run; how many seconds it was until no more was asked."""
        self._start = time.monotonic()
        pacing = asyncio.create_task(self._pace())
        pacing.add_done_callback(self._done)
        for lane in self._lanes:
            for _ in range(lane.traffic.concurrency):
                self._spawn(self._call(lane))
        watching = asyncio.create_task(self._watch())
        ending = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({ending}, timeout=self._whole_s)
            self._over.set()
            ended_s = self._whole_s
            if self._stop.is_set():
                ended_s = min(ended_s, time.monotonic() - self._start)
                await _cancelled([pacing])
            await self._drain({pacing}, grace_s)
        finally:
            await _cancelled([pacing, *self._under_way, ending, watching])
        self.played_s = time.monotonic() - self._start
        if self._failure is not None:
            raise self._failure
        self._count_unsent(ended_s)
        return ended_s

    def _count_unsent(self, ended_s: float) -> None:
        """What was due and never sent, as the generator did not keep up, was due all the same: it is unfinished."""
        for due_s, lane in itertools.chain(self._next, self._to_come):
            if due_s >= ended_s:
                return
            lane.tally.due(due_s)
            self.seen.unsent += 1

    async def _drain(self, pacing: set[asyncio.Task[None]], grace_s: float) -> None:
        """Wait until all is sent and answered, at most so long; a stop cuts it short."""

        async def last_answers() -> None:
            await asyncio.wait(pacing)
            while self._under_way:
                await asyncio.wait(set(self._under_way))

        waiting = asyncio.create_task(last_answers())
        hurry = asyncio.create_task(self._stop.wait())
        await asyncio.wait({waiting, hurry}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if hurry.done() and not waiting.done():
            await asyncio.wait({waiting}, timeout=min(grace_s, HURRIED_GRACE_S))
        await _cancelled([waiting, hurry])

    async def _pace(self) -> None:
        """Begin the requests of all open classes when they are due."""
        in_a_row = 0
        with Alarm() as alarm:
            for due_s, lane in self._to_come:
                due = self._start + due_s
                if time.monotonic() < due:
                    in_a_row = 0
                    self._next = ((due_s, lane),)
                    await alarm.until(due)
                    self._next = ()
                lane.tally.due(due_s)
                self.seen.sent += 1
                self._spawn(self._open(lane, due))
                if (in_a_row := in_a_row + 1) >= BURST:
                    in_a_row = 0
                    await asyncio.sleep(0)

    def _spawn(self, one: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(one)
        self._under_way.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = failure  # a fault of a target's code, not of who is asked
            self._stop.set()

    async def _open(self, lane: _Lane, due: float) -> None:
        self.seen.late_s.append(time.monotonic() - due)
        await self._one(lane, due)

    async def _call(self, lane: _Lane) -> None:
        """A caller of a closed class: asks, waits, thinks."""
        think_s = lane.traffic.think_ms / 1e3
        while not self._over.is_set():
            due = time.monotonic()
            lane.tally.due(due - self._start)
            self.seen.sent += 1
            outcome = await self._one(lane, due)
            pause_s = think_s if outcome.code == OK else max(think_s, FAILED_PAUSE_S)
            if pause_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._over.wait()

    async def _one(self, lane: _Lane, due: float) -> Outcome:
        due_s, seen = due - self._start, self.seen
        outcome = await lane.target.send(due)
        ended_s = (outcome.ended_at or time.monotonic()) - self._start
        lane.tally.ended(due_s, ended_s, outcome.code)
        if outcome.code == OK:
            seen.answered += 1
            seen.repeated += outcome.is_repeated
        else:
            seen.failed += 1
        if outcome.retry_after_s:
            seen.put_off += 1
            seen.retry_after_s = max(seen.retry_after_s, outcome.retry_after_s)
        if outcome.first_token_at and outcome.code == OK:
            lane.tally.streamed(
                due_s,
                first_token_s=outcome.first_token_at - self._start,
                gaps_ms=outcome.gaps_ms,
                tokens=outcome.tokens,
            )
        return outcome

    async def _watch(self) -> None:
        """Tell how it goes, twice a second."""
        known = [0 for _ in self._lanes]
        answered, at = 0, time.monotonic()
        while self._on_progress is not None:
            await asyncio.sleep(TICK_S)
            recent = [ms for lane, n in zip(self._lanes, known, strict=True) for ms in lane.tally.latency_ms[n:]]
            known = [len(lane.tally.latency_ms) for lane in self._lanes]
            now, times = time.monotonic(), percentiles(recent)
            seen = self.seen
            self._on_progress(
                Progress(
                    at_s=now - self._start,
                    whole_s=self._whole_s,
                    sent=seen.sent,
                    answered_per_s=(seen.answered - answered) / (now - at),
                    failed=seen.failed,
                    in_flight=seen.sent - seen.answered - seen.failed,
                    p50=times.p50 if times else None,
                    p99=times.p99 if times else None,
                )
            )
            answered, at = seen.answered, now


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """End tasks, and hear their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _begun(statistics: Statistics | None, notes: list[str]) -> Statistics | None:
    if statistics is not None:
        try:
            await statistics.begin()
        except AskError as error:
            notes.append(f"nothing is known of batches and queues: {error}")
            return None
    return statistics


async def _ended(statistics: Statistics | None, notes: list[str]) -> tuple[ServerReport, ...]:
    if statistics is not None:
        try:
            return tuple(await statistics.end())
        except AskError as error:
            notes.append(f"nothing is known of batches and queues: {error}")
    return ()


def _generator(seen: _Seen, late: Percentiles | None, *, cpu_s: float, played_s: float) -> str:
    each = f", {cpu_s / seen.sent * 1e6:.0f} us a request" if seen.sent else ""
    lateness = f"; sent late by p99 {late.p99:.2f} ms" if late else ""
    return f"{cpu_s / played_s * 100:.0f} % of a core{each}{lateness}"


def _notes(
    classes: Sequence[TrafficClass], seen: _Seen, late: Percentiles | None, *, p50: float | None
) -> Iterator[str]:
    """What a reader has to know."""
    closed = [one.name for one in classes if not one.is_open]
    if closed:
        yield (
            f"closed loop ({', '.join(closed)}): latencies are those of callers who wait; a server that stands still "
            "is asked less meanwhile, and their p99 does not show what others would have met"
        )
    if late and late.p99 > max(LATE_MS, LATE_SHARE * (p50 or 0.0)):
        yield (
            f"the generator was late by p99 {late.p99:.1f} ms: it was the bottleneck, or had no processor in time; "
            "latencies are counted from when requests were due, and have that in them"
        )
    if seen.unsent:
        yield f"{seen.unsent} requests were due and never sent, as the generator did not keep up: they are unfinished"
    if seen.repeated:
        yield f"{seen.repeated} answers had been made for earlier requests (a cache): the servers were spared them"
    if seen.put_off:
        yield (
            f"{seen.put_off} answers asked to come back later (Retry-After, up to {seen.retry_after_s:g} s), "
            "which load does not"
        )
