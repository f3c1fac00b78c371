"""What switches stop, and where they send requests."""

from typing import Any

import pytest

from gateway.core.switches import Scope, Switch, Switches, blocked, parse_switches, switches_document
from gateway.core.types import Caller, InferenceRequest, Place, SequenceStep

PLACE = Place(backend="triton", model="m", version="2", replica="a:8001")


def switch(action: str = "block", kind: str = "everything", name: str = "", **fields: Any) -> Switch:
    told: dict[str, Any] = {"id": "s1", "reason": "why", "owner": "o", "created_ms": 0, "expires_ms": 100, **fields}
    return Switch(action=action, scope=Scope(kind=kind, name=name), **told)


def request(**fields: Any) -> InferenceRequest:
    told = {"id": "i", "task": "chat", "input": None, "received_us": 0, "deadline_us": 1, **fields}
    return InferenceRequest(caller=Caller(key_id="k1", tenant="t1"), **told)


@pytest.mark.parametrize(
    ("kind", "name", "is_request", "is_place"),
    [
        ("everything", "", True, False),
        ("tenant", "t1", True, False),
        ("tenant", "t2", False, False),
        ("key", "k1", True, False),
        ("task", "chat", True, False),
        ("task", "", False, False),
        ("model", "m", True, True),
        ("model", "m:2", True, True),
        ("model", "m:1", False, False),
        ("backend", "triton", False, True),
        ("backend", "tri", False, False),
        ("replica", "a:8001", False, True),
        ("replica", "triton@a:8001", False, True),
        ("replica", "local@a:8001", False, False),
    ],
)
def test_a_scope(kind: str, name: str, *, is_request: bool, is_place: bool):
    scope = Scope(kind=kind, name=name)
    assert scope.has_request(request(model="m", version="2")) is is_request
    assert scope.has_place(PLACE) is is_place


def test_a_request_that_names_no_model_is_of_no_model():
    assert not Scope(kind="model", name="m").has_request(request())


def test_a_place_without_replicas_is_no_replica():
    assert not Scope(kind="replica", name="").has_place(Place(backend="b", model="m"))


def test_a_switch_ends_by_itself():
    switches = Switches(revision=1, items=(switch(),))
    assert switches.refusing(request(), 99)
    assert not switches.refusing(request(), 100)
    assert not switches.in_force(100)


@pytest.mark.parametrize(
    ("action", "is_start", "stops"), [("block", False, True), ("drain", False, False), ("drain", True, True)]
)
def test_a_drain_lets_sequences_go_on(action: str, *, is_start: bool, stops: bool):
    asked = request(sequence=SequenceStep(id=7, is_start=is_start))
    assert bool(Switches(items=(switch(action),)).refusing(asked, 0)) is stops
    places = Switches(items=(switch(action, "backend", "triton"),))
    assert bool(places.closing(PLACE, 0, goes_on=not is_start)) is stops


def test_a_drain_stops_what_is_of_no_sequence():
    assert Switches(items=(switch("drain"),)).refusing(request(), 0)


def test_the_newest_of_two_forces_has_the_word():
    switches = Switches(
        items=(
            switch("force_backend", value="new", created_ms=5, id="b"),
            switch("force_backend", value="old", created_ms=1, id="a"),
            switch("force_fallback", "tenant", "t2", id="c"),
        )
    )
    forced = switches.forced(request(), 9)
    assert forced is not None
    assert (forced.backend, forced.is_fallback, len(forced.by)) == ("new", False, 2)
    assert Switches(items=(switch(),)).forced(request(), 9) is None


def test_the_longest_freeze_counts():
    switches = Switches(items=(switch("freeze", expires_ms=10), switch("freeze", expires_ms=20, id="b")))
    frozen = switches.freezing(5)
    assert frozen is not None
    assert frozen.id == "b"
    assert switches.freezing(20) is None


def test_callers_hear_when_to_come_back_and_no_reason():
    error = blocked(switch(reason="we were hacked", expires_ms=12_000), 10_000)
    assert error.retry_after_us == 2_000_000
    assert "hacked" not in error.detail
    assert blocked(switch(expires_ms=10**9), 0).retry_after_us == 30_000_000


def test_documents_are_inverse():
    made = (switch(), switch("force_backend", "task", "chat", value="local", id="b"))
    assert parse_switches(switches_document(made), 4) == Switches(revision=4, items=made)


@pytest.mark.parametrize("document", [[{}], [{"id": 1}], [1], [{**switches_document([switch()])[0], "action": "x"}]])
def test_what_are_no_switches(document: Any):
    with pytest.raises((ValueError, TypeError, KeyError)):
        parse_switches(document, 1)
