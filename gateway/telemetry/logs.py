"""Logs: one JSON object a line; one line per request. Never bodies, prompts or secrets."""

import asyncio
import functools
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from gateway.core.cost import NANO_USD_PER_USD
from gateway.core.errors import InternalError
from gateway.core.types import Place, Usage
from gateway.core.watching.record import RequestRecord

ACCESS: Final = "gateway.access"
FLUSH_S: Final = 0.1
MAX_LINES: Final = 1000
MAX_DETAIL: Final = 1000  # characters; callers' own texts may come in it
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class JsonLines(logging.Formatter):
    """A record and its `extra` fields as one JSON line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the values hold."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update({k: v for k, v in record.__dict__.items() if k not in _STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _ascii_json(line)


def configure_logging() -> None:
    """Everything that this process logs goes to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    for noisy in ("uvicorn.error", "uvicorn.access", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class LineBuffer:
    """Writes lines to `write` a moment later, many at once: a write costs more than all else about a line.

    What a killed process had not written is lost: `FLUSH_S` of lines at most. Outside an event loop every line is
    written at once.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        """Write `line` (without its end) soon, or with the next ones."""
        self._lines.append(line)
        if len(self._lines) == 1:
            try:
                asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
            except RuntimeError:
                self.flush()
        elif len(self._lines) >= MAX_LINES:
            self.flush()

    def flush(self) -> None:
        """Write what there is."""
        lines, self._lines = self._lines, []
        if lines:
            self._write("\n".join(lines) + "\n")


class AccessLog:
    """An observer that writes one line per request; an internal error brings its stack trace along.

    It does not go through `logging`, which would cost more than the rest of the record.
    """

    def __init__(self, write: Callable[[str], object] = sys.stderr.write) -> None:
        self._lines = LineBuffer(write)

    def began(self, task: str) -> None:
        """Nothing is logged before the end."""

    def ended(self, record: RequestRecord) -> None:
        """One line."""
        self._lines.add(_line(record))

    def refused(self, record: RequestRecord) -> None:
        """One line."""
        self._lines.add(_line(record))

    def flush(self) -> None:
        """Write what is still held back."""
        self._lines.flush()


def _line(record: RequestRecord) -> str:
    """The record as JSON, in the form of `JsonLines`."""
    fields: dict[str, Any] = {
        "time": _now(),
        "level": "info",
        "logger": ACCESS,
        "event": "request",
        "request_id": record.id,
        **({"trace_id": record.trace.trace_id} if record.trace else {}),
        "task": record.task,
        "tenant": record.tenant,
        "key": record.key_id,
        "code": record.code,
        "status": record.status,
        "total_ms": record.total_us / 1000,
        "stream": record.stream,
    }
    _add_decided(fields, record)
    if record.timing:
        fields["backend_ms"] = record.timing.backend_us / 1000
    if queue_us := sum([tried.gate_us for tried in record.tried]):
        fields["queue_ms"] = queue_us / 1000
    if record.ordering_us:
        fields["ordering_ms"] = record.ordering_us / 1000
    if record.first_token_us is not None:
        fields["first_token_ms"] = record.first_token_us / 1000
    _add_used(fields, record.usage)
    if detail := record.detail:
        fields["detail"] = detail[:MAX_DETAIL]
    if record.degraded:
        fields["limiter"] = "degraded"
    if record.recalled:
        fields["recall"] = record.recalled
    cause = record.error.__cause__ if isinstance(record.error, InternalError) else None
    if cause is not None:
        fields["level"] = "error"
        fields["exception"] = "".join(traceback.format_exception(cause))
    return _ascii_json(fields)


def _now() -> str:
    """As `JsonLines` has it."""
    second, ms = divmod(time.time_ns() // 1_000_000, 1000)
    return f"{_second(second)}.{ms:03d}+00:00"


@functools.lru_cache(maxsize=2)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _add_decided(fields: dict[str, Any], record: RequestRecord) -> None:
    """Where it went, by what, and why not elsewhere."""
    if record.route:
        route = record.route
        fields["route"] = _place(route.backend, route.model, route.version, route.replica)
        fields["attempts"] = route.attempts
    if record.rule:
        fields["rule"], fields["revision"] = record.rule, record.revision
    if record.switches_revision:
        fields["switches"] = record.switches_revision
    if reasons := record.reasons:
        fields["reasons"] = reasons
    if record.refused_by:
        fields["switch"] = record.refused_by


@functools.lru_cache(maxsize=1024)
def _place(backend: str, model: str, version: str, replica: str) -> str:
    return str(Place(backend=backend, model=model, version=version, replica=replica))


def _add_used(fields: dict[str, Any], usage: Usage) -> None:
    """What is known of it."""
    if usage.input_tokens is not None:
        fields["input_tokens"] = usage.input_tokens
    if usage.output_tokens is not None:
        fields["output_tokens"] = usage.output_tokens
    if usage.cached_tokens is not None:
        fields["cached_tokens"] = usage.cached_tokens
    if usage.reasoning_tokens is not None:
        fields["reasoning_tokens"] = usage.reasoning_tokens
    if usage.is_estimated:
        fields["estimated"] = True
    if usage.cost_nano_usd is not None:
        fields["cost_usd"] = usage.cost_nano_usd / NANO_USD_PER_USD


def _ascii_json(fields: Mapping[str, Any]) -> str:
    """ASCII, so that no character can break the line."""
    try:
        line = orjson.dumps(fields)
    except orjson.JSONEncodeError:  # half a surrogate pair
        return json.dumps(fields, default=str)
    return line.decode() if line.isascii() else json.dumps(fields, default=str)
