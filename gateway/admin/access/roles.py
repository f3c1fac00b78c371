"""One table of the control plane's paths: which role each needs, and what a change by it is called in the audit log.

A test compares it with the OpenAPI document: a path that is not here fails it, and is the admins' until then.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from starlette.routing import compile_path

from gateway.admin.access.actors import ROLES
from gateway.settings.admin import Role

PREFIX: Final = "/admin/v1"
SAFE: Final = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing (RFC 9110, 9.2.1)."""

_READS: Final = (
    "/audit",
    "/backends",
    "/deploys",
    "/deploys/{deploy_id}",
    "/events",
    "/keys",
    "/keys/{key_id}",
    "/models",
    "/models/{model}",
    "/openapi.json",
    "/overview",
    "/requests",
    "/requests/{request_id}",
    "/rollouts",
    "/rollouts/{rollout_id}",
    "/rules",
    "/rules/diff",
    "/rules/revisions",
    "/rules/revisions/{revision}",
    "/session",
    "/shadows",
    "/switches",
    "/usage",
    "/workers",
)
"""What a viewer may look at: all of it, but the audit log as a whole."""

_ASKS: Final = ("/explain", "/rules/dry-run", "/rules/validate")
"""What is asked by POST and changes nothing."""

_CHANGES: Final[tuple[tuple[str, str, Role, str], ...]] = (
    ("POST", "/session", "viewer", "session.begin"),
    ("DELETE", "/session", "viewer", "session.end"),
    ("PUT", "/rules", "operator", "rules.put"),
    ("POST", "/rules/rollback", "operator", "rules.rollback"),
    ("PATCH", "/rules/{name:path}", "operator", "rules.change"),
    ("POST", "/switches", "operator", "switch.add"),
    ("DELETE", "/switches/{switch_id}", "operator", "switch.end"),
    ("POST", "/rollouts", "operator", "rollout.start"),
    ("POST", "/rollouts/{rollout_id}/promote", "operator", "rollout.promote"),
    ("POST", "/rollouts/{rollout_id}/abort", "operator", "rollout.abort"),
    ("DELETE", "/shadows/{rule:path}", "operator", "shadow.forget"),
    ("POST", "/models/{model}/load", "operator", "model.load"),
    ("POST", "/models/{model}/unload", "operator", "model.unload"),
    ("POST", "/models/{model}/deploy", "operator", "model.deploy"),
    ("POST", "/models/{model}/rollback", "operator", "model.rollback"),
    ("POST", "/deploys/{deploy_id}/rollback", "operator", "deploy.rollback"),
    ("POST", "/deploys/{deploy_id}/continue", "operator", "deploy.continue"),
    ("POST", "/keys", "admin", "key.create"),
    ("PATCH", "/keys/{key_id}", "admin", "key.change"),
    ("POST", "/keys/{key_id}/rotate", "admin", "key.rotate"),
    ("DELETE", "/keys/{key_id}", "admin", "key.delete"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One path with one method. `path` is without `/admin/v1`; `action` is empty where nothing is changed."""

    method: str
    path: str
    role: Role
    action: str = ""


def _rows() -> Iterator[Row]:
    for path in _READS:
        yield Row(method="GET", path=path, role="viewer")
    for path in _ASKS:
        yield Row(method="POST", path=path, role="viewer")
    yield Row(method="GET", path="/audit/export", role="admin")
    for method, path, role, action in _CHANGES:
        yield Row(method=method, path=path, role=role, action=action)


ROWS: Final = tuple(_rows())
_COMPILED: Final = tuple((row, compile_path(PREFIX + row.path)[0]) for row in ROWS)  # as the router reads them


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """What a request needs.

    Attributes:
        action: what it is in the audit log; empty where it changes nothing.
        target: what it is done to, as far as the path says.
    """

    role: Role
    action: str
    target: str


def permit(method: str, path: str) -> Permit:
    """What a request with this method and this whole path needs; one that is not in the table needs `admin`."""
    for row, pattern in _COMPILED:
        found = pattern.match(path) if row.method == method else None
        if found is not None:
            target = "".join(found.groupdict().values())[:200] if row.action else ""
            return Permit(role=row.role, action=row.action, target=target)
    return Permit(role="admin", action="" if method in SAFE else f"{method} {path}"[:200], target="")


def needed(method: str, path: str) -> Role:
    """The least role that may do this; the table's, and `admin` for what is not in it."""
    return permit(method, path).role


def is_enough(role: str, least: Role) -> bool:
    """Whether a role may do what `least` may; one that there is not may do nothing."""
    return role in ROLES and ROLES.index(role) >= ROLES.index(least)
