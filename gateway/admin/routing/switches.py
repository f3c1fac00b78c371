"""The control plane's paths about switches: set for a while, listed with what they still wait for, and ended."""

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path

from gateway.admin.access.door import CurrentVisit
from gateway.admin.document import refuses
from gateway.admin.routing.switch_bodies import MAX_NAME, SwitchChanged, SwitchesOut, SwitchIn, switch_out
from gateway.admin_ports import RuleStore, WorkerState
from gateway.core.errors import InvalidInput, RulesUnavailable, TooManySwitches, UnknownSwitch
from gateway.core.rules import Match, Rule, Target
from gateway.core.rules.fields import RuleError, suggest
from gateway.core.switches import SCOPE_KINDS, SCOPES_OF, Action, Scope, ScopeKind, Switch
from gateway.core.types import ANY

_NAMED: Final = re.compile(r"[!-~]+")  # printable ASCII without spaces: model servers' addresses are among them
_ID_BYTES: Final = 5

Check = Callable[[Sequence[Rule]], None]


def switch_routes(store: RuleStore, check: Check, tasks: Collection[str]) -> APIRouter:
    """`/switches`. `check` raises `RuleError` for rules that name a backend that there is not; `tasks` there are."""
    router = APIRouter(tags=["switches"])

    @router.get("/switches")
    async def get_switches() -> SwitchesOut:
        """All that have not ended; what drains tells how many requests are still in flight."""
        switches = await store.switches()
        workers = await store.workers()
        now_ms = _now_ms()
        items = [
            switch_out(one, now_ms, **_drained(one, switches.revision, workers)) for one in reversed(switches.items)
        ]
        return SwitchesOut(revision=switches.revision, items=items, next=None)

    @router.post("/switches", status_code=201, openapi_extra=refuses(TooManySwitches))
    async def post_switch(body: SwitchIn, visit: CurrentVisit) -> SwitchChanged:
        """Set one. It stands above all rules until it is ended, or its time is over."""
        now_ms = _now_ms()
        switch = Switch(
            id=secrets.token_hex(_ID_BYTES),
            action=body.action,
            scope=_scope(body.action, body.scope, tasks, check),
            reason=body.reason,
            owner=visit.actor.id,
            created_ms=now_ms,
            expires_ms=now_ms + body.ttl_s * 1000,
            value=_value(body.action, body.value, check),
        )
        visit.tell("switch.add", switch.id, after=_told(switch), reason=body.reason)
        revision = await store.add_switch(switch)
        changed = await _changed(store, switch, revision)
        with contextlib.suppress(RulesUnavailable):  # it is set all the same
            changed.warnings = _unknown_server(switch.scope, await store.workers())
        return changed

    @router.delete("/switches/{switch_id}", openapi_extra=refuses(UnknownSwitch))
    async def delete_switch(
        switch_id: Annotated[str, Path(description="the switch's id")], visit: CurrentVisit
    ) -> SwitchChanged:
        """End one before its time."""
        switch, revision = await store.end_switch(switch_id)
        visit.tell("switch.end", switch_id, before=_told(switch))
        return await _changed(store, switch, revision)

    return router


async def _changed(store: RuleStore, switch: Switch, revision: int) -> SwitchChanged:
    applied = await store.applied(revision, of_switches=True)
    shown = switch_out(switch, _now_ms()).model_dump()
    return SwitchChanged.model_validate({**shown, "applied": asdict(applied)})


def _now_ms() -> int:
    return round(time.time() * 1000)


def _told(switch: Switch) -> Mapping[str, Any]:
    """What the audit log keeps of it."""
    return {
        "action": switch.action,
        "scope": str(switch.scope),
        "value": switch.value,
        "reason": switch.reason,
        "owner": switch.owner,
        "expires_ms": switch.expires_ms,
    }


def _drained(switch: Switch, revision: int, workers: Sequence[WorkerState]) -> dict[str, Any]:
    """How many requests a drain still waits for. A worker that does not name it has not counted since it was set."""
    if switch.action != "drain":
        return {}
    counts = [worker.report.get("drains", {}).get(switch.id) for worker in workers]
    told = [count for count in counts if isinstance(count, int)]
    if not told:
        return {}
    is_whole = len(told) == len(workers) and all(worker.switches >= revision for worker in workers)
    return {"in_flight": sum(told), "is_drained": is_whole and not sum(told)}


def _unknown_server(scope: Scope, workers: Sequence[WorkerState]) -> list[str]:
    """A warning for a server that no worker has: a name with a typo closes nothing, and is drained at once."""
    servers = {
        f"{backend}@{name}"
        for worker in workers
        for backend, names in worker.report.get("replicas", {}).items()
        for name in names
    }
    is_known = any(scope.name in (server, server.partition("@")[2]) for server in servers)
    if scope.kind != "replica" or is_known or not any(worker.report for worker in workers):
        return []
    there = f"there are: {', '.join(sorted(servers))}" if servers else "no backend has servers with names"
    return [f"no worker knows a server '{scope.name}' now; {there}"]


def _scope(action: Action, given: Mapping[str, Any], tasks: Collection[str], check: Check) -> Scope:
    """What a switch is for. Raises `InvalidInput`."""
    kinds = ", ".join(SCOPE_KINDS)
    kind = next((one for one in SCOPE_KINDS if one in given), None)
    if kind is None or len(given) != 1:
        raise InvalidInput(f"#/scope: give one of {kinds}", field="scope")
    if kind not in SCOPES_OF[action]:
        raise InvalidInput(f"#/scope: `{action}` is for one of {', '.join(SCOPES_OF[action])}", field="scope")
    name = given[kind]
    if kind == "everything":
        if name is not True:
            raise InvalidInput("#/scope/everything: must be true", field="scope.everything")
        return Scope(kind=kind)
    _check_name(kind, name)
    if kind == "task" and name not in tasks:
        raise InvalidInput(f"#/scope/task: unknown task '{name}'{suggest(name, tasks)}", field="scope.task")
    if kind == "backend":
        _check_backend(name, check, "scope.backend")
    return Scope(kind=kind, name=name)


def _check_name(kind: ScopeKind, name: object) -> None:
    if not isinstance(name, str) or not _NAMED.fullmatch(name) or len(name) > MAX_NAME:
        told = f"#/scope/{kind}: must be a name of at most {MAX_NAME} printable characters without spaces"
        raise InvalidInput(told, field=f"scope.{kind}")


def _value(action: Action, value: str, check: Check) -> str:
    """The backend that is forced; nothing else takes a value. Raises `InvalidInput`."""
    if action != "force_backend":
        if value:
            raise InvalidInput(f"#/value: `{action}` takes none", field="value")
        return ""
    if not value:
        raise InvalidInput("#/value: `force_backend` needs the name of a backend", field="value")
    _check_backend(value, check, "value")
    return value


def _check_backend(name: str, check: Check, field: str) -> None:
    """Raise `InvalidInput` for a backend to which no rule could send anything."""
    try:
        check([Rule(name=field, match=Match(), split=(Target(backend=name, model=ANY),))])
    except RuleError as error:
        told = str(error).rpartition("backend: ")[2]
        raise InvalidInput(f"#/{field.replace('.', '/')}: {told}", field=field) from error
