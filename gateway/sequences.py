"""Sequences stay with the replica that keeps their state: `ports.Sequences` over a `SequenceStore`.

The first request of a sequence goes where any request would, and pins it there. The others follow their pin and nothing
else: they are never tried elsewhere, and rules that have changed meanwhile concern sequences that are yet to begin.
Where what kept the state is gone, the sequence is lost, and says so until it is started anew.

Models that keep no state take such requests as any other: Triton ignores the parameters there, and so do we.
"""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace

from gateway.core import sequences
from gateway.core.breaker import BreakerBoard, server_of
from gateway.core.errors import BackendError, Fault, FaultKind, SequencesUnavailable
from gateway.core.models import ModelFacts
from gateway.core.routing import Plan, only
from gateway.core.sequences import Pin
from gateway.core.types import InferenceRequest, Place, SequenceStep
from gateway.ports import Backend, Clock, KnowsModels, SequenceStore

MAX_FOUND = 10_000  # pins remembered from a request's route to its sending; about 5 MB

_log = logging.getLogger(__name__)


class PinnedSequences:
    """`Sequences` over a store.

    Args:
        store: shared by all workers, or there is but one.
        backends / board: where requests can go, and how these places are.
        clock: the process's own, by which requests have their deadlines.
    """

    def __init__(
        self, store: SequenceStore, backends: Mapping[str, Backend], *, board: BreakerBoard, clock: Clock
    ) -> None:
        self._store = store
        self._backends = backends
        self._board = board
        self._clock = clock
        # What the store said last, so that one round trip does for a request: `route` asks, `bind` needs it too.
        self._found: dict[str, Pin] = {}

    async def route(self, request: InferenceRequest, plan: Plan) -> Plan:
        """See `ports.Sequences`. A start goes where the sequence lived before, if the plan leads there at all."""
        step = _step(request)
        if step is None:
            return plan
        owner = sequences.owner(request)
        pin = await self._store.find(owner, for_us=self._left_us(request))
        self._remember(owner, pin)
        if pin is None:
            return plan  # `bind` knows whether the model keeps state at all
        if step.is_start:
            can_stay = not pin.is_lost and self._why_not(pin.place) is None
            return sequences.preferring(plan, pin.place) if can_stay else plan
        if pin.is_lost:
            raise sequences.lost()
        if pin.place.backend not in self._backends or sequences.is_gone(self._board, pin.place):
            await self._lose(owner, pin, "known to be away")
            raise sequences.lost()
        reason = self._why_not(pin.place)
        if reason is not None:  # it works badly now, but the state may well be there
            return replace(plan, candidates=(), refusals=((pin.place, reason),))
        return only(plan, pin.place)

    async def bind(self, request: InferenceRequest, place: Place) -> SequenceStep:
        """See `ports.Sequences`."""
        step = _step(request)
        if step is None:
            return request.sequence or SequenceStep(id=0)
        owner = sequences.owner(request)
        pin = self._found.get(owner)
        if not step.is_start and pin is not None and pin.place == place:
            return replace(step, id=pin.number)
        facts = await self._facts(place)
        if facts is None or not facts.is_sequence:
            if step.is_start and pin is not None:  # what comes next must not go on with an older one
                await self._end(owner, pin)
            return replace(step, id=sequences.numbers(step.id, owner, bits=64)[0])
        if step.is_start:
            return replace(step, id=await self._start(request, owner, place, facts))
        pin = await self._store.find(owner, for_us=self._left_us(request))  # the rare case that it was crowded out
        if pin is None or pin.is_lost or pin.place != place:
            raise sequences.unknown(request, place.model)
        return replace(step, id=pin.number)

    async def failed(self, request: InferenceRequest, place: Place, fault: Fault) -> None:
        """See `ports.Sequences`."""
        step = _step(request)
        if step is None or not sequences.is_over(fault):
            return
        owner = sequences.owner(request)
        pin = self._found.pop(owner, None)
        if pin is None or server_of(pin.place) != server_of(place):
            return
        if step.is_start:  # its caller hears that it did not begin, or it begins elsewhere
            await self._end(owner, pin)
        elif sequences.is_unknown_there(fault) and pin.silent_us > pin.idle_us:
            await self._end(owner, pin)  # nothing was lost: it has been silent for longer than the model waits
            raise sequences.unknown(request, place.model)
        else:
            await self._lose(owner, pin, fault.kind.value)
            raise sequences.lost()

    async def answered(self, request: InferenceRequest, *, version: str) -> None:
        """See `ports.Sequences`."""
        step = _step(request)
        if step is None or not (step.is_start or step.is_end):
            return
        owner = sequences.owner(request)
        pin = self._found.get(owner)
        if pin is None:
            return
        if step.is_end:
            del self._found[owner]
            await self._end(owner, pin)
        elif version and not pin.place.version:  # its state is that version's, whatever becomes the newest
            pin = replace(pin, place=replace(pin.place, version=version))
            with contextlib.suppress(SequencesUnavailable):
                left_us = self._left_us(request)
                await self._store.pin(owner, pin.place, (pin.number,), idle_us=pin.idle_us, for_us=left_us)
                self._remember(owner, pin)

    async def _start(self, request: InferenceRequest, owner: str, place: Place, facts: ModelFacts) -> int:
        """Pin the sequence to `place`; its number there."""
        step = _step(request)
        tried = sequences.numbers(step.id if step else 0, owner, bits=facts.correlation_bits)
        for_us = self._left_us(request)
        number = await self._store.pin(owner, place, tried, idle_us=facts.sequence_idle_us, for_us=for_us)
        if number is None:
            raise BackendError(Fault(kind=FaultKind.OVERLOADED, message="no correlation id of the model is free"))
        self._remember(owner, Pin(place=place, number=number, idle_us=facts.sequence_idle_us))
        return number

    async def _facts(self, place: Place) -> ModelFacts | None:
        """None where it is no server of models that is asked, so that there are no sequences either."""
        backend = self._backends.get(place.backend)
        return await backend.facts(place) if isinstance(backend, KnowsModels) else None

    def _remember(self, owner: str, pin: Pin | None) -> None:
        self._found.pop(owner, None)
        if pin is not None:
            self._found[owner] = pin
            if len(self._found) > MAX_FOUND:
                del self._found[next(iter(self._found))]

    def _why_not(self, place: Place) -> str | None:
        now_us = self._clock()
        return self._board.why_not(place, now_us) or self._board.why_not(replace(place, version=""), now_us)

    def _left_us(self, request: InferenceRequest) -> int:
        return max(0, request.deadline_us - self._clock())

    async def _lose(self, owner: str, pin: Pin, why: str) -> None:
        """Tell the other workers too; what the caller hears does not depend on it."""
        _log.warning("sequence_lost", extra={"place": str(pin.place), "reason": why})
        self._found.pop(owner, None)
        with contextlib.suppress(SequencesUnavailable):
            await self._store.lose(owner, pin)

    async def _end(self, owner: str, pin: Pin) -> None:
        """It expires by itself where the store cannot be told."""
        with contextlib.suppress(SequencesUnavailable):
            await self._store.end(owner, pin)


def _step(request: InferenceRequest) -> SequenceStep | None:
    """The request's step in a sequence; None without an id (to Triton 0 and the empty text are none)."""
    return request.sequence if request.sequence is not None and request.sequence.id else None
