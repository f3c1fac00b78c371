"""Logs: one JSON object a line; one line per request. Never bodies, prompts or secrets."""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

from gateway.core.errors import InternalError
from gateway.core.record import RequestRecord
from gateway.core.types import Place

ACCESS = "gateway.access"
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
        return json.dumps(line, default=str)  # ASCII, so that no character can break the line


def configure_logging() -> None:
    """Everything that this process logs goes to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    for noisy in ("uvicorn.error", "uvicorn.access", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class AccessLog:
    """An observer that writes one line per request; an internal error brings its stack trace along."""

    def __init__(self) -> None:
        self._log = logging.getLogger(ACCESS)

    def began(self, task: str) -> None:
        """Nothing is logged before the end."""

    def ended(self, record: RequestRecord) -> None:
        """One line."""
        self._write(record)

    def refused(self, record: RequestRecord) -> None:
        """One line."""
        self._write(record)

    def _write(self, record: RequestRecord) -> None:
        fields: dict[str, Any] = {
            "request_id": record.id,
            "task": record.task,
            "tenant": record.tenant,
            "key": record.key_id,
            "code": record.code,
            "status": record.status,
            "total_ms": record.total_us / 1000,
            "stream": record.stream,
        }
        if record.route:
            route = record.route
            fields["route"] = str(Place(backend=route.backend, model=route.model, version=route.version))
            fields["attempts"] = route.attempts
        if record.plan:
            fields["rule"], fields["revision"] = record.plan.rule, record.plan.revision
        if record.timing:
            fields["backend_ms"] = record.timing.backend_us / 1000
        if record.usage.input_tokens is not None:
            fields["input_tokens"] = record.usage.input_tokens
        if record.usage.output_tokens is not None:
            fields["output_tokens"] = record.usage.output_tokens
        if record.error or record.faults:
            fields["reasons"] = record.reasons
        if record.error:
            fields["detail"] = record.error.detail
        if record.degraded:
            fields["limiter"] = "degraded"
        cause = record.error.__cause__ if isinstance(record.error, InternalError) else None
        if cause is not None:
            fields["exception"] = "".join(traceback.format_exception(cause))
        self._log.log(logging.ERROR if cause else logging.INFO, "request", extra=fields)
