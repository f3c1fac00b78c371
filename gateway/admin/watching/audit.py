"""The control plane's paths about the audit log: its pages, the newest first, and all of it to keep elsewhere."""

import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.responses import StreamingResponse

from gateway.admin.document import refuses
from gateway.admin.fields import PAGE_SIZE, Next
from gateway.admin.instants import instant
from gateway.admin.watching.searching import DEFAULT_PAGE, MAX_PAGE, search
from gateway.admin_ports import AuditEntry, AuditLog
from gateway.core.errors import MalformedRequest

_CURSOR: Final = r"^\d{1,20}-\d{1,20}$"


class AuditOut(BaseModel):
    """Who did what."""

    id: str = Field(description="gives the order")
    at: str = Field(description="RFC 3339, UTC")
    actor: str = Field(description="empty: nobody who is known")
    role: str = Field(description="the actor's; `system` where the control plane acts by itself")
    origin: str = Field(serialization_alias="from", description="the address")
    action: str = Field(description="such as `rules.put`")
    target: str = Field(description="what it was done to: a rule's name, a key's id")
    before: Any = Field(description="what changed, as it was; null: nothing is told")
    after: Any = Field(description="what changed, as it is")
    reason: str = Field(description="why, in the actor's words")
    outcome: str = Field(description="`ok`, or the code of the error")


class AuditPage(BaseModel):
    """Entries, the newest first. Where they are searched, a page may be short and still have a next one."""

    items: list[AuditOut] = Field(description="the newest first")
    next: Next


class _Lines(StreamingResponse):
    media_type = "application/x-ndjson"


def audit_routes(audit: AuditLog) -> APIRouter:
    """`/audit`."""
    router = APIRouter(tags=["audit"])

    @router.get("/audit", openapi_extra=refuses(MalformedRequest))
    async def get_audit(
        actor: Annotated[str, Query(max_length=200, description="only of this one")] = "",
        action: Annotated[str, Query(max_length=200, description="whole, or what it begins with: `rules.`")] = "",
        target: Annotated[str, Query(max_length=200, description="only what was done to this")] = "",
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description=PAGE_SIZE)] = DEFAULT_PAGE,
        cursor: Annotated[str, Query(pattern=_CURSOR, description="`next` of the page before")] = "",
    ) -> AuditPage:
        """What was done, and what was refused; the newest first."""
        asked = _Asked(actor=actor, action=action, target=target)
        takes = None if asked.is_any() else asked.takes
        found, following = await search(audit.page, takes, cursor_of=lambda entry: entry.id, before=cursor, limit=limit)
        return AuditPage(items=[_out(entry) for entry in found], next=following)

    @router.get("/audit/export", response_class=_Lines)
    async def export_audit() -> StreamingResponse:
        """All of it, one entry (JSON) a line, the oldest first."""
        entries = aiter(audit.all())
        first = await anext(entries, None)  # so that a Redis that does not answer is an error, not an empty file

        async def lines() -> AsyncIterator[bytes]:
            if first is not None:
                yield _line(first)
            async for entry in entries:
                yield _line(entry)

        return _Lines(lines(), headers={"content-disposition": 'attachment; filename="audit.ndjson"'})

    return router


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Which entries are asked for; what is empty is any. An `action` that ends with a dot is what it begins with."""

    actor: str
    action: str
    target: str

    def is_any(self) -> bool:
        return not (self.actor or self.action or self.target)

    def takes(self, entry: AuditEntry) -> bool:
        of_kind = self.action.endswith(".") and entry.action.startswith(self.action)
        is_action = of_kind or self.action in ("", entry.action)
        return is_action and self.actor in ("", entry.actor) and self.target in ("", entry.target)


def _out(entry: AuditEntry) -> AuditOut:
    told = asdict(entry)
    at_ms, address = told.pop("at_ms"), told.pop("address")
    return AuditOut(**told, at=instant(at_ms), origin=address)


def _line(entry: AuditEntry) -> bytes:
    return json.dumps(_out(entry).model_dump(by_alias=True), ensure_ascii=False, default=str).encode() + b"\n"
