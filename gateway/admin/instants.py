"""Instants on the wire: RFC 3339 in UTC, with milliseconds and `Z`."""

from datetime import UTC, datetime


def instant(at_ms: int) -> str:
    """`2026-01-31T09:30:00.250Z`, from Unix milliseconds."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
