"""How one request is counted: at which place, as what."""

from collections.abc import Callable
from typing import Final

from gateway.core.errors import ClientClosed, Fault, FaultKind
from gateway.core.routing import Plan
from gateway.core.types import NOTHING_USED, Place, Route
from gateway.core.watching.figures import Series, Tally, step_of
from gateway.core.watching.record import RequestRecord

NOT_SENT: Final = frozenset((FaultKind.SKIPPED, FaultKind.UNSUPPORTED, FaultKind.NO_SUCH_MODEL))
"""No attempts: the place was never asked, or could not be. The last has a name of the caller's own invention, too."""
OF_CALLERS: Final = frozenset((FaultKind.REFUSED_INPUT, FaultKind.CONTEXT_TOO_LONG))
"""Attempts that ended for what the caller had sent: a place does not fail by them."""
VIOLATIONS: Final = frozenset((FaultKind.BROKEN, FaultKind.MISFIT))


def series_at(task: str, rule: str, place: Place | None) -> Series:
    """The series of a place as its rule names it: without its replica, with the version that the rule says."""
    if place is None:
        return Series(task, rule, "", "", "")
    return Series(task, rule, place.backend, place.model, place.version)


def answered_at(record: RequestRecord) -> Place | None:
    """The place, as the plan has it, that answered or had the request when it ended; None where there is none.

    A model whose name a caller may have made up is none: who leaves early must not write it into the books.
    """
    route, request = record.route, record.request
    if route is None or record.plan is None:
        return None
    if record.error is not None and request is not None and request.model and record.usage == NOTHING_USED:
        return None
    return candidate_of(record.plan, route)


def candidate_of(plan: Plan, route: Route) -> Place | None:
    """The candidate that became `route`, in which the server has named its version."""
    for place in plan.candidates:
        is_there = place.backend == route.backend and place.model == route.model and place.replica == route.replica
        if is_there and place.version in ("", route.version):
            return place
    return None


def count(record: RequestRecord, tally_of: Callable[[Series], Tally]) -> None:
    """Count `record` into the tallies that it concerns.

    The times of a request at which other places failed before are nobody's own: they stand in the series without a
    place, so that no place has to answer for the others' slowness.
    """
    task, rule = record.task, record.rule or (record.plan.rule if record.plan else "")
    place, error, usage = answered_at(record), record.error, record.usage
    tally = tally_of(series_at(task, rule, place))
    tally.requests += 1
    tally.input_tokens += usage.input_tokens or 0
    tally.output_tokens += usage.output_tokens or 0
    tally.cost_nano_usd += usage.cost_nano_usd or 0
    if error is not None and error.code != ClientClosed.code:
        tally.errors += 1
    if record.faults:
        _count_faults(record, rule, tally_of)
    if place is not None and _is_last_attempt_open(record, place):
        tally.attempts += 1
    if error is None:
        timed = tally_of(series_at(task, rule, None)) if record.faults else tally
        step = step_of(record.total_us)
        timed.whole[step] = timed.whole.get(step, 0) + 1
        if record.first_token_us is not None:
            step = step_of(record.first_token_us)
            timed.first_token[step] = timed.first_token.get(step, 0) + 1


def _count_faults(record: RequestRecord, rule: str, tally_of: Callable[[Series], Tally]) -> None:
    for fault in record.faults:
        if fault.place is None or fault.kind in NOT_SENT:
            continue
        tally = tally_of(series_at(record.task, rule, fault.place))
        tally.attempts += 1
        if is_failure(fault):
            tally.failed_attempts += 1
            tally.violations += fault.kind in VIOLATIONS


def is_failure(fault: Fault) -> bool:
    """Whether the place could not do what it was asked, whoever is to blame for that but the caller."""
    return fault.kind not in NOT_SENT and fault.kind not in OF_CALLERS


def _is_last_attempt_open(record: RequestRecord, place: Place) -> bool:
    """Whether the attempt at `place` is not among the faults: it answered, or was under way when the request ended."""
    if record.error is None or record.error.code == ClientClosed.code or not record.faults:
        return True
    return record.faults[-1].place != place
