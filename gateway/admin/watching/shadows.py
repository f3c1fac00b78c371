"""The control plane's paths about shadows: how their answers compare with those that callers got."""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from gateway.admin.access.door import CurrentVisit
from gateway.admin.fields import PAGE_SIZE, Body, Next
from gateway.admin.instants import instant
from gateway.admin_ports import ShadowSource
from gateway.core.errors import InvalidInput
from gateway.ports import JsonObject

MAX_PAGE: Final = 500
DEFAULT_PAGE: Final = 100
_CURSOR: Final = r"^[A-Za-z0-9_=-]{0,2000}$"
_NAMES: Final = ("rule", "task", "place", "shadow")


class DisagreementOut(Body):
    """Two answers that did not agree. What they said is kept nowhere."""

    request_id: str = Field(description="of the request that was copied")
    at: str = Field(description="RFC 3339, UTC")
    similarity: float | None = Field(description="1 = the same; null where the two have no measure in common")
    what: str = Field(description="what was compared: label, embedding, text, tool_calls, probability, tensors")
    reason: str = Field(description="how they differ, in words")


class ShadowReportOut(Body):
    """What became of a rule's copies, and how their answers compare with those of one place."""

    rule: str = Field(description="its name")
    task: str = Field(description="its name")
    place: str = Field(description="where callers' answers came from")
    shadow: str = Field(description="where the copies went")
    sent: int = Field(description="copies")
    compared: int = Field(description="of the copies that were sent and answered")
    agreed: int = Field(description="of those that were compared")
    agreement: float | None = Field(description="agreed / compared, 0 to 1")
    similarity_mean: float | None = Field(description="0 to 1; null: none was measured")
    similarity_p10: float | None = Field(description="nine of ten answers are more alike than this")
    failed: int = Field(description="copies that were sent and not answered")
    last_failure: str | None = Field(description="what the last one failed by, in one word")
    skipped: int = Field(
        description="not sent, or taken back, since real requests needed the room, or its place is shut"
    )
    primary_ms_mean: float | None = Field(description="milliseconds that callers' backends took")
    shadow_ms_mean: float | None = Field(description="milliseconds that the shadow took")
    latency_delta_ms: float | None = Field(description="milliseconds; above 0: the shadow is slower")
    shadow_cost_usd: float = Field(description="US dollars, of all copies; in no tenant's usage")
    cost_delta_usd: float | None = Field(
        description="US dollars that the copies cost more than their requests, where both are known"
    )
    since: str = Field(description="RFC 3339, UTC")
    disagreements: list[DisagreementOut] = Field(description="the last 20, the newest first")


class ShadowsOut(BaseModel):
    """Reports in the order of their names."""

    items: list[ShadowReportOut] = Field(description="in the order of their names")
    next: Next


def shadow_routes(source: ShadowSource) -> APIRouter:
    """`/shadows`."""
    router = APIRouter(tags=["shadows"])

    @router.get("/shadows")
    async def get_shadows(
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description=PAGE_SIZE)] = DEFAULT_PAGE,
        cursor: Annotated[str, Query(pattern=_CURSOR, description="`next` of the page before")] = "",
    ) -> ShadowsOut:
        """How shadows answer, by rule, task and pair of places, since the rule's report was begun."""
        after = _names(cursor)
        found = sorted((one for one in await source.read() if _key(one) > after), key=_key)
        following = _cursor(_key(found[limit - 1])) if len(found) > limit else None
        return ShadowsOut(items=[_out(one) for one in found[:limit]], next=following)

    @router.delete("/shadows/{rule:path}", status_code=204)
    async def delete_shadow(rule: Annotated[str, Path(description="the rule's name")], visit: CurrentVisit) -> None:
        """Forget a rule's report, and begin it anew with the next copy."""
        await source.forget(rule)
        visit.tell("shadow.forget", rule)

    return router


def _out(document: JsonObject) -> ShadowReportOut:
    fields = _at(document, "since_ms", "since")
    fields["disagreements"] = [_at(one, "at_ms", "at") for one in document["disagreements"]]
    return ShadowReportOut.model_validate(fields)


def _at(document: Mapping[str, Any], name: str, shown: str) -> dict[str, Any]:
    """The document with an instant as it is on the wire."""
    fields = dict(document)
    fields[shown] = instant(fields.pop(name))
    return fields


def _key(document: JsonObject) -> tuple[str, ...]:
    return tuple([document[name] for name in _NAMES])


def _cursor(names: Sequence[str]) -> str:
    return base64.urlsafe_b64encode(json.dumps(names).encode()).decode()


def _names(cursor: str) -> tuple[str, ...]:
    """The inverse of `_cursor`; nothing for none. Raises `InvalidInput`."""
    if not cursor:
        return ()
    try:
        names = json.loads(base64.urlsafe_b64decode(cursor))
    except (binascii.Error, ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidInput("cursor: is not one of a page before", field="cursor")
    return tuple(names)
