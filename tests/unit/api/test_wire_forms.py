"""Errors and headers on the wire, as tables."""

import json

import pytest

from gateway.api.errors import openai_error, problem
from gateway.api.headers import go_duration, route_headers
from gateway.core.error_forms import pointer, problem_document
from gateway.core.errors import (
    CLOSED_LIST,
    BackendBroke,
    Forbidden,
    InvalidInput,
    MalformedRequest,
    NoHealthyBackend,
    QueueFull,
    RateLimited,
    Unauthorized,
    UnknownModel,
)
from gateway.core.types import Route


@pytest.mark.parametrize(
    ("length_us", "told"),
    [
        (0, "0ms"),
        (1, "1ms"),
        (999_000, "999ms"),
        (999_001, "1s"),
        (1_000_000, "1s"),
        (1_000_001, "2s"),
        (59_500_000, "1m0s"),
        (360_000_000, "6m0s"),
        (3_600_000_000, "1h0m0s"),
        (90_061_000_000, "25h1m1s"),
    ],
)
def test_durations_are_go_style_and_never_too_early(length_us, told):
    assert go_duration(length_us) == told


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("input.text", "#/input/text"),
        ("input.text[3]", "#/input/text/3"),
        ("a[0].b~c", "#/a/0/b~0c"),
        ("x/y", "#/x~1y"),
    ],
)
def test_fields_as_json_pointers(field, told):
    assert pointer(field) == told


def test_only_what_lies_in_the_body_has_a_pointer():
    assert "pointer" in problem_document(InvalidInput("x", field="input.text"))["errors"][0]
    for field in ("x-timeout-ms", "content-type", "body"):
        assert problem_document(MalformedRequest("x", field=field))["errors"] == [{"detail": "x", "field": field}]


@pytest.mark.parametrize("error", [e for e in CLOSED_LIST if e.__init__ is InvalidInput.__init__], ids=lambda e: e.code)
def test_every_error_has_both_forms_with_its_status(error):
    for form in (problem, openai_error):
        answer = form(error("what is wrong", field="a.b"))
        assert answer.status_code == error.status
        assert error.code in answer.body.decode()
    assert json.loads(problem(error("x")).body).get("errors") is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Unauthorized, "authentication_error"),
        (Forbidden, "permission_error"),
        (UnknownModel, "not_found_error"),
        (RateLimited, "rate_limit_error"),
        (InvalidInput, "invalid_request_error"),
        (BackendBroke, "server_error"),
    ],
)
def test_openai_types(error, kind):
    told = json.loads(openai_error(error("x", upstream_code="their_code")).body)["error"]
    assert (told["type"], told["code"], told["param"]) == (kind, "their_code", None)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RateLimited("x", retry_after_us=1), "1"),
        (RateLimited("x", retry_after_us=1_000_001), "2"),
        (NoHealthyBackend("x"), "1"),
        (QueueFull("x"), "1"),
        (BackendBroke("x"), None),
        (BackendBroke("x", retry_after_us=5_000_000), "5"),
    ],
)
def test_retry_after_in_whole_seconds_never_too_early(error, told):
    assert problem(error).headers.get("retry-after") == told
    assert json.loads(problem(error).body).get("retry_after_s") == (told and int(told))


def test_in_milliseconds_only_where_the_time_is_known():
    assert problem(RateLimited("x", retry_after_us=1_000_001)).headers["retry-after-ms"] == "1001"
    assert "retry-after-ms" not in problem(NoHealthyBackend("x")).headers


def test_route_headers():
    route = Route(backend="triton", model="m", version="1", rule="r", attempts=2)
    told = {"x-gateway-backend": "triton", "x-gateway-model": "m", "x-gateway-attempts": "2", "x-gateway-rule": "r"}
    assert route_headers(route) == told
