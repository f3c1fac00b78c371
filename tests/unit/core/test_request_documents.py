"""Requests as documents: the reasons for where they went, and nothing of what they held."""

import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.attempts import CONSEQUENCES
from gateway.core.errors import BackendBroke, ClientClosed, Fault, FaultKind, NoHealthyBackend, RateLimited, Reply
from gateway.core.switches import Forced
from gateway.core.trace import Trace
from gateway.core.types import NOTHING_USED, Limit, LimitState, Verdict
from gateway.core.watching.record import RequestRecord
from gateway.core.watching.request_documents import MAX_NAME, document, ended
from tests.kit.records import LLM, SECRET, A, B, answered, fault, plan, request


def told(record: RequestRecord, **changes: Any) -> dict[str, Any]:
    return document(
        ended(record, at_ms=1_000, matched_headers=frozenset({"x-canary", "x-absent"})), worker="w", **changes
    )


def limited() -> RateLimited:
    error = RateLimited("the limit is used up")
    limit = Limit(kind="requests", amount=60, per="minute", burst=60)
    state = LimitState(limit=limit, remaining=0, reset_us=1, is_refused=True)
    error.verdict = Verdict(allowed=False, states=(state,), refused_by=state)
    return error


TRACE = Trace(trace_id="0af7651916cd43dd8448eb211c80319c", span_id="b7ad6b7169203331")


def test_a_whole_document() -> None:
    record = answered(first_token_us=900, stream=True, input_tokens=11)
    asked = request(model="named", version="3", session="s", ordering_key="o", priority="batch")
    assert told(replace(record, request=asked, trace=TRACE)) == {
        "id": "r1",
        "trace_id": TRACE.trace_id,
        "at_ms": 1_000,
        "worker": "w",
        "task": "t",
        "tenant": "acme",
        "key": "k1",
        "model": "named",
        "version": "3",
        "priority": "batch",
        "stream": True,
        "headers": {"x-canary": "yes"},
        "input_bytes": 321,
        "input_tokens": 11,
        "session": "s",
        "ordering_key": "o",
        "status": 200,
        "code": "ok",
        "rule": "r",
        "revision": 7,
        "switches_revision": 3,
        "place": "triton/m:1@a:8001",
        "attempts": 1,
        "total_ms": 12.0,
        "backend_ms": 11.0,
        "queue_ms": 2.0,
        "first_token_ms": 0.9,
        "usage": {"input_tokens": 10, "output_tokens": 20, "cost_usd": 0.000003},
        "recalled": "",
        "planned": 2,
        "candidates": ["triton/m:1@a:8001", "triton/m:1@b:8001"],
        "why": ["taken: the first of 2", "not needed"],
        "notes": [],
        "stands_for": 1,
    }


def test_of_a_request_refused_at_the_door_there_is_what_is_known() -> None:
    record = RequestRecord(id="x", task="", tenant="", key_id="", total_us=5, error=RateLimited("no"))
    found = told(record)
    assert (found["headers"], found["candidates"], found["place"], found["code"]) == ({}, [], "", "rate_limited")
    assert (found["backend_ms"], found["queue_ms"], found["input_tokens"]) == (0.0, None, None)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"of": (A,)}, ["taken: the only one that could be tried"]),
        (
            {"place": B, "faults": (fault(FaultKind.TIMEOUT, A),)},
            [
                "attempt failed: timeout: the backend did not answer in time",
                "taken: number 2 of 2, as others failed before",
            ],
        ),
        ({"place": B}, ["not needed", "taken: number 2 of 2, as it began first"]),
        (
            {"error": BackendBroke("broken off"), "faults": (fault(FaultKind.UNREACHABLE, A),)},
            [
                f"attempt failed: unreachable: {CONSEQUENCES[FaultKind.UNREACHABLE].detail}",
                "not tried",
            ],
        ),
        ({"error": ClientClosed("left")}, ["taken: the first of 2", "not needed"]),
        (
            {
                "error": NoHealthyBackend("none"),
                "route": None,
                "faults": (
                    fault(FaultKind.SKIPPED, A, "it asked to wait"),
                    fault(FaultKind.DENIED, B, code="invalid_api_key"),
                ),
            },
            [
                "skipped: it asked to wait",
                f"attempt failed: denied: {CONSEQUENCES[FaultKind.DENIED].detail} (invalid_api_key)",
            ],
        ),
        (
            {"plan": plan(A, refusals=((LLM, "weight 0"), (B, "closed by switch s1 (drain replica b:8001)")))},
            ["taken: the only one that could be tried", "weight 0", "closed by switch s1 (drain replica b:8001)"],
        ),
        ({"plan": plan(A, B), "route": None, "error": NoHealthyBackend("none")}, ["not tried", "not tried"]),
    ],
)
def test_each_place_has_its_reason(changes: dict[str, Any], why: list[str]) -> None:
    found = told(answered(**changes))
    assert found["why"] == why
    assert len(found["candidates"]) == len(why)


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        ({"error": limited()}, ["refused by the limit of 60 requests per minute"]),
        ({"refused_by": "switch s1 (block tenant acme)"}, ["refused by switch s1 (block tenant acme)"]),
        ({"recalled": "hit", "plan": None}, ["an answer that was kept was given again (hit)"]),
        ({"recalled": "miss"}, []),
        ({"plan": plan(rule="")}, ["no enabled rule takes it"]),
        (
            {"plan": plan(A, forced=Forced(backend="triton", by=("switch s2 (force_backend everything)",)))},
            ["sent where switch s2 (force_backend everything) says"],
        ),
    ],
)
def test_what_no_place_is_the_reason_for(changes: dict[str, Any], notes: list[str]) -> None:
    assert told(answered(**changes))["notes"] == notes


def test_a_document_never_holds_what_the_caller_or_a_backend_said() -> None:
    reply = Reply(code="INVALID_ARGUMENT", text=SECRET)
    for kind in FaultKind:
        if kind is FaultKind.SKIPPED:  # its words are the gateway's own
            continue
        said = Fault(kind=kind, message=SECRET, field=SECRET, code=SECRET, reply=reply, place=A)
        for error in (None, BackendBroke(SECRET), limited()):
            text = json.dumps(told(answered(error=error, faults=(said,), route=None if error else answered().route)))
            assert SECRET not in text
            assert "authorization" not in text
            assert "x-other" not in text


def test_names_of_the_callers_choice_are_cut() -> None:
    long = "x" * 1000
    asked = request(model=long, version=long, session=long, ordering_key=long, headers={"x-canary": long})
    found = told(answered(request=asked))
    for value in (
        *(found[name] for name in ("model", "version", "session", "ordering_key")),
        found["headers"]["x-canary"],
    ):
        assert value == "x" * MAX_NAME


def test_nothing_of_the_request_is_held_on_to() -> None:
    record = answered()
    assert not any(value is record.request or value == record.request.input for value in ended(record, at_ms=1))
    assert told(replace(record, usage=NOTHING_USED))["usage"] == {
        "input_tokens": None,
        "output_tokens": None,
        "cost_usd": None,
    }
