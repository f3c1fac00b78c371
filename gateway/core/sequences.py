"""Sequences: which server keeps the state of which, under which number, and when that has come to an end.

A sequence belongs to an owner: a tenant, its task and model, and the id that it chose. It is pinned to the replica that
its first request went to. The server knows it by a number, which no other owner may use on the same model while a
request under it can still be under way: two owners never meet in one state.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.core.breaker import BreakerBoard, server_of
from gateway.core.errors import Fault, FaultKind, Reply, SequenceLost, SequenceUnknown
from gateway.core.routing import Plan
from gateway.core.types import InferenceRequest, Place

TRIES = 8  # numbers to try; with 64 bits the second is needed only where two owners chose the same id
START_FLAG = "must specify the START flag"  # Triton, of a sequence that it does not know
# Where the state is no more: the process that kept it is gone, or the model was unloaded.
_GONE = frozenset({FaultKind.UNAVAILABLE, FaultKind.DEAD, FaultKind.UNKNOWN_MODEL, FaultKind.NO_SUCH_MODEL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Where a sequence lives.

    Attributes:
        place: the replica, with the version that it began on.
        number: its correlation id there.
        idle_us: how long the model keeps the state of a silent sequence.
        silent_us: how long nothing had been heard of it, when it was looked up.
        is_lost: it has lived there: the state is gone.
    """

    place: Place
    number: int
    idle_us: int
    silent_us: int = 0
    is_lost: bool = False


# --- decisions ----------------------------------------------------------------------------------


def owner(request: InferenceRequest) -> str:
    """Whose sequence it is, as 32 hexadecimal digits. The ids 42 and "42" are two."""
    chosen = request.sequence.id if request.sequence else None
    named = json.dumps([request.caller.tenant, request.task, request.model, chosen])
    return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()


def numbers(chosen: int | str, owner_: str, *, bits: int) -> tuple[int, ...]:
    """The numbers to try for a sequence, best first, each from 1 to 2^bits - 1 (0 means no sequence to Triton).

    The caller's own comes first where it is one and fits; the others are hashes. Triton itself would cut a text down to
    its first four characters for a model that takes the number as an input.
    """
    highest = 2**bits - 1
    own = (chosen,) if isinstance(chosen, int) and 0 < chosen <= highest else ()
    return (*own, *(_hashed(f"{owner_}:{salt}", highest) for salt in range(TRIES - len(own))))


def _hashed(text: str, highest: int) -> int:
    return 1 + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % highest


def is_over(fault: Fault) -> bool:
    """Whether a request's failure means that its sequence's state is gone.

    A time-out, a full queue or an error of the model is the request's alone.
    """
    return fault.is_server or fault.kind in _GONE or is_unknown_there(fault)


def is_unknown_there(fault: Fault) -> bool:
    """Whether the server does not know the sequence: it was started anew, or the sequence was silent for too long."""
    return START_FLAG in (fault.reply.text if fault.reply else fault.message)


def is_gone(board: BreakerBoard, place: Place) -> bool:
    """Whether health knows that what `place` kept is gone, and not merely that it works badly now."""
    kinds = {kind.value for kind in _GONE}
    known = (board.of(one) for one in (server_of(place), place, replace(place, version="")))
    return any(b.open_until_us is not None and (b.is_away or b.reason in kinds) for b in known)


def preferring(plan: Plan, place: Place) -> Plan:
    """The plan with `place` first, where it already leads to another replica of the same."""
    first = plan.candidates[0] if plan.candidates else None
    if first is None or replace(first, version="", replica="") != replace(place, version="", replica=""):
        return plan
    if first.version not in ("", place.version):
        return plan
    chosen = replace(first, replica=place.replica)
    return replace(plan, candidates=(chosen, *(other for other in plan.candidates if other != chosen)))


def unknown(request: InferenceRequest, model: str) -> SequenceUnknown:
    """The refusal of a request that goes on with nothing, in Triton's own words."""
    chosen = request.sequence.id if request.sequence else ""
    text = (
        f"inference request for sequence {chosen} to model '{model}' must specify the START flag on the first request "
        "of the sequence"
    )
    error = SequenceUnknown(text)
    error.reply = Reply(code="INVALID_ARGUMENT", text=text)
    return error


def lost() -> SequenceLost:
    """The refusal of a request whose sequence's state is gone."""
    return SequenceLost("the server that kept this sequence is gone, and its state with it: start a new sequence")


# --- the table ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Row:
    pin: Pin
    seen_us: int
    until_us: int


@dataclass(slots=True)
class _Claim:
    owner: str
    until_us: int


class Pins:
    """All pins and all numbers in use: what a store holds, given the time. The Lua files do the same inside Redis.

    Pins and numbers live until the model's idle time after the last moment at which a request under them may be under
    way; `for_us` is how long that of the caller may be.
    """

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._claims: dict[tuple[str, str, int], _Claim] = {}

    def __len__(self) -> int:
        return len(self._rows) + len(self._claims)

    def find(self, owner_: str, *, for_us: int, now_us: int) -> Pin | None:
        """The pin of an owner, its lease renewed."""
        row = self._rows.get(owner_)
        if row is None or row.until_us <= now_us:
            return None
        found = replace(row.pin, silent_us=now_us - row.seen_us)
        row.seen_us, row.until_us = now_us, max(row.until_us, now_us + for_us + row.pin.idle_us)
        claim = self._claims.get(_place_of_number(row.pin.place, row.pin.number))
        if claim is not None and claim.owner == owner_:
            claim.until_us = max(claim.until_us, row.until_us)
        return found

    def pin(
        self, owner_: str, place: Place, tried: Sequence[int], *, idle_us: int, for_us: int, now_us: int
    ) -> int | None:
        """Pin an owner's new sequence to `place` under the first of the numbers that is its own already, or free.

        None, and nothing is changed, where all are others'.
        """
        until_us = now_us + for_us + idle_us
        claims = {number: self._claim(place, number, now_us) for number in tried}
        its_own = (n for n, claim in claims.items() if claim is not None and claim.owner == owner_)
        number = next(its_own, None) or next((n for n, claim in claims.items() if claim is None), None)
        if number is None:
            return None
        claim = claims[number]
        claim_until_us = until_us if claim is None else max(claim.until_us, until_us)
        self._claims[_place_of_number(place, number)] = _Claim(owner_, claim_until_us)
        self._rows[owner_] = _Row(Pin(place=place, number=number, idle_us=idle_us), now_us, until_us)
        return number

    def lose(self, owner_: str, pin: Pin, *, now_us: int) -> None:
        """The state is gone: what comes for it until a new start shall hear so. Nothing where it lives elsewhere."""
        row = self._same(owner_, pin, now_us)
        if row is not None:
            row.pin = replace(row.pin, is_lost=True)

    def end(self, owner_: str, pin: Pin, *, now_us: int) -> None:
        """It has ended. Its number stays its owner's until no late request can be under way with it any more."""
        if self._same(owner_, pin, now_us) is not None:
            del self._rows[owner_]

    def sweep(self, now_us: int) -> None:
        """Forget what is past."""
        self._rows = {key: row for key, row in self._rows.items() if row.until_us > now_us}
        self._claims = {key: claim for key, claim in self._claims.items() if claim.until_us > now_us}

    def _claim(self, place: Place, number: int, now_us: int) -> _Claim | None:
        claim = self._claims.get(_place_of_number(place, number))
        return None if claim is None or claim.until_us <= now_us else claim

    def _same(self, owner_: str, pin: Pin, now_us: int) -> _Row | None:
        row = self._rows.get(owner_)
        is_it = row is not None and (row.pin.place, row.pin.number) == (pin.place, pin.number)
        return row if row is not None and is_it and row.until_us > now_us else None


def _place_of_number(place: Place, number: int) -> tuple[str, str, int]:
    """Numbers are unique within a backend's model, on all its replicas: a sequence may be started anew on another."""
    return (place.backend, place.model, number)
