"""The control plane's paths about the last requests: how each was decided, and what became of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from gateway.admin.document import refuses
from gateway.admin.fields import PAGE_SIZE, Next
from gateway.admin.watching.searching import DEFAULT_PAGE, MAX_PAGE, search
from gateway.admin_ports import RequestLog
from gateway.core.errors import UnknownRequest
from gateway.ports import JsonObject

_CURSOR: Final = r"^[0-9-]{1,41}$"


class RequestOut(BaseModel):
    """A request that ended. Nothing of its input or its answer is kept."""

    id: str = Field(description="its `x-request-id`")
    trace_id: str = Field("", description="of the W3C trace that it is part of; empty: none")
    at_ms: int = Field(description="when it ended, Unix milliseconds")
    worker: str = Field(description="the id of the one that answered it")
    task: str = Field(description="empty: refused before it was known, as are other names")
    tenant: str = Field(description="whose key it was")
    key: str = Field(description="the key's id")
    model: str = Field(description="as the caller named it")
    version: str = Field(description="of the model, as the caller named it")
    priority: str = Field(description="interactive or batch")
    stream: bool = Field(description="whether a streamed answer was asked for")
    headers: dict[str, str] = Field(description="those that rules match on")
    input_bytes: int = Field(description="of its body")
    input_tokens: int | None = Field(description="tokens of its prompt; null: not known")
    session: str = Field(description="X-Session-Id")
    ordering_key: str = Field(description="X-Ordering-Key")
    status: int = Field(description="of the HTTP answer")
    code: str = Field(description="`ok`, or the error's")
    rule: str = Field(description="that took it; empty: none")
    revision: int = Field(description="of the rules")
    switches_revision: int = Field(description="of the switches")
    place: str = Field(description="which answered, or had it when it ended; empty: none")
    attempts: int = Field(description="how many were made at places")
    total_ms: float = Field(description="milliseconds from its arrival to its end")
    backend_ms: float = Field(description="milliseconds at backends")
    queue_ms: float | None = Field(description="milliseconds in queues, the gateway's and the server's; null: not told")
    first_token_ms: float | None = Field(
        description="milliseconds to the first part of a streamed answer; null: there was none"
    )
    usage: dict[str, float | None] = Field(
        description="input_tokens, output_tokens, and cost_usd in US dollars; null: not known"
    )
    recalled: str = Field("", description="hit, replayed or collapsed: an answer that was kept was given again")
    planned: int = Field(0, description="how many of the candidates could be tried")
    candidates: list[str] = Field(description="the places of its rule, those that could be tried first, in order")
    why: list[str] = Field(description="of each candidate, why it was taken or not")
    notes: list[str] = Field(default_factory=list, description="of no place: limits, switches")
    stands_for: int = Field(1, description="so many requests of its kind: not all are kept when there are very many")


class RequestsOut(BaseModel):
    """Requests, the newest first. Where they are searched, a page may be short and still have a next one."""

    items: list[RequestOut] = Field(description="the newest first")
    next: Next


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Which requests are asked for; what is empty is any."""

    fields: Mapping[str, str]
    backend: str

    def is_any(self) -> bool:
        return not self.backend and not any(self.fields.values())

    def takes(self, document: JsonObject) -> bool:
        is_there = not self.backend or str(document["place"]).startswith(f"{self.backend}/")
        return is_there and all(not value or document[name] == value for name, value in self.fields.items())


def request_routes(log: RequestLog) -> APIRouter:
    """`/requests`."""
    router = APIRouter(tags=["requests"])

    @router.get("/requests")
    async def get_requests(
        task: Annotated[str, Query(max_length=256, description="only of this task")] = "",
        tenant: Annotated[str, Query(max_length=256, description="only of this tenant")] = "",
        code: Annotated[str, Query(max_length=256, description="`ok`, or an error's")] = "",
        rule: Annotated[str, Query(max_length=256, description="only those that this rule took")] = "",
        backend: Annotated[str, Query(max_length=256, description="only those that this backend had last")] = "",
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description=PAGE_SIZE)] = DEFAULT_PAGE,
        cursor: Annotated[str, Query(pattern=_CURSOR, description="`next` of the page before")] = "",
    ) -> RequestsOut:
        """The last ones of all workers, the newest first, with the reasons for where they went."""
        asked = _Asked(fields={"task": task, "tenant": tenant, "code": code, "rule": rule}, backend=backend)
        takes = None if asked.is_any() else asked.takes
        found, following = await search(
            log.page, takes, cursor_of=lambda document: document["cursor"], before=cursor, limit=limit
        )
        return RequestsOut(items=[out(one) for one in found], next=following)

    @router.get("/requests/{request_id}", openapi_extra=refuses(UnknownRequest))
    async def get_request(request_id: Annotated[str, Path(description="or how it begins")]) -> RequestOut:
        """One of them, by its `x-request-id`, or the first 8 characters or more of it where only one begins so."""
        return out(await found_in(log, request_id))

    return router


async def found_in(log: RequestLog, request_id: str) -> JsonObject:
    """The document of a request. Raises `UnknownRequest`."""
    found = await log.find(request_id)
    if found is None:
        raise UnknownRequest(
            "no request of that id is on record: only the last ones are kept, and not all of very many"
        )
    return found


def out(document: JsonObject) -> RequestOut:
    """A document as it is shown; what a newer worker says beside is left out."""
    return RequestOut.model_validate(dict[str, Any](document))
