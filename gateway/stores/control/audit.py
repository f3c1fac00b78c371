"""The audit log in Redis: the stream `{prefix}audit`, one entry (JSON) in the field `entry`, in Redis's own order.

Nothing of ours changes or takes away an entry; of about a million the oldest go, a month or a year of a busy control
plane. `gateway audit export` writes them elsewhere before.
"""

import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, fields
from typing import Any, Final

from redis.asyncio import Redis

from gateway.admin_ports import AuditEntry
from gateway.core.errors import MalformedRequest
from gateway.stores.redis_script import answering

KEPT: Final = 1_000_000  # some 300 MiB of Redis's memory
PAGE: Final = 500
_FIELD: Final = "entry"
_ID: Final = re.compile(r"\d{1,20}-\d{1,20}")
_OPTIONAL: Final = ("target", "before", "after", "reason", "address")
_Found = Any  # what the library says of streams is not what they give: a list of (id, fields), in bytes
_NAMES: Final = frozenset(field.name for field in fields(AuditEntry)) - {"id"}

_log = logging.getLogger(__name__)


class RedisAuditLog:
    """See `admin_ports.AuditLog`. Raises `RulesUnavailable` when Redis does not answer within `timeout_s`."""

    def __init__(self, client: Redis, prefix: str, *, timeout_s: float = 1.0, kept: int = KEPT) -> None:
        self._client = client
        self._key = f"{prefix}audit"
        self._timeout_s = timeout_s
        self._kept = kept

    async def add(self, entry: AuditEntry) -> None:
        """See `admin_ports.AuditLog`."""
        document = {name: value for name, value in asdict(entry).items() if value or name not in _OPTIONAL}
        del document["id"]
        written = json.dumps(document, separators=(",", ":"), default=str)
        async with self._bounded():
            await self._client.xadd(self._key, {_FIELD: written}, maxlen=self._kept, approximate=True)

    async def page(self, *, before: str = "", size: int = 100) -> tuple[list[AuditEntry], str | None]:
        """See `admin_ports.AuditLog`. Raises `MalformedRequest` for a `before` that is no id."""
        if before and not _ID.fullmatch(before):
            raise MalformedRequest("cursor: not the id of an entry")
        async with self._bounded():
            found: _Found = await self._client.xrevrange(
                self._key, f"({before}" if before else "+", "-", count=size + 1
            )
        following = _text(found[size - 1][0]) if len(found) > size else None
        return _read(found[:size]), following

    async def all(self) -> AsyncIterator[AuditEntry]:
        """See `admin_ports.AuditLog`. Those that are added meanwhile are among them."""
        after = "-"
        while True:
            async with self._bounded():
                found: _Found = await self._client.xrange(self._key, after, "+", count=PAGE)
            for entry in _read(found):
                yield entry
            if len(found) < PAGE:
                return
            after = f"({_text(found[-1][0])}"

    def _bounded(self) -> AbstractAsyncContextManager[None]:
        return answering("the audit log", self._timeout_s)


def _read(found: _Found) -> list[AuditEntry]:
    """Those that can be read; the others are logged."""
    entries = []
    for number, content in found:
        try:
            document: dict[str, Any] = json.loads(content[_FIELD.encode()])
            known = {name: value for name, value in document.items() if name in _NAMES}
            entries.append(AuditEntry(**known, id=_text(number)))
        except (ValueError, LookupError, TypeError, AttributeError):
            _log.warning("audit_unreadable", extra={"id": _text(number)})
    return entries


def _text(told: bytes | str) -> str:
    return told.decode() if isinstance(told, bytes) else told
