"""Every change, and every refusal, gets its entry in the audit log before it is answered."""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from http import HTTPStatus
from typing import Any, Final

from starlette.types import Message, Send

from gateway.admin.access.actors import Visit
from gateway.admin.access.failures import MAX_AUDITED, Counts, network
from gateway.admin_ports import AuditEntry, AuditLog
from gateway.core.errors import Forbidden, RateLimited, RulesUnavailable, Unauthorized

MAX_REASON: Final = 500
MAX_DETAIL_BYTES: Final = 16 * 1024  # of what was before, and after
REFUSALS: Final = (Unauthorized, Forbidden, RateLimited)
_FOLDED: Final = tuple(error.code for error in REFUSALS)
_ALL: Final = "*"

_log = logging.getLogger(__name__)


class Auditing:
    """Writes entries. What cannot be written is logged as JSON instead: a change that was made is answered as made."""

    def __init__(self, log: AuditLog | None) -> None:
        self._audit = log
        self._refused = Counts()

    async def write(self, visit: Visit, outcome: str) -> None:
        """What a visit has changed, or tried to.

        Of what nobody known has tried, and of what was refused, the first of an address within a minute is written.
        """
        actor = visit.actor
        if (not actor.id or outcome in _FOLDED) and not self._is_first(f"{network(actor.address)} {actor.id}"):
            return
        await self._add(
            AuditEntry(
                actor=actor.id,
                role=actor.role if actor.id else "",
                action=cleaned(visit.action),
                at_ms=time.time_ns() // 1_000_000,
                outcome=outcome,
                target=cleaned(visit.target)[:200],
                before=_bounded(visit.before),
                after=_bounded(visit.after),
                reason=visit.reason,
                address=actor.address,
            )
        )

    def _is_first(self, name: str) -> bool:
        """Whether it is the first refusal of its name, and not one of very many names, within a minute."""
        now_s = time.monotonic()
        return self._refused.add(name, now_s) == 1 and self._refused.add(_ALL, now_s) <= MAX_AUDITED

    async def _add(self, entry: AuditEntry) -> None:
        if self._audit is None:
            return
        try:
            await self._audit.add(entry)
        except RulesUnavailable:
            _log.error("audit_unwritten", extra={"entry": {k: v for k, v in asdict(entry).items() if v}})


class Audited:
    """A `send` that writes the visit's entry before the answer's start goes out.

    The start waits for the first part of an answer's body where that tells the code of an error.
    """

    def __init__(self, send: Send, auditing: Auditing, visit: Visit, body: bytes) -> None:
        self._send = send
        self._auditing = auditing
        self._visit = visit
        self._body = body
        self._held: Message | None = None
        self._is_written = False

    async def __call__(self, message: Message) -> None:
        """See ASGI."""
        if message["type"] == "http.response.start" and message["status"] >= HTTPStatus.BAD_REQUEST:
            self._held = message
            return
        if not self._is_written:
            await self._write("ok" if self._held is None else _code(message, self._held["status"]))
        if self._held is not None:
            held, self._held = self._held, None
            await self._send(held)
        await self._send(message)

    async def ended(self, outcome: str = "internal") -> None:
        """Write it where nothing was answered."""
        if not self._is_written:
            await self._write(outcome)

    async def _write(self, outcome: str) -> None:
        self._is_written = True
        if self._visit.is_read_only:  # as it turned out
            return
        self._visit.reason = cleaned(self._visit.reason or _reason_in(self._body))
        await self._auditing.write(self._visit, outcome)


def cleaned(words: str) -> str:
    """What somebody has written, such as a reason, on one line that orders nothing, cut to 500 characters."""
    return "".join(c if c.isprintable() else " " for c in words).strip()[:MAX_REASON]


def _reason_in(body: bytes) -> str:
    """The field `reason` or `note` of a body, where it has one."""
    try:
        found = json.loads(body) if body else None
    except (ValueError, RecursionError):  # refused by the handler already
        return ""
    if not isinstance(found, dict):
        return ""
    reason = found.get("reason") or found.get("note") or ""
    return reason if isinstance(reason, str) else ""


def _code(message: Message, status: int) -> str:
    """The code of the problem that an answer tells."""
    try:
        found: Any = json.loads(message.get("body", b"") or b"null")
    except ValueError:
        found = None
    code = found.get("code") if isinstance(found, Mapping) else None
    return code if isinstance(code, str) else f"status_{status}"


def _bounded(detail: Any) -> Any:
    """What a handler has told, unless it is too long to keep of every change."""
    if detail is None:
        return None
    size = len(json.dumps(detail, default=str))
    return detail if size <= MAX_DETAIL_BYTES else {"left_out": f"{size} bytes of JSON"}
