"""Logs: one JSON object a line; one line per request. Never bodies, prompts or secrets."""

import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

import orjson

from gateway.core.errors import GatewayError
from gateway.core.types import RequestRecord

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
        return orjson.dumps(line, default=str).decode()


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

    def ended(self, record: RequestRecord, error: GatewayError | None) -> None:
        """One line."""
        self._write(record, error)

    def refused(self, record: RequestRecord, error: GatewayError) -> None:
        """One line."""
        self._write(record, error)

    def _write(self, record: RequestRecord, error: GatewayError | None) -> None:
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
            fields["route"] = f"{route.backend}/{route.model}" + (f":{route.version}" if route.version else "")
            fields["rule"] = route.rule
            fields["attempts"] = route.attempts
        if record.rule_revision:
            fields["revision"] = record.rule_revision
        if record.timing:
            fields["backend_ms"] = record.timing.backend_us / 1000
        if record.usage.input_tokens is not None:
            fields["input_tokens"] = record.usage.input_tokens
        if record.usage.output_tokens is not None:
            fields["output_tokens"] = record.usage.output_tokens
        if error is not None:
            fields["detail"] = error.detail
            fields["reasons"] = record.reasons
        if record.degraded:
            fields["limiter"] = "degraded"
        cause = error.__cause__ if error is not None and error.code == "internal" else None
        if cause is not None:
            fields["exception"] = "".join(traceback.format_exception(cause))
        self._log.log(logging.ERROR if cause else logging.INFO, "request", extra=fields)
