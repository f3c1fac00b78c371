"""Who may do what on the control plane: every path and method of it, each role, each way in, and each way to fail."""

import asyncio
import functools
import itertools
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jwt
import pytest
from starlette.responses import Response
from starlette.websockets import WebSocket

from gateway.admin.access import door
from gateway.admin.access.entry import Entry
from gateway.admin.access.issuer_keys import IssuerKeys
from gateway.admin.access.oidc import Oidc
from gateway.admin.access.roles import PREFIX, ROWS, needed
from gateway.admin_ports import Session
from gateway.settings.admin import OidcSettings
from gateway.stores.control.sessions import RedisSessions
from tests.kit.admin_plane import HOST, KEYS, ROLES, SECRETS, Gone, client, whole_app
from tests.kit.issuer import AUDIENCE, Issuer, public_pem

pytest_plugins = ["tests.kit.redis"]

METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
GROUPS = {"viewer": "readers", "operator": "ops", "admin": "root"}
"""What the issuer calls the roles."""
RANKS = {"viewer": 1, "operator": 2, "admin": 3}
ADDRESSES = (f"10.{a}.{b}.{c}" for a, b, c in itertools.product(range(256), range(256), range(256)))


@functools.cache
def document() -> dict[str, Any]:
    """The API's own document: the same for all apps, and slow to make."""
    return whole_app(Gone(), "").openapi()


def told_paths() -> set[tuple[str, str]]:
    """Every method and path that the document tells of."""
    return {(m.upper(), path) for path, item in document()["paths"].items() for m in item if path.startswith(PREFIX)}


class Everything:
    """The whole control plane, and how to come to it."""

    def __init__(self, app, issuer: Issuer, sessions: RedisSessions) -> None:
        self.app = app
        self.issuer = issuer
        self.sessions = sessions
        self.paths = sorted({path for _, path in told_paths()} | {f"{PREFIX}/openapi.json", f"{PREFIX}/nowhere"})

    async def ask(self, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
        """From an address of its own, so that no failure counts with another."""
        async with client(self.app, address=next(ADDRESSES)) as http:
            return await http.request(method, f"http://{HOST}{re.sub('{[^}]*}', 'x', path)}", headers=headers)

    async def session(self, role: str, *, lasts_s: int = 60) -> tuple[str, str]:
        """The cookie and the CSRF token of a log-in with the key of a role."""
        key = next(key for key in KEYS if key.role == role)
        session = Session(
            actor=key.id, role=role, csrf=f"csrf-{role}", expires_s=int(time.time()) + lasts_s, key=key.mark
        )
        return await self.sessions.begin(session), session.csrf


@pytest.fixture
async def plane(redis_client, redis_prefix) -> AsyncIterator[Everything]:
    async with Issuer() as issuer, httpx.AsyncClient(verify=False) as http:  # noqa: S501 - on loopback, and a context takes a while
        roles = {group: role for role, group in GROUPS.items()}
        oidc = Oidc(
            OidcSettings(issuer=issuer.url, audience=AUDIENCE, roles=roles),
            IssuerKeys(http, issuer=issuer.url, url=None),
        )
        app = whole_app(redis_client, redis_prefix, entry=Entry(keys=KEYS, oidc=oidc))
        app.openapi_schema = document()
        yield Everything(app, issuer, RedisSessions(redis_client, redis_prefix))


def is_login(method: str, path: str) -> bool:
    return (method, path) == ("POST", f"{PREFIX}/session")


def test_the_table_names_every_path_and_no_other():
    def plain(path: str) -> str:
        return re.sub(r"{[^}]*}", "{}", path)

    listed = {(row.method, plain(PREFIX + row.path)) for row in ROWS}
    told = {(method, plain(path)) for method, path in told_paths()}
    assert told - listed == set(), "paths that gateway/admin/access/roles.py does not name"
    assert listed - told - {("GET", f"{PREFIX}/openapi.json")} == set(), "rows for paths that there are not"


async def let_in(plane: Everything, role: str, headers) -> None:
    """Ask everything, and see that the role is what decides: too little is a 403, enough comes to the handler."""
    for path, method in itertools.product(plane.paths, METHODS):
        if is_login(method, path):
            continue
        if method == "DELETE" and path == f"{PREFIX}/session":
            continue  # would end what the others come by
        answer = await plane.ask(method, path, await headers(method))
        least = needed(method, re.sub("{[^}]*}", "x", path))
        if RANKS[role] < RANKS[least]:
            assert answer.status_code == 403, (method, path, answer.text)
            assert method == "HEAD" or answer.json()["code"] == "forbidden"
        else:
            assert answer.status_code not in (401, 403, 429), (method, path, answer.text)
            assert answer.status_code == 404 or not path.endswith("/nowhere")


@pytest.mark.parametrize("role", ROLES)
async def test_a_key_may_what_its_role_may(plane, role):
    async def headers(_: str) -> dict[str, str]:
        return {"authorization": f"Bearer {SECRETS[role]}"}

    await let_in(plane, role, headers)


@pytest.mark.parametrize("role", ROLES)
async def test_a_token_of_the_issuer_may_what_its_role_may(plane, role):
    token = plane.issuer.token(roles=["other", GROUPS[role]])

    async def headers(_: str) -> dict[str, str]:
        return {"authorization": f"Bearer {token}"}

    await let_in(plane, role, headers)
    assert plane.issuer.asked.count("/keys") == 1


@pytest.mark.parametrize("role", ROLES)
async def test_a_log_in_may_what_its_role_may(plane, role):
    cookie, csrf = await plane.session(role)

    async def headers(method: str) -> dict[str, str]:
        shown = {"cookie": f"gateway_session={cookie}", "origin": f"https://{HOST}"}
        return shown if method in ("GET", "HEAD", "OPTIONS") else {**shown, "x-csrf-token": csrf}

    await let_in(plane, role, headers)


def forged(token: str) -> str:
    head, claims, signature = token.split(".")
    return f"{head}.{claims}.{signature[:20]}{'A' if signature[20] != 'A' else 'B'}{signature[21:]}"


def hs256_by_the_public_key(issuer: Issuer) -> str:
    """What a checker takes that lets the token choose: signed with what everybody knows, as if it were a secret."""
    unsigned = jwt.encode(issuer.claims(roles=["root"]), "x" * 32, algorithm="HS256", headers={"kid": "one"})
    signed = unsigned.rpartition(".")[0]
    algorithm = jwt.get_algorithm_by_name("HS256")
    signature = algorithm.sign(signed.encode(), public_pem("one"))
    return f"{signed}.{jwt.utils.base64url_encode(signature).decode()}"


ROOT = {"roles": ["root"]}
BAD_TOKENS = {
    "empty": lambda _: "",
    "malformed": lambda _: "a.b.c",
    "unknown": lambda _: "some-admin-key-that-nobody-was-given",
    "nearly": lambda _: SECRETS["admin"] + "x",
    "expired": lambda issuer: issuer.token(exp=int(time.time()) - 60, **ROOT),
    "not yet": lambda issuer: issuer.token(nbf=int(time.time()) + 120, **ROOT),
    "without an end": lambda issuer: issuer.token(exp=None, **ROOT),
    "wrong audience": lambda issuer: issuer.token(aud="another", **ROOT),
    "no audience": lambda issuer: issuer.token(aud=None, **ROOT),
    "wrong issuer": lambda issuer: issuer.token(iss="https://another.example", **ROOT),
    "nobody": lambda issuer: issuer.token(sub=None, **ROOT),
    "alg none": lambda issuer: jwt.encode(issuer.claims(**ROOT), None, algorithm="none", headers={"kid": "one"}),
    "HS256 by the public key": hs256_by_the_public_key,
    "another algorithm": lambda issuer: issuer.token(algorithm="RS512", **ROOT),
    "forged": lambda issuer: forged(issuer.token(**ROOT)),
    "signed by another": lambda issuer: issuer.token(key="two", **ROOT),
    "unknown kid": lambda issuer: issuer.token(kid="three", **ROOT),
}


@pytest.mark.parametrize("kind", BAD_TOKENS)
async def test_a_bad_token_is_401_everywhere(plane, kind):
    token = BAD_TOKENS[kind](plane.issuer)
    for path, method in itertools.product(plane.paths, METHODS):
        if not is_login(method, path):
            answer = await plane.ask(method, path, {"authorization": f"Bearer {token}"})
            assert answer.status_code == 401, (kind, method, path, answer.text)
            assert answer.headers["www-authenticate"] == "Bearer"
    answer = await plane.ask("POST", f"{PREFIX}/session", {})
    assert answer.status_code == 422
    async with client(plane.app, address=next(ADDRESSES)) as http:
        logged = await http.post("/session", json={"token": token or "x"})
    assert (logged.status_code, logged.cookies) == (401, httpx.Cookies())


@pytest.mark.parametrize("kind", ["none", "expired session", "unknown session", "session of a lost key", "basic"])
async def test_nobody_is_401_everywhere(plane, kind):
    cookie, csrf = await plane.session("admin", lasts_s=60)
    lost = Session(actor="key-admin", role="admin", csrf=csrf, expires_s=int(time.time()) + 60, key="other")
    await plane.sessions.begin(lost)
    if kind == "expired session":
        over = Session(actor="key-admin", role="admin", csrf=csrf, expires_s=int(time.time()) - 1, key=KEYS[2].mark)
        cookie = await plane.sessions.begin(over)
    elif kind == "unknown session":
        cookie = cookie[::-1]
    elif kind == "session of a lost key":
        cookie = await plane.sessions.begin(lost)
    headers = {"cookie": f"gateway_session={cookie}", "x-csrf-token": csrf}
    if kind in ("none", "basic"):
        headers = {} if kind == "none" else {"authorization": f"Basic {SECRETS['admin']}"}
    for path, method in itertools.product(plane.paths, METHODS):
        if not is_login(method, path):
            answer = await plane.ask(method, path, headers)
            assert answer.status_code == 401, (kind, method, path, answer.text)


@pytest.mark.parametrize("kind", ["no token", "wrong token", "another's token", "cross-origin", "opaque origin"])
async def test_a_change_by_cookie_shows_that_it_comes_from_a_page_of_ours(plane, kind):
    cookie, csrf = await plane.session("admin")
    shown = {
        "no token": {},
        "wrong token": {"x-csrf-token": csrf + "x"},
        "another's token": {"x-csrf-token": "csrf-viewer"},
        "cross-origin": {"x-csrf-token": csrf, "origin": "https://evil.example"},
        "opaque origin": {"x-csrf-token": csrf, "origin": "null"},
    }[kind]
    for path, method in itertools.product(plane.paths, METHODS):
        if is_login(method, path):
            continue
        answer = await plane.ask(method, path, {"cookie": f"gateway_session={cookie}", **shown})
        if method in ("GET", "HEAD", "OPTIONS"):  # which change nothing, and which no other site can read
            assert answer.status_code not in (401, 403), (method, path, answer.text)
            assert "access-control-allow-origin" not in answer.headers
        else:
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), (method, path, answer.text)


async def test_a_token_without_a_role_is_403_everywhere(plane):
    for claims in ({"roles": ["other"]}, {"roles": None}, {"roles": "ROOT"}, {"roles": {"root": True}}):
        token = plane.issuer.token(**claims)
        for path in (f"{PREFIX}/rules", f"{PREFIX}/session", f"{PREFIX}/nowhere"):
            assert (await plane.ask("GET", path, {"authorization": f"Bearer {token}"})).status_code == 403


async def test_pages_of_health_are_open_and_nothing_else_is(plane):
    for path in ("/healthz/live", "/healthz/ready"):
        assert (await plane.ask("GET", path, {})).status_code in (200, 503)
    for path in ("/", "/docs", "/openapi.json", "/healthz", "/admin", "/metrics", "//admin/v1/rules"):
        assert (await plane.ask("GET", path, {})).status_code == 401


@pytest.mark.parametrize("path", ["/healthz/live", "/healthz/ready", "/console/login"])
async def test_what_is_open_is_open_to_a_get_alone(plane, path):
    """All else would be answered by the console's library, which keeps something of each page that it makes."""
    entered = []

    async def mounted(scope, receive, send) -> None:
        entered.append(scope["type"])
        await Response("made")(scope, receive, send)

    plane.app.mount("/", mounted)
    for method in ("HEAD", "OPTIONS", "TRACE", "POST", "PUT", "PATCH", "DELETE"):
        answer = await plane.ask(method, path, {})
        assert answer.status_code in (303, 401), (method, answer.text)
    assert await connected(plane, path, []) == ["websocket.close"]
    assert entered == []


@pytest.mark.parametrize("path", ["/console", "/console/", "/console/rules", "/_nicegui/3/static/x.js"])
async def test_the_console_is_for_those_who_are_logged_in(plane, path):
    answer = await plane.ask("GET", path, {})
    assert (answer.status_code, answer.headers["location"]) == (303, f"/console/login?next={path}")
    cookie, _ = await plane.session("viewer")
    shown = {"cookie": f"gateway_session={cookie}"}
    assert (await plane.ask("GET", path, shown)).status_code == 404  # there is no console here
    assert (await plane.ask("POST", path, {})).status_code == 401
    assert (await plane.ask("POST", path, shown)).status_code == 403  # no browser sends it without its origin
    assert (await plane.ask("POST", path, {**shown, "origin": "https://evil.example"})).status_code == 403
    assert (await plane.ask("POST", path, {**shown, "origin": f"https://{HOST}"})).status_code == 404
    assert (await plane.ask("GET", "/console/login", {})).status_code == 404


@pytest.mark.parametrize(
    ("path", "has_cookie", "origin", "enters"),
    [
        ("/console/_nicegui_ws/socket.io", True, f"http://{HOST}", True),
        ("/console/_nicegui_ws/socket.io", False, f"http://{HOST}", False),
        ("/console/_nicegui_ws/socket.io", True, "https://evil.example", False),
        ("/console/_nicegui_ws/socket.io", True, None, False),
        ("/_nicegui_ws/socket.io", True, "https://evil.example", False),
        ("/admin/v1/rules", True, f"http://{HOST}", False),
    ],
)
async def test_a_websocket_needs_a_log_in_and_a_page_of_ours(plane, path, has_cookie, origin, enters):
    cookie, _ = await plane.session("viewer")
    entered = []

    async def socket(websocket: WebSocket) -> None:
        entered.append(websocket.scope["path"])
        await websocket.close()

    plane.app.router.add_websocket_route("/{path:path}", socket)
    headers = [(b"cookie", f"gateway_session={cookie}".encode())] if has_cookie else []
    headers += [(b"origin", origin.encode())] if origin else []
    assert await connected(plane, path, headers) == ["websocket.close"]
    assert bool(entered) is enters


async def connected(plane: Everything, path: str, headers: list[tuple[bytes, bytes]]) -> list[str]:
    """What a WebSocket is told."""
    told = [(b"host", HOST.encode()), *headers]
    scope = {"type": "websocket", "path": path, "headers": told, "client": ("192.0.2.1", 1), "query_string": b""}
    sent = []

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message) -> None:
        sent.append(message["type"])

    await plane.app(scope, receive, send)
    return sent


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "null", "", "http://", f"http://{HOST}.evil.example"])
async def test_an_origin_that_is_none_of_ours_is_a_refusal(plane, origin):
    cookie, csrf = await plane.session("admin")
    shown = {"cookie": f"gateway_session={cookie}", "x-csrf-token": csrf, "origin": origin}
    for method, path in (("POST", "/admin/v1/session"), ("PUT", "/admin/v1/rules"), ("POST", "/console/x")):
        assert (await plane.ask(method, path, shown)).status_code == 403, (method, path)
    headers = [(b"cookie", shown["cookie"].encode()), (b"origin", origin.encode())]
    assert await connected(plane, "/console/_nicegui_ws/socket.io", headers) == ["websocket.close"]


async def test_a_body_has_so_long_to_arrive(plane, monkeypatch):
    monkeypatch.setattr(door, "BODY_S", 0.01)
    sent, parts = [], iter([{"type": "http.request", "body": b'{"token"', "more_body": True}])

    async def receive():
        return next(parts, None) or await asyncio.Event().wait()

    async def send(message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/admin/v1/session", "headers": [], "client": ("192.0.2.1", 1)}
    await plane.app({**scope, "query_string": b""}, receive, send)
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["code"] == "request_timeout"


async def test_a_log_in_carries_no_more_than_a_token(plane):
    async with client(plane.app, address=next(ADDRESSES)) as http:
        assert (await http.post("/session", json={"token": "x" * door.MAX_LOGIN_BYTES})).status_code == 413
        assert (await http.post("/session", json={"token": "x" * 16_000})).status_code == 401
