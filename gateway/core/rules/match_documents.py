"""`match` of a rule as a document: read and written."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Final
from zoneinfo import ZoneInfo

from gateway.core.rules.fields import (
    NAME,
    RuleError,
    choice_at,
    count_at,
    list_at,
    mapping_at,
    name_at,
    names_secret,
    only_known,
)
from gateway.core.rules.rule import Match, TimeWindow
from gateway.core.types import ANY

MAX_BYTES: Final = 2**40
MAX_TOKENS: Final = 100_000_000
MAX_HEADERS: Final = 8
MAX_TIMES: Final = 16
MAX_HEADER_VALUE: Final = 256
DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
WEBSOCKET_KEY: Final = "sec-websocket-protocol"
"""Where a browser's key stands on a WebSocket."""
_BOUNDS: Final = {
    "min_input_tokens": MAX_TOKENS,
    "max_input_tokens": MAX_TOKENS,
    "min_input_bytes": MAX_BYTES,
    "max_input_bytes": MAX_BYTES,
}
_FIELDS: Final = ("task", "tenant", "model", "key", "priority", "headers", *_BOUNDS, "times")
_HEADER: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}")  # RFC 9110's token, in small letters
_CLOCK: Final = re.compile(r"([01]?[0-9]|2[0-4]):([0-5][0-9])")
_DAY_MIN: Final = 1440


def match_at(entry: object, at: str) -> Match:
    """Which requests a rule takes. Raises `RuleError`."""
    given = mapping_at(entry, at)
    only_known(given, _FIELDS, at)
    told: dict[str, Any] = {}
    if "task" in given:
        told["task"] = given["task"] if given["task"] == ANY else name_at(given["task"], f"{at}.task")
    for name in ("tenant", "model", "key"):
        if name in given:
            told[name] = _pattern(given[name], f"{at}.{name}")
    if "priority" in given:
        told["priority"] = choice_at(given["priority"], ("*", "interactive", "batch"), f"{at}.priority")
    for name, most in _BOUNDS.items():
        if name in given:
            told[name] = count_at(given[name], most, f"{at}.{name}")
    for unit in ("tokens", "bytes"):
        least, most = told.get(f"min_input_{unit}", 0), told.get(f"max_input_{unit}", 0)
        if most and least > most:
            raise RuleError(f"{at}.min_input_{unit}: is above max_input_{unit}: no request would fit")
    return Match(**told, headers=_headers(given.get("headers", {}), f"{at}.headers"), times=_times(given, at))


def match_document(match: Match) -> dict[str, Any]:
    """The inverse: task, tenant and model always, of the others what is said."""
    document: dict[str, Any] = {"task": match.task, "tenant": match.tenant, "model": match.model}
    for field in fields(Match):
        value = getattr(match, field.name)
        if field.name in ("key", "priority", *_BOUNDS) and field.default is not MISSING and value != field.default:
            document[field.name] = value
    if match.headers:
        document["headers"] = dict(match.headers)
    if match.times:
        document["times"] = [_window_document(window) for window in match.times]
    return document


def _pattern(value: object, at: str) -> str:
    """A name, or its beginning and `*`: nothing that could take long to match."""
    if value == ANY:
        return ANY
    if not isinstance(value, str) or not NAME.fullmatch(value.removesuffix(ANY)):
        raise RuleError(f"{at}: must be a name of letters, digits and . _ : / - (at most 128), or its beginning and *")
    return value


def _headers(entry: object, at: str) -> Mapping[str, str]:
    given = mapping_at(entry, at)
    if len(given) > MAX_HEADERS:
        raise RuleError(f"{at}: at most {MAX_HEADERS} are taken")
    found: dict[str, str] = {}
    for name, value in given.items():
        low = name.lower()
        if not _HEADER.fullmatch(low):
            raise RuleError(f"{at}: {name[:64]!r} is not the name of a header")
        if low == WEBSOCKET_KEY or names_secret(low):
            raise RuleError(f"{at}.{low}: holds a secret, which no rule may; match the key by its id")
        if isinstance(value, bool | int | float):
            raise RuleError(f'{at}.{low}: must be a text: "{str(value).lower()}"')
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_HEADER_VALUE or not value.isprintable():
            raise RuleError(f"{at}.{low}: must be a text of 1 to {MAX_HEADER_VALUE} characters; it may end in *")
        if low in found:
            raise RuleError(f"{at}.{low}: is there twice")
        found[low] = value
    return found


def _times(given: Mapping[str, Any], at: str) -> tuple[TimeWindow, ...]:
    entries = list_at(given.get("times", ()), f"{at}.times")
    if len(entries) > MAX_TIMES:
        raise RuleError(f"{at}.times: at most {MAX_TIMES} are taken")
    return tuple(_window(entry, f"{at}.times[{i}]") for i, entry in enumerate(entries))


def _window(entry: object, at: str) -> TimeWindow:
    given = mapping_at(entry, at)
    only_known(given, ("days", "from", "to", "timezone"), at)
    days = [
        choice_at(day, DAYS, f"{at}.days[{i}]") for i, day in enumerate(list_at(given.get("days", DAYS), f"{at}.days"))
    ]
    if not days:
        raise RuleError(f"{at}.days: at least one is needed")
    timezone = given.get("timezone", "UTC")
    try:
        ZoneInfo(timezone)
    except (KeyError, ValueError, TypeError, OSError):  # OSError: the name of a folder
        raise RuleError(f"{at}.timezone: must be an IANA name such as Asia/Seoul") from None
    return TimeWindow(
        days=tuple(sorted({DAYS.index(day) for day in days})),
        from_min=_minutes(given.get("from", "00:00"), f"{at}.from"),
        to_min=_minutes(given.get("to", "24:00"), f"{at}.to"),
        timezone=timezone,
    )


def _minutes(value: object, at: str) -> int:
    """A time of the day in minutes. YAML reads a bare 17:30 as the number 1050, which is the same."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _DAY_MIN:
        return value
    found = _CLOCK.fullmatch(value) if isinstance(value, str) else None
    minutes = int(found[1]) * 60 + int(found[2]) if found else _DAY_MIN + 1
    if minutes > _DAY_MIN:
        raise RuleError(f'{at}: must be a time of the day such as "17:30"')
    return minutes


def _window_document(window: TimeWindow) -> dict[str, Any]:
    return {
        "days": [DAYS[day] for day in window.days],
        "from": f"{window.from_min // 60:02}:{window.from_min % 60:02}",
        "to": f"{window.to_min // 60:02}:{window.to_min % 60:02}",
        "timezone": window.timezone,
    }
