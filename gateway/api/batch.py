"""`POST /v1/infer/batch`: many requests in one body, each answered for itself, in their order.

Every item is a request of its own: with its own record, its own part of the limits, its own time. So what holds for
`POST /v1/infer` holds for each of them, and one that fails is no other's concern. They run at the same time, so that
they meet in one batch at their server.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from gateway.api.answers import json_answer
from gateway.api.body import json_object
from gateway.api.endpoint import Visit
from gateway.api.errors import problem_body
from gateway.api.headers import limit_headers
from gateway.api.request_headers import MAX_IDEMPOTENCY_KEY, MAX_ORDERING_KEY, idempotency_key
from gateway.api.tasks import answered
from gateway.core.errors import GatewayError, InternalError, InvalidInput, MalformedRequest
from gateway.core.types import ALLOWED, Verdict
from gateway.http.exchange import Response
from gateway.pipeline import Task

MAX_ITEMS: Final = 256
MAX_AT_ONCE: Final = 32  # of one body: the rest of a server's queue is for others
MAX_ID: Final = 128
MAX_KEY: Final = MAX_IDEMPOTENCY_KEY - len(f".{MAX_ITEMS}")  # each item has its number behind it
_OK: Final = 200
_FIELDS: Final = ("id", "task", "input", "parameters", "ordering_key")
_SEQUENCE: Final = "x-sequence-"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One request of a batch, as it was sent but for its id, which may be ours."""

    id: str
    task: str
    given: object
    parameters: object
    ordering_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An item's part of the answer, and how its limits stood then."""

    document: Mapping[str, Any]
    verdict: Verdict


async def infer_batch(visit: Visit) -> Response:
    """`{"requests": [{"id"?, "task", "input", "parameters"?, "ordering_key"?}]}` -> `{"responses": [...]}`."""
    items = _items(visit)
    visit.walked = True  # from here on each item writes its own record
    outcomes: list[Outcome | None] = [None] * len(items)
    # All runners take from one line, and nothing is waited for between an item's start and its admission: under one
    # ordering key items are admitted as they stand in the body. With an idempotency key something is: `_Order`.
    line = iter(enumerate(items))
    order = _Order(is_kept=bool(idempotency_key(visit.headers)))
    async with asyncio.TaskGroup() as group:  # the caller's leaving cancels all of them
        for _ in range(min(MAX_AT_ONCE, len(items))):
            group.create_task(_run(visit, line, order, outcomes))
    done = [outcome for outcome in outcomes if outcome is not None]
    response = json_answer({"responses": [outcome.document for outcome in done]})
    asked = [outcome.verdict for outcome in done if outcome.verdict is not ALLOWED]
    if asked:  # the last one was admitted last
        response.headers.update(limit_headers(replace(asked[-1], ticket=None)))
    return response


class _Order:
    """Lets an item begin once the one before under its ordering key is admitted, or has ended without.

    What is kept under an idempotency key is looked up before a request is admitted, and the answers of many look-ups
    come in any order.
    """

    def __init__(self, *, is_kept: bool) -> None:
        self._is_kept = is_kept
        self._last: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def place(self, ordering_key: str) -> AsyncGenerator[Callable[[], object], None]:
        """An item's; what is given is to be called when it is admitted."""
        admitted, before = asyncio.Event(), None
        if self._is_kept and ordering_key:
            before, self._last[ordering_key] = self._last.get(ordering_key), admitted
        try:
            if before is not None:
                await before.wait()
            yield admitted.set
        finally:
            admitted.set()


async def _run(visit: Visit, line: Iterator[tuple[int, Item]], order: _Order, outcomes: list[Outcome | None]) -> None:
    header = visit.headers.get("x-ordering-key", "")
    for number, item in line:
        async with order.place(item.ordering_key or header) as on_admitted:
            outcomes[number] = await _outcome(_visit(visit, number, item), item, on_admitted)


async def _outcome(visit: Visit, item: Item, on_admitted: Callable[[], object]) -> Outcome:
    """One item's answer, or its error in the answer's place."""
    try:
        document, started, _ = await answered(
            visit, _task(visit, item), item.given, item.parameters, on_admitted=on_admitted
        )
    except GatewayError as refused:
        error = refused
    except Exception as unforeseen:  # noqa: BLE001 - the item's boundary: it is no other item's concern
        _log.exception("item failed", extra={"request_id": visit.id})
        error = InternalError("the gateway failed on this request")
        error.__cause__ = unforeseen
    else:
        told = {"id": item.id, "status": _OK, "body": document}
        return Outcome(document=_with_ticket(told, started.verdict), verdict=started.verdict)
    visit.refused(error)
    verdict = error.verdict or ALLOWED
    told = {"id": item.id, "status": error.status, "body": problem_body(error)}
    return Outcome(document=_with_ticket(told, verdict), verdict=verdict)


def _task(visit: Visit, item: Item) -> Task:
    task = visit.enter(visit.api.task(item.task))
    if task.contract.is_sequence:
        raise InvalidInput(f"the task '{task.name}' keeps state: its requests go one by one", field="task")
    return task


def _with_ticket(told: dict[str, Any], verdict: Verdict) -> dict[str, Any]:
    return told if verdict.ticket is None else {**told, "ticket": verdict.ticket}


def _visit(visit: Visit, number: int, item: Item) -> Visit:
    """The item as if it had come alone, now: the batch's headers are its own."""
    headers = dict(visit.headers)
    body = b""
    if item.ordering_key:
        headers["x-ordering-key"] = item.ordering_key
    key = idempotency_key(visit.headers)
    if key:  # as it is it would make all items one request
        headers["idempotency-key"] = f"{key}.{number}"
        body = orjson.dumps([item.task, item.given, item.parameters, item.ordering_key])
    return replace(
        visit,
        id=f"{visit.id}-{number}",
        headers=headers,
        received_us=visit.api.pipeline.clock(),
        body=body,
        walked=False,
        trace=visit.api.traced(visit.headers, visit.scope),
    )


# --- the envelope --------------------------------------------------------------------------------


def _items(visit: Visit) -> list[Item]:
    """The body's items. Raises `MalformedRequest` and `InvalidInput` for what is wrong with the envelope itself."""
    if any(name.startswith(_SEQUENCE) for name in visit.headers):
        raise InvalidInput("a batch is no sequence: send its requests one by one", field="x-sequence-id")
    if len(idempotency_key(visit.headers)) > MAX_KEY:
        raise MalformedRequest(f"must be at most {MAX_KEY} characters with a batch", field="idempotency-key")
    document = json_object(visit.headers, visit.body)
    for name in document:
        if name != "requests":
            raise MalformedRequest("unknown field; this path takes requests", field=name[:80])
    requests = document.get("requests")
    if not isinstance(requests, list) or not 1 <= len(requests) <= MAX_ITEMS:
        raise InvalidInput(f"must be a list of 1 to {MAX_ITEMS} requests", field="requests")
    items = [_item(visit, number, one) for number, one in enumerate(requests)]
    seen: set[str] = set()
    for number, item in enumerate(items):
        if item.id in seen:
            raise InvalidInput("is given twice", field=f"requests[{number}].id")
        seen.add(item.id)
    return items


def _item(visit: Visit, number: int, one: object) -> Item:
    at = f"requests[{number}]"
    if not isinstance(one, Mapping):
        raise InvalidInput("must be an object", field=at)
    for name in one:
        if name not in _FIELDS:
            raise MalformedRequest(f"unknown field; a request has {', '.join(_FIELDS)}", field=f"{at}.{name[:80]}")
    if not isinstance(one.get("task"), str):
        raise InvalidInput("must be the name of a task; GET /v1/tasks lists them", field=f"{at}.task")
    return Item(
        id=_text(one, "id", at, longest=MAX_ID) or f"{visit.id}-{number}",
        task=one["task"],
        given=one.get("input"),
        parameters=one.get("parameters", {}),
        ordering_key=_text(one, "ordering_key", at, longest=MAX_ORDERING_KEY),
    )


def _text(one: Mapping[str, Any], name: str, at: str, *, longest: int) -> str:
    """A field that may be left out; empty then."""
    value = one.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or not 1 <= len(value) <= longest or not (value.isascii() and value.isprintable()):
        raise InvalidInput(f"must be a text of 1 to {longest} printable ASCII characters", field=f"{at}.{name}")
    return value
