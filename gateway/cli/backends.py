"""`gateway backends` and `gateway workers`: the places that can answer, and the processes that send requests there."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from gateway.cli.admin_client import EXIT_REFUSED, Admin, AdminToken, AdminUrl, Failure, Json, Reason, admin_of
from gateway.cli.show import add, examples, figure, percent, show, show_json, table
from gateway.cli.switches import ALL, For, Wait, Why, end_switch, scope_words, set_switch
from gateway.cli.terminal import say

app = typer.Typer(
    no_args_is_help=True,
    help="Backends and their servers: health, requests in flight and waiting; take one out for a while, and in again.",
    epilog="Exit codes: 0 done on all workers, 1 refused or not on all workers, 2 usage, 3 no control plane.",
)
workers_app = typer.Typer()

Where = Annotated[str, typer.Argument(metavar="BACKEND[@REPLICA]", help="A backend, or one server of it.")]


@app.command("list", epilog=examples("gateway backends list", "gateway backends list --json"))
def list_backends(as_json: Json = False, admin_url: AdminUrl = "", admin_token: AdminToken = "") -> None:
    """Show every backend and server: what is in flight and waits there, and what keeps requests away from it."""
    found = admin_of(admin_url, admin_token).call("GET", "/backends")
    if as_json:
        show_json(found)
        return
    headings = ("backend", "server", "state", "in\nflight", "waiting", "switches")
    shown = table(*headings, right=("in\nflight", "waiting"), whole=("backend",))
    without: dict[str, list[str]] = {}
    for one in found["items"]:
        if not one["replicas"]:
            without.setdefault(one["detail"] or "no server", []).append(one["backend"])
        for row, is_open in _rows(one):
            add(shown, *row, style=None if is_open else "red")
    show(shown)
    for why, names in without.items():
        say(f"{', '.join(names)}: {why}")


@app.command(
    epilog=examples(
        "gateway backends drain triton@10.0.0.7:8001 --for 30m --reason 'new driver' --wait",
        "gateway backends drain triton --for 1h --reason 'wrong answers'",
    )
)
def drain(
    where: Where,
    *,
    duration: For,
    reason: Why,
    wait: Wait = False,
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Send nothing new there for a while; what has begun goes on. The same as `gateway switches drain`."""
    told = {"action": "drain", "scope": {"replica" if "@" in where else "backend": where}}
    set_switch(admin_of(admin_url, admin_token), told, duration, reason, wait=wait, as_json=as_json)


@app.command(epilog=examples("gateway backends resume triton@10.0.0.7:8001 --reason 'the driver is new'"))
def resume(
    where: Where,
    *,
    reason: Reason = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Send requests there again: end the drains of exactly this place. What still keeps them away is told."""
    admin = admin_of(admin_url, admin_token)
    mine, others = _closing(admin, where)
    if not mine:
        also = f"; but {_others_words(others)}" if others else ""
        raise Failure(f"no drain is set for {where}{also}", EXIT_REFUSED)
    for one in mine:
        end_switch(admin, one["id"], reason, as_json=as_json)
    if others:
        say(f"warning: {_others_words(others)}", err=True)


@workers_app.command(epilog=examples("gateway workers", "gateway workers --json"))
def workers(as_json: Json = False, admin_url: AdminUrl = "", admin_token: AdminToken = "") -> None:
    """Show the live workers of the data plane: which rules and switches each runs, and what it has in hand.

    Exits with 1 where one is behind or has refused the rules.
    """
    admin = admin_of(admin_url, admin_token)
    found = admin.call("GET", "/workers")
    items = found["items"]
    behind = [one["id"] for one in items if one.get("is_behind") or one["state"] != "serving"]
    if as_json:
        show_json(found)
    elif not items:
        say("no worker is running")
    else:
        _show_workers(items, behind)
    if behind:
        raise Failure(f"behind, or without the rules in force: {', '.join(behind)}", EXIT_REFUSED)


def _show_workers(items: Sequence[Mapping[str, Any]], behind: Sequence[str]) -> None:
    shown = table(
        "worker", "pid", "state", "rules", "switches", "in flight", right=("pid", "rules", "switches", "in flight")
    )
    for one in items:
        report = one.get("report") or {}
        state = f"{one['state']} {one.get('detail') or ''}".rstrip()
        state += ", behind" if one.get("is_behind") else ""
        count = sum(entry[-1] for entry in report.get("in_flight", ())) if report else None
        cells = (one["id"], one["pid"], state, one["revision"], one.get("switches"), figure(count))
        add(shown, *cells, style="red" if one["id"] in behind else None)
    show(shown)


def _rows(one: Mapping[str, Any]) -> Iterator[tuple[list[str], bool]]:
    """A row for each server of a backend, and whether requests go there."""
    servers: Sequence[Mapping[str, Any]] = one["replicas"]
    for i, server in enumerate(servers):
        waiting = figure(server["waiting"])
        if len(servers) > 1:  # they have one queue
            waiting = f"{figure(one['waiting'])} in all" if i == 0 else ""
        engine = server["engine"]
        name, kind = one["backend"], one["kind"]
        state = f"{_state(server)}\n{_engine_words(engine)}" if engine else _state(server)
        row = [
            name if name == kind else f"{name} ({kind})",
            server["replica"],
            state,
            figure(server["in_flight"]),
            waiting,
            ", ".join(server["switches"]),
        ]
        yield row, server["live"]


def _state(server: Mapping[str, Any]) -> str:
    """How a server is, and what is kept away from it."""
    how = "live" if server["live"] else "" if server["error"] else "not live"
    if server["live"] and server["latency_ms"] is not None:
        how += f", {server['latency_ms']:.1f} ms"
    # What is shut is often one model alone: the others are served there.
    return "\n".join(words for words in (how, server["error"], *server["shut"]) if words)


def _engine_words(engine: Mapping[str, Any]) -> str:
    used = engine.get("kv_used")
    cache = f", cache {percent(used)}" if used is not None else ""
    return f"{engine['running']:g} run, {engine['waiting']:g} wait{cache}"


def _closing(admin: Admin, where: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The drains of this place, and the other switches that keep requests away from it."""
    backend, _, replica = where.partition("@")
    mine: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    names = (where, replica) if replica else (where,)
    for one in admin.items("/switches", ALL):
        if one["action"] not in ("block", "drain"):
            continue
        scope = one["scope"]
        is_here = (scope.get("replica") in names) if replica else scope.get("backend") == where
        if is_here and one["action"] == "drain":
            mine.append(one)
        elif is_here or scope.get("backend") == backend or "everything" in scope:
            others.append(one)
    return mine, others


def _others_words(others: Sequence[Mapping[str, Any]]) -> str:
    words = (f"switch {one['id']} ({one['action']} {scope_words(one['scope'])}: {one['reason']})" for one in others)
    return f"requests are kept away by {', '.join(words)}"
