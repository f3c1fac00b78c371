"""Requests that ended, as documents for the control plane: how each was decided, what became of it, and why.

Nothing of what a caller sent is in them but its names: no input, no answer, no secret, and no words of a backend, which
may repeat what it was sent. Of the headers there are those that rules match on (no rule may match on a secret one).
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

from gateway.core.attempts import CONSEQUENCES
from gateway.core.cost import NANO_USD_PER_USD
from gateway.core.errors import ClientClosed, Fault, FaultKind, RateLimited
from gateway.core.rate_limit import name_of
from gateway.core.routing import Plan
from gateway.core.types import InferenceRequest, Place, Route, Timing, Usage
from gateway.core.watching.counting import candidate_of
from gateway.core.watching.record import RequestRecord

MAX_NAME: Final = 256  # of what a caller may choose freely
_CODE: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_PLAIN: Final = InferenceRequest(id="", task="", caller=None, input=None, received_us=0, deadline_us=0)  # type: ignore[arg-type]  # of a request refused at the door nothing is known
_WELL: Final = ("ok", ClientClosed.code)
_WORDS: Final = {
    FaultKind.NO_SUCH_MODEL: "it has no such model",
    FaultKind.CONTEXT_TOO_LONG: "the prompt does not fit into the model's context",
    FaultKind.REFUSED_INPUT: "it refused the input",
}
"""Where `CONSEQUENCES` leaves the word to the backend."""


class Ended(NamedTuple):
    """What a document is made of, taken out of a record so that the request and its input can be let go.

    Attributes:
        at_ms: when it ended, in Unix milliseconds.
        headers: those that rules match on.
        limit: the one that refused it, in words.
    """

    id: str
    at_ms: int
    task: str
    tenant: str
    key: str
    model: str
    version: str
    priority: str
    stream: bool
    headers: Mapping[str, str]
    input_bytes: int
    input_tokens: int | None
    session: str
    ordering_key: str
    status: int
    code: str
    limit: str
    rule: str
    revision: int
    switches_revision: int
    plan: Plan | None
    faults: tuple[Fault, ...]
    route: Route | None
    timing: Timing | None
    total_us: int
    first_token_us: int | None
    usage: Usage
    recalled: str
    refused_by: str
    trace_id: str


def ended(record: RequestRecord, *, at_ms: int, matched_headers: Collection[str] = ()) -> Ended:
    """What the log keeps of `record`; `matched_headers` are the names, in small letters, that rules match on."""
    request, plan = record.request or _PLAIN, record.plan
    headers = request.headers
    return Ended(
        record.id,
        at_ms,
        record.task,
        record.tenant,
        record.key_id,
        request.model,
        request.version,
        request.priority,
        record.stream,
        {name: headers[name] for name in matched_headers if name in headers} if matched_headers else {},
        request.input_bytes,
        record.usage.input_tokens if record.input_tokens is None else record.input_tokens,
        request.session,
        request.ordering_key,
        record.status,
        record.code,
        _limit(record),
        record.rule or (plan.rule if plan else ""),
        record.revision or (plan.revision if plan else 0),
        record.switches_revision,
        plan,
        record.faults,
        record.route,
        record.timing,
        record.total_us,
        record.first_token_us,
        record.usage,
        record.recalled,
        record.refused_by,
        record.trace.trace_id if record.trace else "",
    )


def document(one: Ended, *, worker: str, stands_for: int = 1) -> dict[str, Any]:
    """It as JSON has it.

    `candidates` are the places of its rule: the `planned` ones in their order, then those that could not be tried;
    `why` says of each of them why it was taken or not, and `notes` what is said of no place. `place` is the one that
    answered, or had it when it ended. `stands_for`: of so many requests of its kind (well ended, or not) it is the one
    that is written.
    """
    place, told = place_of(one), _places(one)
    return {
        "id": one.id,
        "trace_id": one.trace_id,
        "at_ms": one.at_ms,
        "worker": worker,
        "task": one.task[:MAX_NAME],
        "tenant": one.tenant,
        "key": one.key,
        "model": one.model[:MAX_NAME],
        "version": one.version[:MAX_NAME],
        "priority": one.priority,
        "stream": one.stream,
        "headers": {name: value[:MAX_NAME] for name, value in one.headers.items()},
        "input_bytes": one.input_bytes,
        "input_tokens": one.input_tokens,
        "session": one.session[:MAX_NAME],
        "ordering_key": one.ordering_key[:MAX_NAME],
        "status": one.status,
        "code": one.code,
        "rule": one.rule,
        "revision": one.revision,
        "switches_revision": one.switches_revision,
        "place": _name(place) if place else "",
        "attempts": one.route.attempts if one.route else len(one.faults),
        "total_ms": one.total_us / 1000,
        "backend_ms": one.timing.backend_us / 1000 if one.timing else 0.0,
        "queue_ms": _ms(one.timing.queue_us) if one.timing else None,
        "first_token_ms": _ms(one.first_token_us),
        "usage": {
            "input_tokens": one.usage.input_tokens,
            "output_tokens": one.usage.output_tokens,
            "cost_usd": None if one.usage.cost_nano_usd is None else one.usage.cost_nano_usd / NANO_USD_PER_USD,
        },
        "recalled": one.recalled,
        "planned": len(one.plan.candidates) if one.plan else 0,
        "candidates": [_name(candidate) for candidate, _ in told],
        "why": [why for _, why in told],
        "notes": list(_notes(one)),
        "stands_for": stands_for,
    }


def place_of(one: Ended) -> Place | None:
    """Where it was answered, or was under way when it ended; as its rule names it, where that is known."""
    route = one.route
    if route is None:
        return None
    planned = candidate_of(one.plan, route) if one.plan else None
    return planned or Place(backend=route.backend, model=route.model, version=route.version, replica=route.replica)


def _notes(one: Ended) -> Iterator[str]:
    """Why it went where it went, or nowhere, as far as no place is the reason."""
    if one.refused_by:
        yield f"refused by {one.refused_by}"
    if one.limit:
        yield f"refused by the limit of {one.limit}"
    if one.recalled in ("replayed", "hit", "collapsed"):
        yield f"an answer that was kept was given again ({one.recalled})"
    if one.plan is not None and not one.plan.rule:
        yield "no enabled rule takes it"
    if one.plan is not None and one.plan.forced is not None:
        yield f"sent where {', '.join(one.plan.forced.by)} says"


def _places(one: Ended) -> list[tuple[Place, str]]:
    """The planned places and the refused ones, each with its reason."""
    plan = one.plan
    if plan is None:
        return []
    place, faults = place_of(one), dict[Place | None, list[str]]()
    for fault in one.faults:
        faults.setdefault(fault.place, []).append(_told(fault))
    left = "not needed" if place and one.code in _WELL else "not tried"
    told = []
    for rank, candidate in enumerate(plan.candidates):
        words = faults.get(candidate, [])
        if candidate == place and not (words and one.code not in _WELL):
            words = [*words, _standing(rank, len(plan.candidates), has_failed=bool(one.faults))]
        told.append((candidate, "; ".join(words) or left))
    return [*told, *plan.refusals]


def _standing(rank: int, of: int, *, has_failed: bool) -> str:
    """Why the one that was taken was."""
    if rank == 0:
        return f"taken: the first of {of}" if of > 1 else "taken: the only one that could be tried"
    return f"taken: number {rank + 1} of {of}, as " + ("others failed before" if has_failed else "it began first")


def _told(fault: Fault) -> str:
    """A failed attempt, in the gateway's own words and the upstream's code."""
    if fault.kind is FaultKind.SKIPPED:  # why it was out of order is ours to say
        return f"skipped: {fault.message}"
    words = _WORDS.get(fault.kind) or CONSEQUENCES[fault.kind].detail or "it failed"
    code = f" ({fault.code})" if fault.code and _CODE.fullmatch(fault.code) else ""
    return f"attempt failed: {fault.kind.value}: {words}{code}"


def _limit(record: RequestRecord) -> str:
    error = record.error
    if error is None or error.code != RateLimited.code or error.verdict is None or error.verdict.refused_by is None:
        return ""
    return name_of(error.verdict.refused_by.limit)


def _name(place: Place) -> str:
    return str(place)[:MAX_NAME]


def _ms(time_us: int | None) -> float | None:
    return None if time_us is None else time_us / 1000
