"""Shadows: copies of answered requests, sent to another place to see what it would have answered.

A caller never waits for a shadow, pays for one, or hears of one: its copy is sent once the request is over, with time
of its own, and takes of no limit, order, or stored answer. Real requests come first: a copy is sent only where the
server has a free place now, and gives that place up as soon as a real request would have to wait for it.

Breakers for real requests hear nothing of copies. Shadows have breakers of their own, so that a shadow that is down is
tried now and then instead of with every copy; and they keep away from what is shut for real requests.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from gateway.attempt import Attempt, Task
from gateway.attempt import Plane as AttemptPlane
from gateway.core.attempts import Try
from gateway.core.breaker import BreakerBoard
from gateway.core.errors import BackendError, GatewayError, InternalError
from gateway.core.recording import weight
from gateway.core.replicas import Draw
from gateway.core.routing import Plan
from gateway.core.rules import Rule, Shadow
from gateway.core.shadows import comparison
from gateway.core.shadows.comparison import Comparison
from gateway.core.shadows.shadow_reports import Pair, ShadowResult
from gateway.core.types import ANY, InferenceRequest, Part, Place, Route, Timing, Usage
from gateway.core.watching import counting
from gateway.core.watching.figures import Series
from gateway.ports import Clock, ShadowResults

MOST_AT_ONCE: Final = 16  # of one worker
MAX_KEPT_BYTES: Final = 2**20  # of an answer; a longer one is not compared
MOST_KEPT: Final = 64  # answers at once that are kept to be compared: of more only copies are sent
GRACE_S: Final = 1.0  # after the time that its backend had, for one that does not keep to it

_log = logging.getLogger(__name__)


class Plane(AttemptPlane, Protocol):
    """What a shadow needs of the pipeline whose requests it copies."""

    @property
    def tasks(self) -> Mapping[str, Task]:
        """By name."""
        ...

    @property
    def draw(self) -> Draw:
        """Chance."""
        ...

    @property
    def wall_clock(self) -> Clock:
        """Unix time in microseconds."""
        ...

    def why_not(self, place: Place) -> str | None:
        """None where a real request may be sent to `place` now, else the reason: a breaker, a switch."""
        ...

    def is_refused(self, request: InferenceRequest) -> bool:
        """Whether a switch keeps such a request from being served now."""
        ...


class Compared(Protocol):
    """Hears that an answer of a series' place was held against its shadow's."""

    def __call__(self, series: Series, *, agreed: bool) -> None:
        """Never waits, never raises."""
        ...


@dataclass(slots=True)
class _Kept:
    """The parts of an answer, as long as they are not too many; then none at all."""

    parts: list[Part] | None = field(default_factory=list)
    size: int = 0

    def add(self, part: Part) -> None:
        """One more."""
        if self.parts is None:
            return
        self.size += weight(part)
        if self.size > MAX_KEPT_BYTES:
            self.parts = None
        else:
            self.parts.append(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Real:
    """How the request itself went. `place`: where it was answered, as its rule names that."""

    place: Place
    timing: Timing
    usage: Usage


@dataclass(slots=True, kw_only=True, eq=False)
class Copy:
    """One request that is to be copied. The walk tells it what it answers, and when it is over.

    Attributes:
        kept / is_kept: what it was answered, where that is to be compared.
        place: where the copy goes; a replica is chosen when it is sent.
        is_at_gate / gives_way: it has a place at its server; it is being taken back.
    """

    of: "Shadows"
    on: Plane
    request: InferenceRequest
    rule: str
    kept: _Kept
    is_kept: bool
    place: Place
    is_at_gate: bool = False
    gives_way: bool = False

    def seen(self, part: Part) -> None:
        """A part has come from the place that answers."""
        self.kept.add(part)

    def ended(
        self, *, route: Route | None, plan: Plan | None, timing: Timing, usage: Usage, error: GatewayError | None
    ) -> None:
        """The request is over; where it was answered well, its copy is sent now. Never waits, never raises."""
        self.of.over(self)
        if error is None and route is not None and plan is not None:
            found = counting.candidate_of(plan, route) or Place(backend=route.backend, model=route.model)
            self.of.begin(self, _Real(place=replace(found, replica=""), timing=timing, usage=usage))


class Shadows:
    """The copies of one worker.

    Args:
        has_room: whether a request to a place would be sent at once, its server having a free place.
        results: hears what became of each.
        compared: hears of each comparison.

    Attributes:
        skipped: how many copies were not sent, or taken back, so far.
    """

    def __init__(
        self,
        *,
        has_room: Callable[[Place], bool],
        results: ShadowResults | None = None,
        compared: Compared | None = None,
    ) -> None:
        self._has_room = has_room
        self._results = results
        self._compared = compared
        self._board = BreakerBoard()
        self._under_way: dict[asyncio.Task[None], Copy] = {}
        self._kept = 0
        self._is_closed = False
        self.skipped = 0

    @property
    def in_flight(self) -> int:
        """How many are under way."""
        return len(self._under_way)

    def at_servers(self) -> Iterator[Copy]:
        """Those that are at the server of their `place` now."""
        return (copy for copy in self._under_way.values() if copy.is_at_gate)

    def watch(self, request: InferenceRequest, rule: Rule | None, plan: Plan, *, on: Plane) -> Copy | None:
        """A real request goes where `plan` says: room is made for it, and chance says whether it is copied.

        Steps of sequences are not: what a model answers to one depends on those before.
        """
        if self._under_way:
            self._make_way(plan.candidates)
        shadow = rule.shadow if rule else None
        if rule is None or shadow is None or request.sequence is not None:
            return None
        if on.tasks[request.task].contract.is_sequence or on.draw() * 100 >= shadow.percent:
            return None
        is_kept = shadow.compare and self._kept < MOST_KEPT
        self._kept += is_kept
        return Copy(
            of=self,
            on=on,
            request=request,
            rule=rule.name,
            kept=_Kept() if is_kept else _Kept(parts=None),
            is_kept=is_kept,
            place=_place(shadow, request),
        )

    def over(self, copy: Copy) -> None:
        """The request of a copy is over: another answer may be kept."""
        self._kept -= copy.is_kept

    def begin(self, copy: Copy, real: _Real) -> None:
        """Send a copy, or skip it. Never waits, never raises."""
        if self._is_closed:
            return
        try:
            place = self._open_place(copy) if len(self._under_way) < MOST_AT_ONCE else None
        except Exception:  # noqa: BLE001 - the request itself has gone well, and must not fail for this
            _log.exception("shadow_broke", extra={"rule": copy.rule, "place": str(copy.place)})
            return
        if place is None:
            self._skip(copy, real)
            return
        copy.place = place
        task = asyncio.create_task(self._supervised(copy, real), name="shadow")
        self._under_way[task] = copy
        task.add_done_callback(self._under_way.pop)

    async def close(self) -> None:
        """Take back what is under way; nothing more is sent."""
        self._is_closed = True
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- where ----------------------------------------------------------------------------------

    def _open_place(self, copy: Copy) -> Place | None:
        """The replica with the least to do of those that can take a copy now."""
        backend = copy.on.backends.get(copy.place.backend)
        if backend is None or not copy.place.model:
            return None
        places = [replace(copy.place, replica=name) for name in backend.replicas()] or [copy.place]
        gate = copy.on.gates[copy.place.backend]
        can = [place for place in places if self._is_open(place, copy)]
        return min(can, key=lambda place: gate.load(place.replica), default=None)

    def _is_open(self, place: Place, copy: Copy) -> bool:
        on = copy.on
        is_shut = on.is_refused(copy.request) or on.why_not(place) or self._board.why_not(place, on.clock())
        return not is_shut and self._has_room(place)

    def _make_way(self, places: Sequence[Place]) -> None:
        """At each of these servers that is full, the newest copy gives up its place."""
        servers = {(place.backend, place.replica): place for place in places}
        for server, place in servers.items():
            for task, copy in reversed(self._under_way.items()):
                is_there = copy.is_at_gate and (copy.place.backend, copy.place.replica) == server
                if is_there and not copy.gives_way and not self._has_room(place):
                    copy.gives_way = True
                    task.cancel()
                    break

    # --- a copy ---------------------------------------------------------------------------------

    async def _supervised(self, copy: Copy, real: _Real) -> None:
        try:
            # Between then and now others may have taken the place: from here to the gate nothing is waited for.
            if self._is_open(copy.place, copy):
                await self._sent(copy, real)
            else:
                self._skip(copy, real)
        except asyncio.CancelledError:
            if not copy.gives_way:
                raise
            self._skip(copy, real)
        except Exception:  # noqa: BLE001 - the boundary of the copy: no fault of it is the caller's
            _log.exception("shadow_broke", extra={"rule": copy.rule, "place": str(copy.place)})
            self._tell(copy, real, outcome="failed", failure=InternalError.code)

    async def _sent(self, copy: Copy, real: _Real) -> None:
        attempt = self._attempt(copy)
        answer = _Kept() if copy.kept.parts else _Kept(parts=None)
        failure = ""
        copy.is_at_gate = True
        try:
            async with asyncio.timeout(attempt.step.timeout_us / 1e6 + GRACE_S), aclosing(attempt.answers()) as parts:
                async for part in parts:
                    answer.add(part)
        except BackendError as failed:
            failure = failed.fault.kind.value
        except GatewayError as refused:  # by the task's contract, which reads the answer
            failure = refused.code
        except TimeoutError:
            failure = "timeout"
        finally:
            copy.is_at_gate = False
        compared = None if failure else await _compared(copy.kept.parts, answer.parts)
        if compared is not None and compared.agreed is not None and self._compared is not None:
            series = counting.series_at(copy.request.task, copy.rule, real.place)
            self._compared(series, agreed=compared.agreed)
        self._tell(
            copy,
            real,
            outcome="failed" if failure else "answered",
            failure=failure,
            comparison=compared,
            real_us=real.timing.backend_us,
            shadow_us=attempt.backend_us,
            real_nano_usd=real.usage.cost_nano_usd,
            shadow_nano_usd=attempt.usage.cost_nano_usd,
        )

    def _attempt(self, copy: Copy) -> Attempt:
        """The copy at its place: nothing in it but what was asked, and nothing of what the request was held to."""
        on, now_us = copy.on, copy.on.clock()
        task = on.tasks[copy.request.task]
        request = replace(
            copy.request,
            id=f"{copy.request.id}-shadow",
            received_us=now_us,
            deadline_us=now_us + task.timeout_us,
            priority="batch",
            ordering_key="",
            idempotency_key="",
            fingerprint="",
            headers={},
            trace=None,
        )
        return Attempt(
            request=request,
            task=task,
            plan=Plan(rule=copy.rule, revision=0, candidates=(copy.place,)),
            step=Try(place=copy.place, begin_within_us=task.timeout_us, timeout_us=task.timeout_us),
            on=on,
            board=self._board,
        )

    def _skip(self, copy: Copy, real: _Real) -> None:
        self.skipped += 1
        self._tell(copy, real, outcome="skipped")

    def _tell(self, copy: Copy, real: _Real, **told: Any) -> None:
        """`told` are the fields of a `ShadowResult` that the copy and its request do not have."""
        if self._results is not None:
            pair = Pair(copy.request.task, str(real.place), str(replace(copy.place, replica="")))
            at_ms = copy.on.wall_clock() // 1000
            self._results.told(ShadowResult(request_id=copy.request.id, rule=copy.rule, pair=pair, at_ms=at_ms, **told))


def _place(shadow: Shadow, request: InferenceRequest) -> Place:
    """Where copies of `request` go. A version that the caller names is one of the model that it names."""
    if shadow.model != ANY:
        return shadow.place
    return replace(shadow.place, model=request.model, version=shadow.version or request.version)


async def _compared(real: Sequence[Part] | None, shadow: Sequence[Part] | None) -> Comparison | None:
    """None where one of them was not kept. Each step takes a few milliseconds, and others have their turn between."""
    if not real or not shadow:
        return None
    read = comparison.reading(real)
    await asyncio.sleep(0)
    other = comparison.reading(shadow)
    await asyncio.sleep(0)
    return comparison.compare(read, other)
