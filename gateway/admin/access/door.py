"""The control plane's door: who may enter, what they may do, and how much they may carry. Plain ASGI, before routing.

Everything needs a key, a token or a log-in, but the health pages and the console's page to log in.
"""

import asyncio
import hmac
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final
from urllib.parse import quote, urlsplit

from fastapi import Depends
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admin.access.actors import STATE, Actor, Visit, visit_of
from gateway.admin.access.auditing import MAX_REASON, REFUSALS, Audited, Auditing, cleaned
from gateway.admin.access.entry import Entry
from gateway.admin.access.failures import LONG_TOKEN, MAX_FAILURES, MAX_LOG_INS, Counts, network
from gateway.admin.access.roles import PREFIX, SAFE, Permit, is_enough, permit
from gateway.admin.problems import problem
from gateway.admin_ports import AuditLog, Session, Sessions
from gateway.core.errors import (
    BodyTooLarge,
    ClientClosed,
    Forbidden,
    GatewayError,
    InvalidInput,
    RateLimited,
    RequestTimeout,
    Unauthorized,
)

MAX_BODY_BYTES = 1024 * 1024  # a thousand rules are a third of that
MAX_LOGIN_BYTES: Final = 64 * 1024  # anybody may send one; a token has 16 KiB at most
BODY_S: Final = 30.0  # in which a body has to arrive
COOKIE: Final = "gateway_session"
CSRF: Final = "x-csrf-token"
REASON: Final = "x-change-reason"
CONSOLE: Final = "/console"
LOGIN_PAGE: Final = f"{CONSOLE}/login"
LOGIN: Final = ("POST", f"{PREFIX}/session")
OPEN: Final = ("/healthz/live", "/healthz/ready", LOGIN_PAGE)  # to GET alone: the console's library answers the rest
REFUSED: Final = "session.refused"  # in the audit log: of whoever was not let in


class Guard:
    """Looks at what a request shows of itself. One for a process: it remembers who has failed."""

    def __init__(self, entry: Entry, sessions: Sessions | None) -> None:
        self.entry = entry
        self.sessions = sessions
        self._failures = Counts()
        self._log_ins = Counts()

    async def by_token(self, token: bytes, *, address: str) -> Actor:
        """Who bears it. Ten failures of an address within a minute, and short tokens from it are not looked at.

        Long ones are, since none was ever found by trying: nobody is kept out because others fail from where he is.
        Raises `Unauthorized`, `RateLimited`, `Forbidden`, `RulesUnavailable`.
        """
        name, now_s = network(address), time.monotonic()
        wait_s = self._failures.left_s(name, now_s, most=MAX_FAILURES)
        if wait_s > 0 and len(token) < LONG_TOKEN:
            raise _too_many(wait_s)
        try:
            return await self.entry.actor(token, address=address)
        except Unauthorized:
            self._failures.add(name, now_s)
            if wait_s > 0:
                raise _too_many(wait_s) from None
            raise

    def count_log_in(self, actor: Actor) -> None:
        """Raise `RateLimited` where it is one too many of an actor's within a minute."""
        now_s = time.monotonic()
        wait_s = self._log_ins.left_s(actor.id, now_s, most=MAX_LOG_INS)
        if wait_s > 0:
            raise RateLimited("too many log-ins of this actor: wait", retry_after_us=round(wait_s * 1e6))
        self._log_ins.add(actor.id, now_s)

    async def visit(self, connection: HTTPConnection) -> Visit:
        """Who asks, by a bearer token or else by a log-in. Raises as `by_token` does."""
        address = address_of(connection.scope)
        given = connection.headers.getlist("authorization")
        if given:
            scheme, _, token = given[0].partition(" ")
            # What a client sends as UTF-8 comes to us as Latin-1.
            secret = token.strip().encode("latin-1") if scheme.lower() == "bearer" and len(given) == 1 else b""
            return Visit(actor=await self.by_token(secret, address=address))
        return await self.by_cookie(connection)

    async def by_cookie(self, connection: HTTPConnection) -> Visit:
        """Who asks, by a log-in. Raises `Unauthorized`, `RulesUnavailable`."""
        address = address_of(connection.scope)
        cookie = connection.cookies.get(COOKIE, "")
        session = await self.sessions.find(cookie) if self.sessions is not None and cookie else None
        actor = None if session is None else self.entry.actor_of(session, address=address)
        if session is None or actor is None:
            raise Unauthorized("log in, or send an admin key or token as `Authorization: Bearer ...`")
        return Visit(actor=actor, session=session)


class Door:
    """Lets a request in when its actor's role is enough for it and its body is at most 1 MiB, and comes in 30 s.

    The body is read here, whole, so that one of unknown length is bounded too. A log-in's cookie is sent by browsers
    without being asked: a change by it has to show that it comes from a page of ours. Leaves a `Visit` in the scope,
    and has the audit log told of changes and refusals.
    """

    def __init__(self, app: ASGIApp, guard: Guard, audit: AuditLog | None) -> None:
        self._app = app
        self._guard = guard
        self._auditing = Auditing(audit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] not in ("http", "websocket") or (scope["path"] in OPEN and scope.get("method") == "GET"):
            await self._app(scope, receive, send)
        elif _is_console(scope["path"]):
            await self._console(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._api(scope, receive, send)

    async def _api(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = HTTPConnection(scope)
        asked = permit(scope["method"], scope["path"])
        visit = None
        try:
            visit = await self._let_in(connection, asked)
            body = await _body(connection, receive)
        except GatewayError as error:
            if visit is not None and not visit.is_read_only:
                await self._auditing.write(visit, error.code)
            await problem(error)(scope, receive, send)
            return
        scope[STATE] = visit
        if visit.is_read_only:
            await self._app(scope, _replay(body, receive), send)
            return
        audited = Audited(send, self._auditing, visit, body)
        try:
            await self._app(scope, _replay(body, receive), audited)
        except asyncio.CancelledError:
            await audited.ended("interrupted")
            raise
        finally:
            await audited.ended()

    async def _let_in(self, connection: HTTPConnection, asked: Permit) -> Visit:
        """The visit, once it is known to be one that may be. Raises `GatewayError`, and has refusals written down."""
        visit = None
        try:
            visit = await self._known(connection)
            _check_role(visit.actor, asked)
            _check_page(connection, visit.session)
            visit.reason = _reason(connection.headers)
        except GatewayError as error:
            await self._note(connection, asked, visit, error)
            raise
        visit.action, visit.target, visit.is_read_only = asked.action, asked.target, not asked.action
        return visit

    async def _known(self, connection: HTTPConnection) -> Visit:
        if _is_login(connection):
            # Whoever logs in is known by what the body has, later: no cookie of before speaks for him.
            return nobody(address_of(connection.scope))
        return await self._guard.visit(connection)

    async def _note(self, connection: HTTPConnection, asked: Permit, visit: Visit | None, error: GatewayError) -> None:
        """Write down a refusal of a change, or of a token, whatever was asked with it."""
        is_try = visit is None and "authorization" in connection.headers and isinstance(error, REFUSALS)
        if not asked.action and not is_try:
            return
        if visit is None:
            visit = nobody(address_of(connection.scope))
            visit.action, visit.target = REFUSED, asked.action
        else:
            visit.action, visit.target = asked.action, asked.target
        await self._auditing.write(visit, error.code)

    async def _console(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pages, their files and WebSockets: by a log-in alone, and WebSockets and changes from pages of ours alone."""
        connection = HTTPConnection(scope)
        is_socket = scope["type"] == "websocket"
        try:
            visit = await self._guard.by_cookie(connection)
            if (is_socket or scope["method"] not in SAFE) and not _is_own(connection, or_none=False):
                raise Forbidden("not from a page of this console")
        except GatewayError as error:
            if is_socket:
                await send({"type": "websocket.close", "code": 1008})
            elif isinstance(error, Unauthorized) and scope["method"] in SAFE:
                to = f"{LOGIN_PAGE}?next={quote(scope['path'])}"
                await RedirectResponse(to, HTTPStatus.SEE_OTHER)(scope, receive, send)
            else:
                await problem(error)(scope, receive, send)
            return
        visit.is_read_only = True
        scope[STATE] = visit
        await self._app(scope, receive, send)


def _check_role(actor: Actor, asked: Permit) -> None:
    """Raise `Forbidden` where the actor's role is too little."""
    if not is_enough(actor.role, asked.role):
        raise Forbidden(f"this needs the role {asked.role}; '{actor.id}' has {actor.role}"[:300])


def nobody(address: str) -> Visit:
    """Of one who is not known, or not yet."""
    return Visit(actor=Actor(id="", role="viewer", kind="session", address=address))


def address_of(scope: Mapping[str, Any]) -> str:
    """From where a request comes, as far as the connection tells; no header is believed."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def _visit(request: Request) -> Visit:
    return visit_of(request.scope)


CurrentVisit = Annotated[Visit, Depends(_visit)]
"""The visit, as a parameter of a handler."""


def _is_console(path: str) -> bool:
    return path == CONSOLE or path.startswith((f"{CONSOLE}/", "/_nicegui"))


def _check_page(connection: HTTPConnection, session: Session | None) -> None:
    """Raise `Forbidden` for a change by a log-in that no page of ours has made, and for a log-in from elsewhere."""
    if connection.scope["method"] in SAFE:
        return
    if session is None and not _is_login(connection):
        return  # by a bearer token, which no browser sends by itself
    if not _is_own(connection, or_none=True):
        raise Forbidden("not from a page of this address")
    shown = connection.headers.get(CSRF, "").encode("latin-1")
    if session is not None and not hmac.compare_digest(shown, session.csrf.encode()):
        raise Forbidden("send the log-in's `csrf` (see GET /session) as X-CSRF-Token")


def _is_login(connection: HTTPConnection) -> bool:
    return (connection.scope["method"], connection.scope["path"]) == LOGIN


def _is_own(connection: HTTPConnection, *, or_none: bool) -> bool:
    """Whether the page that asks is of the host that is asked (RFC 6454, 7). `or_none`: what is not a page may, too.

    The schemes are not compared: a proxy may end TLS.
    """
    origins = connection.headers.getlist("origin")
    if not origins:
        return or_none
    host = connection.headers.get("host", "").lower()
    try:
        return len(origins) == 1 and bool(host) and urlsplit(origins[0]).netloc.lower() == host
    except ValueError:  # such as `http://[`
        return False


def _reason(headers: Headers) -> str:
    """Why a change is made, as the header says. Raises `InvalidInput`."""
    given = headers.get(REASON, "").encode("latin-1").decode(errors="replace")
    if len(given) > MAX_REASON:
        raise InvalidInput(f"X-Change-Reason may have {MAX_REASON} characters", field=REASON)
    return cleaned(given)


def _too_many(wait_s: float) -> RateLimited:
    return RateLimited("too many failures from this address: wait", retry_after_us=round(wait_s * 1e6))


async def _body(connection: HTTPConnection, receive: Receive) -> bytes:
    """The whole body. Raises `BodyTooLarge`, `RequestTimeout`, `ClientClosed`."""
    most = MAX_LOGIN_BYTES if _is_login(connection) else MAX_BODY_BYTES
    length = connection.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > most:
        raise BodyTooLarge(f"the body may have {most} bytes")
    try:
        async with asyncio.timeout(BODY_S):
            return await _received(receive, most)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {BODY_S:g} s") from None


async def _received(receive: Receive, most: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientClosed("the caller left")
        body += message.get("body", b"")
        if len(body) > most:
            raise BodyTooLarge(f"the body may have {most} bytes")
        if not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, then what the server still has to say."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
