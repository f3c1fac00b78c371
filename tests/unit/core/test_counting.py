"""How one request is counted."""

from collections import defaultdict
from dataclasses import replace

import pytest

from gateway.core.errors import BackendBroke, ClientClosed, FaultKind, NoHealthyBackend, RateLimited
from gateway.core.types import NOTHING_USED
from gateway.core.watching.counting import count, series_at
from gateway.core.watching.figures import COUNTS, Series, Tally, percentile_us
from gateway.core.watching.record import RequestRecord
from tests.kit.records import LLM, A, B, answered, fault, plan, request, route

AT = Series("t", "r", "triton", "m", "1")
NOWHERE = Series("t", "r", "", "", "")
AT_LLM = Series("t", "r", "llm", "big", "")


def counted(record: RequestRecord) -> dict[Series, Tally]:
    found: dict[Series, Tally] = defaultdict(Tally)
    count(record, found.__getitem__)
    return dict(found)


def numbers(tally: Tally) -> dict[str, int]:
    return {name: getattr(tally, name) for name in COUNTS if getattr(tally, name)}


USED = {"input_tokens": 10, "output_tokens": 20, "cost_nano_usd": 3_000}


def test_an_answer_is_counted_at_its_place_with_its_time() -> None:
    found = counted(answered())
    assert list(found) == [AT]
    assert numbers(found[AT]) == {"requests": 1, "attempts": 1, **USED}
    assert 12_000 <= (percentile_us(found[AT].whole, 0.5) or 0) <= 13_200
    assert found[AT].first_token == {}


def test_a_streams_first_token_is_counted_too() -> None:
    tally = counted(answered(first_token_us=900))[AT]
    assert 900 <= (percentile_us(tally.first_token, 0.99) or 0) <= 990


def test_after_another_place_failed_the_time_is_nobodys_own() -> None:
    record = answered(LLM, of=(A, LLM), faults=(fault(FaultKind.TIMEOUT, A),), first_token_us=5)
    found = counted(record)
    assert numbers(found[AT]) == {"attempts": 1, "failed_attempts": 1}
    assert numbers(found[AT_LLM]) == {"requests": 1, "attempts": 1, **USED}
    assert numbers(found[NOWHERE]) == {}
    assert found[NOWHERE].whole
    assert found[NOWHERE].first_token
    assert not found[AT_LLM].whole
    assert not found[AT_LLM].first_token


def test_a_version_that_the_server_names_is_not_the_rules() -> None:
    record = answered(LLM, of=(LLM,), route=route(LLM, version="2027-01"))
    assert list(counted(record)) == [AT_LLM]


@pytest.mark.parametrize(
    ("kind", "numbers_there"),
    [
        (FaultKind.FAILED, {"attempts": 1, "failed_attempts": 1}),
        (FaultKind.OVERLOADED, {"attempts": 1, "failed_attempts": 1}),
        (FaultKind.BROKEN, {"attempts": 1, "failed_attempts": 1, "violations": 1}),
        (FaultKind.MISFIT, {"attempts": 1, "failed_attempts": 1, "violations": 1}),
        (FaultKind.REFUSED_INPUT, {"attempts": 1}),
        (FaultKind.CONTEXT_TOO_LONG, {"attempts": 1}),
        (FaultKind.SKIPPED, {}),
        (FaultKind.UNSUPPORTED, {}),
        (FaultKind.NO_SUCH_MODEL, {}),
    ],
)
def test_what_a_fault_counts_at_its_place(kind: FaultKind, numbers_there: dict[str, int]) -> None:
    record = answered(error=NoHealthyBackend("none"), route=None, faults=(fault(kind),), usage=NOTHING_USED)
    found = counted(record)
    assert numbers(found.get(AT, Tally())) == numbers_there
    assert numbers(found[NOWHERE]) == {"requests": 1, "errors": 1}


def test_what_broke_off_is_one_attempt_and_an_error_of_its_place() -> None:
    record = answered(error=BackendBroke("broken off"), faults=(fault(FaultKind.UNREACHABLE),))
    tally = counted(record)[AT]
    assert numbers(tally) == {"requests": 1, "errors": 1, "attempts": 1, "failed_attempts": 1, **USED}
    assert tally.whole == {}


def test_a_caller_who_leaves_is_no_error() -> None:
    tally = counted(answered(error=ClientClosed("left")))[AT]
    assert numbers(tally) == {"requests": 1, "attempts": 1, **USED}
    assert tally.whole == {}


def test_the_same_place_may_fail_and_then_answer() -> None:
    found = counted(answered(A, faults=(fault(FaultKind.FAILED, A),)))
    assert numbers(found[AT]) == {"requests": 1, "attempts": 2, "failed_attempts": 1, **USED}


def test_what_never_got_a_plan_is_counted_by_its_rule() -> None:
    found = counted(answered(plan=None, route=None, error=RateLimited("full"), usage=NOTHING_USED))
    assert {series: numbers(tally) for series, tally in found.items()} == {NOWHERE: {"requests": 1, "errors": 1}}


def test_an_answer_that_was_kept_is_no_ones() -> None:
    found = counted(answered(plan=None, route=None, recalled="hit", usage=NOTHING_USED))
    assert {series: numbers(tally) for series, tally in found.items()} == {NOWHERE: {"requests": 1}}


def test_a_name_of_the_callers_invention_is_not_counted() -> None:
    made_up = replace(A, model="made-up")
    record = answered(
        made_up,
        of=(made_up,),
        request=request(model="made-up"),
        error=ClientClosed("left"),
        usage=NOTHING_USED,
        plan=plan(made_up),
    )
    assert list(counted(record)) == [NOWHERE]


def test_a_series_is_of_all_replicas() -> None:
    assert series_at("t", "r", A) == series_at("t", "r", B) == AT
    assert series_at("t", "r", None) == NOWHERE
