"""Request headers that steer how a request is served: its time, its priority, its place in a sequence."""

import re
from collections.abc import Mapping

from starlette.types import Scope

from gateway.core.errors import InvalidInput, MalformedRequest
from gateway.core.types import Priority, SequenceStep
from gateway.pipeline import Task

MAX_SEQUENCE_ID = 128  # characters
MAX_ORDERING_KEY = 128
MAX_IDEMPOTENCY_KEY = 255
_ID, _START, _END = "x-sequence-id", "x-sequence-start", "x-sequence-end"
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_ORDERING_KEY = "x-ordering-key"
_SESSION = "x-session-id"
_TENSOR = "tensor"  # the contract whose callers name the models themselves
_QUOTED = re.compile(r'"((?:[^"\\]|\\["\\])*)"')
_ESCAPED = re.compile(r"\\(.)")

Headers = Mapping[str, str]
"""By name, in lower case."""


def headers_of(scope: Scope) -> Headers:
    """A request's headers, read once; of one that is there more than once, the first."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}


def timeout_us(headers: Headers, task: Task) -> int:
    """How long the request may take: the task's time, which `X-Timeout-Ms` may shorten."""
    given = headers.get("x-timeout-ms")
    if given is None:
        return task.timeout_us
    if not given.isdecimal() or not 1 <= int(given[:10]) <= 10**9:
        raise MalformedRequest("must be a whole number of milliseconds from 1", field="x-timeout-ms")
    return min(task.timeout_us, int(given[:10]) * 1000)


def priority(headers: Headers) -> Priority | None:
    """`X-Priority`: whether somebody waits for the answer; None where it is not said."""
    given = headers.get("x-priority")
    if given is None:
        return None
    if given.lower() == "interactive":
        return "interactive"
    if given.lower() == "batch":
        return "batch"
    raise MalformedRequest("must be interactive or batch", field="x-priority")


def ordering_key(headers: Headers) -> str:
    """`X-Ordering-Key`: requests of a tenant with the same one go in their order; empty where there is none."""
    given = headers.get(_ORDERING_KEY)
    return _ordering_key(given, _ORDERING_KEY) if given else ""


def with_ordering_key(headers: Headers, given: object) -> Headers:
    """`headers`, where a body says `ordering_key`. Raises `MalformedRequest` where they say another one."""
    key = _ordering_key(given or None, "ordering_key")
    if (headers.get(_ORDERING_KEY) or key) != key:
        raise MalformedRequest(f"is not the one of {_ORDERING_KEY}", field="ordering_key")
    return {**headers, _ORDERING_KEY: key}


def session(headers: Headers) -> str:
    """`X-Session-Id`: what a caller's requests belong together by; empty where there is none."""
    given = headers.get(_SESSION)
    return _ordering_key(given, _SESSION) if given else ""


def _ordering_key(given: object, field: str) -> str:
    if isinstance(given, str) and len(given) <= MAX_ORDERING_KEY and given.isprintable() and given.isascii():
        return given
    raise MalformedRequest(f"must be a text of 1 to {MAX_ORDERING_KEY} printable ASCII characters", field=field)


def idempotency_key(headers: Headers) -> str:
    """`Idempotency-Key`, a structured field's string or bare; empty where there is none."""
    given = headers.get("idempotency-key")
    if given is None:
        return ""
    quoted = _QUOTED.fullmatch(given.strip())
    key = _ESCAPED.sub(r"\1", quoted[1]) if quoted else given.strip()
    if not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY or not (key.isascii() and key.isprintable()):
        raise MalformedRequest(
            f"must be a text of 1 to {MAX_IDEMPOTENCY_KEY} printable ASCII characters", field="idempotency-key"
        )
    return key


def sequence_step(headers: Headers, task: Task) -> SequenceStep | None:
    """`X-Sequence-Id`, `X-Sequence-Start` and `X-Sequence-End`; None where there are none.

    Raises `InvalidInput` where the task keeps no state, and where it keeps one and nothing says whose.
    """
    given = [name for name in (_ID, _START, _END) if name in headers]
    if not given:
        if task.contract.is_sequence:
            raise InvalidInput(
                f"is needed: the task '{task.name}' keeps state from request to request; send x-sequence-start: true "
                "with the first",
                field=_ID,
            )
        return None
    if not (task.contract.is_sequence or task.contract.name == _TENSOR):
        raise InvalidInput(f"the task '{task.name}' keeps no state from request to request", field=_ID)
    if _ID not in given:
        raise InvalidInput("is needed with x-sequence-start and x-sequence-end", field=_ID)
    return SequenceStep(id=_sequence_id(headers[_ID]), is_start=_flag(headers, _START), is_end=_flag(headers, _END))


def _sequence_id(given: str) -> int | str:
    """Digits are a number, as Triton has them; anything else is a text."""
    if given.isascii() and given.isdecimal():
        number = int(given[:21])
        if not 1 <= number < 2**64:
            raise MalformedRequest("a number must be from 1 to 2^64 - 1", field=_ID)
        return number
    if not 1 <= len(given) <= MAX_SEQUENCE_ID or not given.isprintable():
        raise MalformedRequest(f"must be a number, or a text of 1 to {MAX_SEQUENCE_ID} characters", field=_ID)
    return given


def _flag(headers: Headers, name: str) -> bool:
    given = _FLAGS.get(headers.get(name, "false").lower())
    if given is None:
        raise MalformedRequest("must be true or false", field=name)
    return given
