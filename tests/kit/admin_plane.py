"""A control plane whose every part is there: log-ins and the audit log over Redis, all else behind it gone."""

import contextlib
import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import fields
from typing import Any

import httpx
from fastapi import FastAPI
from redis.asyncio import Redis
from starlette.routing import compile_path
from starlette.types import ASGIApp

from gateway.admin.access.entry import AdminKey, Entry
from gateway.admin.access.roles import PREFIX, ROWS
from gateway.admin.app import create_admin_app
from gateway.admin.models.fleet import Servers
from gateway.admin.models.model_routes import ModelPlane
from gateway.admin.plane import Plane
from gateway.core.errors import RulesUnavailable
from gateway.stores.control.audit import RedisAuditLog
from gateway.stores.control.sessions import RedisSessions

ROLES = ("viewer", "operator", "admin")
SECRETS = {role: f"{role}-secret-of-more-than-thirty-two-characters" for role in ROLES}
KEYS = tuple(AdminKey.of_secret(f"key-{role}", secret, role) for role, secret in SECRETS.items())
HOST = "gateway.example"


class Gone:
    """A store that does not answer, whatever it is asked: who gets its 503 was let in."""

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("__"):
            raise AttributeError(name)

        async def gone(*_: object, **__: object) -> Any:
            raise RulesUnavailable("gone")

        return gone


def whole_plane(redis: Redis, prefix: str, **given: Any) -> Plane:
    """All parts of it; those that are not given are gone."""
    parts = {
        "tasks": ("t",),
        "audit": RedisAuditLog(redis, prefix),
        "sessions": RedisSessions(redis, prefix),
        "models": ModelPlane(
            servers=Servers(reachable={}, unreachable={}, kinds={}, repositories={}), deploys=Gone(), events=Gone()
        ),
        **given,
    }
    missing = {one.name for one in fields(Plane) if one.default is None} - parts.keys()
    return Plane(**parts, **{name: Gone() for name in missing})


def whole_app(redis: Redis, prefix: str, *, entry: Entry | None = None, **given: Any) -> FastAPI:
    return create_admin_app(whole_plane(redis, prefix, **given), entry or Entry(keys=KEYS))


@functools.cache
def declared() -> list[tuple[str, re.Pattern[str], set[tuple[int, str]]]]:
    """Every operation: its method, its path, and the refusals that the document declares for it."""
    document = whole_app(Gone(), "").openapi()
    rows = [(row.method, PREFIX + row.path) for row in ROWS]  # in the order in which they are tried
    rows += [("GET", path) for path in document["paths"] if path.startswith("/healthz")]
    found = []
    for method, path in rows:
        pattern, told, _ = compile_path(path)
        if told in document["paths"]:
            responses = document["paths"][told][method.lower()]["responses"]
            refusals = {(int(s), code) for s, one in responses.items() for code in one["description"].split(", ")}
            found.append((method, pattern, refusals))
    return found


class Asked(httpx.ASGITransport):
    """An app that is asked from an address. A refusal that the document does not declare for its operation fails."""

    def __init__(self, app: ASGIApp, *, address: str = "192.0.2.1") -> None:
        super().__init__(app, raise_app_exceptions=False, client=(address, 4321))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await super().handle_async_request(request)
        if answer.status_code < 400 or answer.status_code == 405 or request.method == "HEAD":
            return answer
        await answer.aread()
        for method, pattern, refusals in declared():
            if method == request.method and pattern.match(request.url.path):
                told = (answer.status_code, answer.json()["code"])
                assert told in refusals, f"{method} {request.url.path} gives {told}, which its document does not say"
                break
        return answer


def client(app: ASGIApp, *, address: str = "192.0.2.1", headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """A caller from an address; its cookies are its own."""
    return httpx.AsyncClient(
        transport=Asked(app, address=address),
        base_url=f"http://{HOST}/admin/v1",
        headers=headers,
    )


def bearing(app: FastAPI, token: str, *, address: str = "192.0.2.1") -> httpx.AsyncClient:
    return client(app, address=address, headers={"authorization": f"Bearer {token}"})


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The document of a refusal, which has to be this one."""
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    return answer.json()


@contextlib.asynccontextmanager
async def logged_in(app: FastAPI, token: str, *, address: str = "192.0.2.1") -> AsyncIterator[httpx.AsyncClient]:
    """A browser with a log-in, whose changes show its CSRF token."""
    async with client(app, address=address) as browser:
        answer = await browser.post("/session", json={"token": token})
        assert answer.status_code == 200, answer.text
        browser.headers["x-csrf-token"] = answer.json()["csrf"]
        yield browser
