"""Instants out of a recording: a trace to replay. Pure."""

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import orjson

from gateway.tuning.traffic import TrafficError

_INSTANTS: Final = ("at_s", "at", "timestamp", "time")


def instants(text: str, *, task: str = "") -> tuple[float, ...]:
    """Seconds since the first of them, in order.

    A JSON list of numbers (seconds), or one instant a line: a number of seconds, an ISO 8601 time, or a JSON object
    with one of these as `at_s`, `at`, `timestamp` or `time`, such as the gateway's own access log has: of that each
    line of a request counts, at the time when it began; `task` takes those of one task alone. Empty lines and lines
    that begin with `#` are left out. Raises `TrafficError` naming the line.
    """
    if text.lstrip().startswith("["):
        found = [_list_entry(number, one) for number, one in enumerate(_list(text))]
    else:
        lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
        read = (_line(number, line, task=task) for number, line in lines if line and not line.startswith("#"))
        found = [one for one in read if one is not None]
    if not found:
        raise TrafficError("trace: no request is in it")
    found.sort()
    return tuple(one - found[0] for one in found)


def _list(text: str) -> Sequence[Any]:
    try:
        read = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise TrafficError(f"trace: {error}") from error
    return read if isinstance(read, list) else ()


def _list_entry(number: int, one: Any) -> float:
    if isinstance(one, bool) or not isinstance(one, int | float):
        raise TrafficError(f"trace[{number}]: must be a number of seconds, not {one!r}")
    return float(one)


def _line(number: int, line: str, *, task: str) -> float | None:
    if not line.startswith("{"):
        return _instant(number, line)
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TrafficError(f"trace: line {number}: {error}") from error
    if entry.get("logger") and entry.get("event") != "request":
        return None  # the gateway's log has other lines too
    if task and entry.get("task", task) != task:
        return None
    for name in _INSTANTS:
        if name in entry:
            took_ms = entry.get("total_ms", 0)  # an access log is written when a request has ended
            began = _instant(number, entry[name])
            return began - took_ms / 1e3 if isinstance(took_ms, int | float) else began
    raise TrafficError(f"trace: line {number}: has none of {', '.join(_INSTANTS)}")


def _instant(number: int, one: Any) -> float:
    try:
        seconds = float(one)
    except (TypeError, ValueError, OverflowError):
        pass
    else:
        if not math.isfinite(seconds) or isinstance(one, bool):
            raise TrafficError(f"trace: line {number}: '{one}' is no instant")
        return seconds
    try:
        return datetime.fromisoformat(one).timestamp()
    except (TypeError, ValueError, OverflowError) as error:
        raise TrafficError(f"trace: line {number}: '{one}' is no instant") from error
