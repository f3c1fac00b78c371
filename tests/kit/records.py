"""Requests that ended, made up: for who counts them and writes them down."""

from dataclasses import replace
from typing import Any, Final

from gateway.core.errors import Fault, FaultKind
from gateway.core.routing import Plan
from gateway.core.types import Caller, InferenceRequest, Place, Route, Timing, Usage
from gateway.core.watching.record import RequestRecord

SECRET: Final = "the caller's own words"  # noqa: S105 - made up here
A: Final = Place(backend="triton", model="m", version="1", replica="a:8001")
B: Final = Place(backend="triton", model="m", version="1", replica="b:8001")
LLM: Final = Place(backend="llm", model="big")


def request(**changes: Any) -> InferenceRequest:
    """Its input, and the headers that no rule matches on, are secret."""
    fields: dict[str, Any] = {
        "id": "r1",
        "task": "t",
        "caller": Caller(key_id="k1", tenant="acme"),
        "input": {"text": SECRET},
        "received_us": 0,
        "deadline_us": 1_000_000,
        "headers": {"authorization": f"Bearer {SECRET}", "x-canary": "yes", "x-other": SECRET},
        "input_bytes": 321,
    }
    return InferenceRequest(**fields | changes)


def plan(*candidates: Place, refusals: tuple[tuple[Place, str], ...] = (), **changes: Any) -> Plan:
    fields: dict[str, Any] = {"rule": "r", "revision": 7, "candidates": candidates, "refusals": refusals}
    return Plan(**fields | changes)


def route(place: Place, *, attempts: int = 1, version: str = "") -> Route:
    return Route(
        backend=place.backend,
        model=place.model,
        version=version or place.version,
        rule="r",
        attempts=attempts,
        replica=place.replica,
    )


def answered(place: Place = A, *, of: tuple[Place, ...] = (A, B), **changes: Any) -> RequestRecord:
    """A whole answer of `place` in 12 ms."""
    fields: dict[str, Any] = {
        "id": "r1",
        "task": "t",
        "tenant": "acme",
        "key_id": "k1",
        "total_us": 12_000,
        "plan": plan(*of),
        "route": route(place),
        "timing": Timing(total_us=12_000, admit_us=100, backend_us=11_000, queue_us=2_000),
        "usage": Usage(input_tokens=10, output_tokens=20, cost_nano_usd=3_000),
        "request": request(),
        "rule": "r",
        "revision": 7,
        "switches_revision": 3,
    }
    return RequestRecord(**fields | changes)


def fault(kind: FaultKind, place: Place = A, message: str = SECRET, **changes: Any) -> Fault:
    return replace(Fault(kind=kind, message=message, place=place), **changes)
