"""Errors as documents and headers, the same for every path that shows them."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.errors import GatewayError, StaleRevision, Unauthorized


def problem_document(error: GatewayError, faults: Sequence[Mapping[str, str]] = ()) -> dict[str, Any]:
    """RFC 9457 `application/problem+json`, with our stable `code`.

    `faults` lists the faults of a body, each with `detail` and `pointer`; by default the one of `error.field`.
    """
    if not faults and error.field:
        fault = {"detail": error.detail, "field": error.field}
        # A JSON pointer leads into the body; headers (they have a `-`) and the body itself are not in it.
        is_inside = "-" not in error.field and error.field != "body"
        faults = [fault | {"pointer": pointer(error.field)}] if is_inside else [fault]
    document: dict[str, Any] = {
        "type": "about:blank",
        "title": error.title,
        "status": error.status,
        "detail": error.detail,
        "code": error.code,
    }
    if isinstance(error, StaleRevision):
        document |= {"expected": error.expected, "current": error.current}
        document |= {} if error.changes is None else {"changes": list(error.changes)}
    return {**document, "errors": list(faults)} if faults else document


def error_headers(error: GatewayError) -> dict[str, str]:
    """The headers that go with an error in any form.

    429 and 503 say when to come back, unless that is pointless, in whole seconds (RFC 9110, 10.2.3); where it is known,
    in milliseconds too, which OpenAI's clients prefer: a limit per second needs no whole second's wait.
    """
    headers = {}
    if not error.should_retry:
        headers["x-should-retry"] = "false"  # the name that OpenAI's clients obey
    seconds = retry_after_s(error)
    if seconds is not None:
        headers["retry-after"] = str(seconds)
    if error.retry_after_us is not None:
        headers["retry-after-ms"] = str(max(1, -(-error.retry_after_us // 1000)))
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return headers


def retry_after_s(error: GatewayError) -> int | None:
    """After how many seconds the same request may succeed, rounded up: never too early; None where nobody can say.

    429 and 503 always have one, but where coming back is pointless. Where nothing better is known it is one second, the
    pace at which health is probed.
    """
    if error.retry_after_us is not None:
        return max(1, -(-error.retry_after_us // 1_000_000))
    return 1 if error.status in _COME_BACK and error.should_retry else None


def pointer(field: str) -> str:
    """`input.text[3]` as the JSON pointer `#/input/text/3`."""
    return "#/" + field.replace("[", ".").replace("]", "").replace("~", "~0").replace("/", "~1").replace(".", "/")


_COME_BACK = (429, 503)
