"""The admin API as a page sees it: the same paths over the same door, in process, as the session's actor."""

import asyncio
from typing import Any, Final, cast

import httpx
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp

from gateway.admin.access.actors import visit_of
from gateway.admin.access.door import COOKIE
from gateway.admin.access.roles import PREFIX, is_enough, needed
from gateway.ports import JsonObject

ANSWER_S: Final = 30.0  # loads of models take longer, and say so themselves
UNAUTHORIZED: Final = 401


class ApiError(Exception):
    """What the API refused, in its own words. `body` is the problem document; `status` 0: no answer at all."""

    def __init__(self, status: int, detail: str, body: JsonObject | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.body = body or {}


class Api:
    """Asks the API for one page. A call never takes longer than its bound; a refusal is an `ApiError`."""

    def __init__(self, app: ASGIApp, connection: HTTPConnection) -> None:
        visit, client = visit_of(connection.scope), connection.client
        self._app = app
        self._cookie = connection.cookies[COOKIE]
        self._address = (client.host, client.port) if client else ("", 0)  # the browser's, for the audit log
        self.csrf = "" if visit.session is None else visit.session.csrf
        self.actor = visit.actor

    def may(self, method: str, path: str) -> bool:
        """Whether the session's role is enough for it."""
        return is_enough(self.actor.role, needed(method, PREFIX + path))

    async def get(self, path: str, **query: object) -> JsonObject:
        """What the API tells; parameters that are empty or None are left out."""
        given = {name: str(value) for name, value in query.items() if value not in (None, "")}
        return await self._ask("GET", path, query=given)

    async def change(
        self,
        method: str,
        path: str,
        *,
        body: JsonObject | None = None,
        reason: str = "",
        revision: int | None = None,
        within_s: float = ANSWER_S,
    ) -> JsonObject:
        """Make a change, or ask what it would do. `revision` is the one that it was made from."""
        headers = {b"x-change-reason": reason.encode()} if reason else {}
        if revision is not None:
            headers[b"if-match"] = b'"%d"' % revision
        return await self._ask(method, path, body=body, headers=headers, within_s=within_s)

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: JsonObject | None = None,
        headers: dict[bytes, bytes] | None = None,
        within_s: float = ANSWER_S,
    ) -> JsonObject:
        sent = {
            b"cookie": f"{COOKIE}={self._cookie}".encode("latin-1"),
            b"x-csrf-token": self.csrf.encode(),
            **(headers or {}),
        }
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False, client=self._address)
        try:
            async with (
                asyncio.timeout(within_s),
                httpx.AsyncClient(transport=transport, base_url="http://console", trust_env=False) as http,
            ):
                answer = await http.request(method, PREFIX + path, params=query, json=body, headers=sent)
        except TimeoutError:
            raise ApiError(0, f"the control plane did not answer within {within_s:g} s") from None
        except httpx.HTTPError as error:
            raise ApiError(0, f"the control plane did not answer: {type(error).__name__}") from error
        return _told(answer)


def _told(answer: httpx.Response) -> JsonObject:
    try:
        found = answer.json() if answer.content else {}
    except ValueError:
        found = {"detail": answer.text[:500]}
    if answer.is_error:
        body = found if isinstance(found, dict) else {}
        raise ApiError(answer.status_code, str(body.get("detail") or answer.reason_phrase), body)
    return cast("dict[str, Any]", found)
