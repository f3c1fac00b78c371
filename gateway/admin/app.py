"""The control plane's HTTP: read, replace and switch the routing rules, see that all workers run them; models; usage.

A change names the revision that it was made from (`If-Match`); it is taken whole or refused whole, and its
answer says how many live workers run it. All under `/admin/v1`; `/healthz/*` needs no token.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Response

from gateway.admin.door import Door
from gateway.admin.keys import key_routes
from gateway.admin.model_routes import ModelPlane, model_routes
from gateway.admin.models import (
    RuleApplied,
    RuleChange,
    RulesApplied,
    RulesIn,
    RulesOut,
    RulesValid,
    Workers,
)
from gateway.admin.problems import install_problems
from gateway.admin.usage import usage_routes
from gateway.admin_ports import KeyStore, RuleStore, UsageSource
from gateway.core.errors import MalformedRequest, RevisionRequired, StaleRevision, UnknownRule
from gateway.core.rules import Rule, RuleSet, parse_rules, rules_document, unrouted

PREFIX = "/admin/v1"
ATTEMPTS = 5  # of a PATCH that names no revision, against other writers
_ETAG = re.compile(r'(?:W/)?"(\d{1,15})"|(\d{1,15})')

Check = Callable[[Sequence[Rule]], None]
IfMatch = Annotated[str | None, Header(description="the revision that the change was made from")]


def create_admin_app(
    rule_store: RuleStore,
    admin_token: str,
    check: Check,
    known_tasks: Collection[str],
    *,
    models: ModelPlane | None = None,
    usage: UsageSource | None = None,
    keys: KeyStore | None = None,
) -> FastAPI:
    """The control plane over `rule_store`, `models` where it reaches servers, the books of `usage`, and `keys`.

    No `admin_token`: no entry.

    `check` raises `RuleError` for rules that do not fit the configuration.
    """
    app = FastAPI(
        title="Hybrid inference gateway: control plane",
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{PREFIX}/openapi.json",
    )
    app.add_middleware(Door, token=admin_token)
    install_problems(app)
    app.include_router(_rules(rule_store, check, known_tasks), prefix=PREFIX)
    app.include_router(_workers(rule_store), prefix=PREFIX)
    app.include_router(_health(rule_store))
    if models is not None:
        app.include_router(model_routes(models), prefix=PREFIX)
    if usage is not None:
        app.include_router(usage_routes(usage), prefix=PREFIX)
    if keys is not None:
        app.include_router(key_routes(keys, known_tasks), prefix=PREFIX)
    return app


def _rules(store: RuleStore, check: Check, tasks: Collection[str]) -> APIRouter:
    router = APIRouter(tags=["rules"])

    def warnings(rules: Sequence[Rule]) -> list[str]:
        return [f"no enabled rule takes the task '{task}': its requests are refused" for task in unrouted(rules, tasks)]

    @router.get("/rules")
    async def get_rules(response: Response) -> RulesOut:
        """The rules in force, with their revision as the ETag."""
        current = await store.get()
        _set_etag(response, current.revision)
        return RulesOut.model_validate(_document(current))

    @router.put("/rules")
    async def put_rules(body: RulesIn, response: Response, if_match: IfMatch = None) -> RulesApplied:
        """Replace the whole set; `If-Match` says which revision it replaces."""
        expected = body.revision if if_match is None else _revision(if_match)
        if expected is None:
            raise RevisionRequired("send If-Match with the revision that the rules were made from")
        rules = _parsed(body.rules, check)
        revision = await store.put(rules, expected_revision=expected)
        _set_etag(response, revision)
        saved = _document(RuleSet(revision=revision, rules=rules)) | {"warnings": warnings(rules)}
        return RulesApplied.model_validate({**saved, "applied": asdict(await store.applied(revision))})

    @router.post("/rules/validate")
    async def validate_rules(body: RulesIn) -> RulesValid:
        """Say whether a set would be taken, without taking it."""
        rules = _parsed(body.rules, check)
        return RulesValid.model_validate({"valid": True, "rules": rules_document(rules), "warnings": warnings(rules)})

    @router.patch("/rules/{name:path}")
    async def patch_rule(name: str, body: RuleChange, response: Response, if_match: IfMatch = None) -> RuleApplied:
        """Switch one rule on or off. Without `If-Match` it is done on whatever set is the newest."""
        expected = _revision(if_match)
        changed = await _switch(store, check, name, enabled=body.enabled, expected=expected)
        _set_etag(response, changed.revision)
        rule = next(rule for rule in changed.rules if rule.name == name)
        answer = {
            "revision": changed.revision,
            "rule": rules_document([rule])[0],
            "applied": asdict(await store.applied(changed.revision)),
            "warnings": warnings(changed.rules),
        }
        return RuleApplied.model_validate(answer)

    return router


def _workers(store: RuleStore) -> APIRouter:
    router = APIRouter(tags=["workers"])

    @router.get("/workers")
    async def get_workers() -> Workers:
        """The live data-plane workers and the revision that each of them runs."""
        return Workers.model_validate({"items": [asdict(w) for w in await store.workers()], "next": None})

    return router


def _health(store: RuleStore) -> APIRouter:
    router = APIRouter(prefix="/healthz", tags=["health"])

    @router.get("/live")
    async def live() -> dict[str, str]:
        """Whether the process runs."""
        return {"status": "live"}

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether the rules can be read."""
        await store.get()
        return {"status": "ready"}

    return router


async def _switch(store: RuleStore, check: Check, name: str, *, enabled: bool, expected: int | None) -> RuleSet:
    """Change one rule; returns the new set. Without `expected` it tries again after a conflict."""
    for _ in range(ATTEMPTS - 1):
        try:
            return await _switch_once(store, check, name, enabled=enabled, expected=expected)
        except StaleRevision:
            if expected is not None:
                raise
    return await _switch_once(store, check, name, enabled=enabled, expected=expected)


async def _switch_once(store: RuleStore, check: Check, name: str, *, enabled: bool, expected: int | None) -> RuleSet:
    current = await store.get()
    if expected is not None and expected != current.revision:
        raise StaleRevision(expected=expected, current=current.revision)
    if all(rule.name != name for rule in current.rules):
        known = ", ".join(rule.name for rule in current.rules) or "none"
        raise UnknownRule(f"no rule is named '{name}'; there are: {known}"[:500])
    rules = tuple(replace(rule, enabled=enabled) if rule.name == name else rule for rule in current.rules)
    check(rules)
    return RuleSet(revision=await store.put(rules, expected_revision=current.revision), rules=rules)


def _revision(if_match: str | None) -> int | None:
    """The revision in an `If-Match` header, quoted as an ETag or bare."""
    if if_match is None:
        return None
    found = _ETAG.fullmatch(if_match.strip())
    if found is None:
        raise MalformedRequest("If-Match must be a revision number")
    return int(found[1] or found[2])


def _parsed(rules: list[Any], check: Check) -> tuple[Rule, ...]:
    parsed = parse_rules(rules)
    check(parsed)
    return parsed


def _document(current: RuleSet) -> dict[str, Any]:
    return {"revision": current.revision, "rules": rules_document(current.rules)}


def _set_etag(response: Response, revision: int) -> None:
    response.headers["etag"] = f'"{revision}"'
