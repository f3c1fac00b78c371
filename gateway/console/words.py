"""Figures in words, short enough for a tile or a cell of a table."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

NONE: Final = "-"
_HOUR_S: Final = 3600
_DAY_S: Final = 86_400


def number(value: float | None, digits: int = 0) -> str:
    """With thousands apart: 12,345."""
    return NONE if value is None else f"{value:,.{digits}f}"


def rate(value: float | None) -> str:
    """Per second; more digits where there is little."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"  # noqa: PLR2004 - three digits are enough


def millis(value: float | None) -> str:
    """Milliseconds, or seconds from ten of them on."""
    if value is None:
        return NONE
    if value >= 10_000:  # noqa: PLR2004 - as the docstring says
        return f"{value / 1000:.1f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"  # noqa: PLR2004 - two digits are enough


def percent(ratio: float | None, digits: int = 1) -> str:
    """A ratio of 0 to 1."""
    return NONE if ratio is None else f"{100 * ratio:.{digits}f} %"


def usd(value: float | None) -> str:
    """Dollars; four digits below one."""
    if value is None:
        return NONE
    return f"${value:,.2f}" if value >= 1 or value == 0 else f"${value:.4f}"


def lasting(seconds: float | None) -> str:
    """A time span: 1 h 05 min, 4:09."""
    if seconds is None:
        return NONE
    whole = max(0, round(seconds))
    if whole >= _DAY_S:
        return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"
    if whole >= _HOUR_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // 60:02d} min"
    return f"{whole // 60}:{whole % 60:02d}"


def instant(at: str | float) -> datetime:
    """An instant on the wire: RFC 3339, or Unix milliseconds."""
    if isinstance(at, int | float):
        return datetime.fromtimestamp(at / 1000, UTC)
    return datetime.fromisoformat(at).astimezone(UTC)


def when(at: str | float | None) -> str:
    """An instant as date and time in UTC."""
    return NONE if at in (None, "") else f"{instant(at or 0):%Y-%m-%d %H:%M:%S}"


def moment(at: str | float | None) -> dict[str, str] | None:
    """An instant for a column of kind `time`: the date only where it is another day's; the whole as its title."""
    if at in (None, ""):
        return None
    found = instant(at or 0)
    day = "" if found.date() == datetime.now(UTC).date() else f"{found:%Y-%m-%d} "
    return {"text": f"{day}{found:%H:%M:%S}", "title": found.isoformat(timespec="milliseconds").replace("+00:00", "Z")}


def pair(first: str, second: str) -> str:
    """Two figures beside each other, without the dashes of what there is not at the end."""
    return first if second == NONE else f"{first} / {second}"


def place(target: Mapping[str, Any]) -> str:
    """Where a target is: `triton/model:2@replica`."""
    found = f"{target.get('backend', '')}/{target.get('model') or '*'}"
    version, replica = target.get("version"), target.get("replica")
    return f"{found}{f':{version}' if version else ''}{f'@{replica}' if replica else ''}"


def short(value: Any, size: int = 120) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{name}: {part}" for name, part in value.items())
    text = " ".join(str(value).split())
    return text if len(text) <= size else f"{text[: size - 1]}…"


def pretty(value: Any) -> str:
    """A value as JSON that can be read."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def in_days(days: float) -> str:
    """The instant so many days from now, as it is on the wire."""
    return (datetime.now(UTC) + timedelta(days=days)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
