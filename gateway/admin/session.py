"""The control plane's paths about who asks: log-ins of the console, begun and ended."""

import secrets
import time
from typing import Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from gateway.admin.access.actors import Actor, Kind
from gateway.admin.access.door import COOKIE, REFUSED, CurrentVisit, Guard
from gateway.admin.instants import instant
from gateway.admin_ports import Session, Sessions
from gateway.settings.admin import Role

_CSRF_BYTES: Final = 32


class SessionIn(BaseModel):
    """A log-in."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    token: SecretStr = Field(min_length=1, max_length=16 * 1024, description="an admin key, or the issuer's token")


class SessionOut(BaseModel):
    """Who asks."""

    actor: str = Field(description="the id of a key, or `oidc:` and a token's subject")
    role: Role = Field(description="what it may do")
    kind: Kind = Field(description="what the request has shown: a key, an issuer's token, or a log-in's cookie")
    csrf: str | None = Field(description="goes with every change by cookie, as X-CSRF-Token")
    expires_at: str | None = Field(description="when the log-in ends: RFC 3339, UTC")


def session_routes(guard: Guard) -> APIRouter:
    """`/session`; log-ins where there is a place to keep them."""
    router = APIRouter(tags=["session"])

    @router.get("/session")
    async def get_session(visit: CurrentVisit, response: Response) -> SessionOut:
        """Who asks, and what a change by cookie has to show."""
        response.headers["cache-control"] = "no-store"
        return _out(visit.actor, visit.session)

    if guard.sessions is not None:
        router.include_router(_log_ins(guard, guard.sessions))
    return router


def _log_ins(guard: Guard, sessions: Sessions) -> APIRouter:
    router = APIRouter()

    @router.post("/session")
    async def post_session(body: SessionIn, request: Request, response: Response, visit: CurrentVisit) -> SessionOut:
        """Log in: the answer sets a cookie that no script can read and no other site can send."""
        token = body.token.get_secret_value().encode(errors="replace")
        visit.tell(REFUSED)  # until it is known better
        visit.actor = await guard.by_token(token, address=visit.actor.address)
        guard.count_log_in(visit.actor)
        visit.tell("session.begin")
        key = guard.entry.key_of(token)
        session = Session(
            actor=visit.actor.id,
            role=visit.actor.role,
            csrf=secrets.token_urlsafe(_CSRF_BYTES),
            expires_s=int(time.time()) + guard.entry.session_ttl_s,
            key="" if key is None else key.mark,
        )
        if old := request.cookies.get(COOKIE):
            await sessions.end(old)
        cookie = await sessions.begin(session)
        response.set_cookie(
            COOKIE,
            cookie,
            max_age=guard.entry.session_ttl_s,
            httponly=True,
            samesite="strict",
            secure=_is_https(request),
        )
        response.headers["cache-control"] = "no-store"
        return _out(Actor(id=session.actor, role=visit.actor.role, kind="session"), session)

    @router.delete("/session", status_code=204, response_class=Response)
    async def delete_session(request: Request, response: Response, visit: CurrentVisit) -> None:
        """Log out."""
        if visit.session is None:  # who comes by a key has none, and nobody's audit log is filled with nothing
            visit.is_read_only = True
        else:
            visit.tell("session.end")
            await sessions.end(request.cookies[COOKIE])
        response.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=_is_https(request))

    return router


def _out(actor: Actor, session: Session | None) -> SessionOut:
    return SessionOut(
        actor=actor.id,
        role=actor.role,
        kind=actor.kind,
        csrf=None if session is None else session.csrf,
        expires_at=None if session is None else instant(session.expires_s * 1000),
    )


def _is_https(request: Request) -> bool:
    """Whether the browser speaks TLS, be it to us or to a proxy that ends it: its page's own address says so."""
    return request.url.scheme == "https" or request.headers.get("origin", "").startswith("https://")
