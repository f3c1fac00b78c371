"""`gateway switches`: what operators put above all rules for a while."""

import time
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from gateway.cli.admin_client import (
    EXIT_REFUSED,
    EXIT_USAGE,
    Admin,
    AdminToken,
    AdminUrl,
    Failure,
    Json,
    Reason,
    admin_of,
    part,
)
from gateway.cli.show import add, clock, examples, finish, seconds_of, show, show_json, span_words, table, warn
from gateway.cli.terminal import say

POLL_S: Final = 0.5
ALL: Final = 1000  # there are at most 100
LONGEST_S: Final = 7 * 86_400

app = typer.Typer(
    no_args_is_help=True,
    help="Switches above all rules, for a while: block, drain, force a backend or the fallbacks, freeze changes. They "
    "are in force everywhere within a second and end by themselves.",
    epilog="Exit codes: 0 done on all workers, 1 refused or not on all workers, 2 usage, 3 no control plane.",
)

Everything = Annotated[bool, typer.Option("--everything", help="All requests.")]
Tenant = Annotated[str, typer.Option(metavar="NAME", help="This tenant's requests.")]
Key = Annotated[str, typer.Option(metavar="ID", help="This key's requests.")]
Task = Annotated[str, typer.Option(metavar="NAME", help="This task's requests.")]
Model = Annotated[str, typer.Option(metavar="NAME[:VERSION]", help="This model, wherever it is.")]
Backend = Annotated[str, typer.Option(metavar="NAME", help="This backend, with all its servers.")]
Replica = Annotated[str, typer.Option(metavar="[BACKEND@]NAME", help="This server of a backend.")]
For = Annotated[str, typer.Option("--for", metavar="TIME", help="How long: 90s, 10m, 1h30m, 2d; a week at most.")]
Why = Annotated[
    str, typer.Option("--reason", metavar="WORDS", help="Why; shown to everybody and kept in the audit log.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Return when no request is in flight there any more.")]


@app.command("list", epilog=examples("gateway switches list", "gateway switches list --json"))
def list_switches(as_json: Json = False, admin_url: AdminUrl = "", admin_token: AdminToken = "") -> None:
    """Show the switches in force, and how long each still is."""
    items = _all(admin_of(admin_url, admin_token))
    if as_json:
        show_json({"items": items})
        return
    if not items:
        say("no switch is set")
        return
    headings = ("id", "what", "for", "left", "in flight", "by", "reason")
    shown = table(*headings, right=("left", "in flight"), whole=("id",))
    for one in items:
        add(
            shown,
            one["id"],
            words(one),
            scope_words(one["scope"]),
            span_words(one["remaining_s"]),
            "drained" if one.get("is_drained") else one.get("in_flight"),
            one["owner"],
            one["reason"],
        )
    show(shown)


@app.command(
    epilog=examples(
        "gateway switches block --tenant acme --for 10m --reason 'floods us'",
        "gateway switches block --model ocr:3 --for 2h --reason 'wrong answers'",
    )
)
def block(
    *,
    duration: For,
    reason: Why,
    everything: Everything = False,
    tenant: Tenant = "",
    key: Key = "",
    task: Task = "",
    model: Model = "",
    backend: Backend = "",
    replica: Replica = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Refuse these requests, or send nothing to this place. Requests that have begun go on."""
    scope = _scope(
        everything=everything, tenant=tenant, key=key, task=task, model=model, backend=backend, replica=replica
    )
    told = {"action": "block", "scope": scope}
    set_switch(admin_of(admin_url, admin_token), told, duration, reason, as_json=as_json)


@app.command(
    epilog=examples(
        "gateway switches drain --replica triton@10.0.0.7:8001 --for 30m --reason 'new driver' --wait",
        "gateway switches drain --backend triton --for 1h --reason 'its answers are wrong'",
    )
)
def drain(
    *,
    duration: For,
    reason: Why,
    everything: Everything = False,
    tenant: Tenant = "",
    key: Key = "",
    task: Task = "",
    model: Model = "",
    backend: Backend = "",
    replica: Replica = "",
    wait: Wait = False,
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Send nothing new there; what has begun, sequences too, goes on to its end."""
    scope = _scope(
        everything=everything, tenant=tenant, key=key, task=task, model=model, backend=backend, replica=replica
    )
    told = {"action": "drain", "scope": scope}
    set_switch(admin_of(admin_url, admin_token), told, duration, reason, wait=wait, as_json=as_json)


@app.command(
    "force-backend",
    epilog=examples("gateway switches force-backend local --task text-embedding --for 1h --reason 'Triton is slow'"),
)
def force_backend(
    to: Annotated[str, typer.Argument(metavar="BACKEND", help="Where they go, of the places that their rule has.")],
    *,
    duration: For,
    reason: Why,
    everything: Everything = False,
    tenant: Tenant = "",
    key: Key = "",
    task: Task = "",
    model: Model = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Send these requests to one backend only."""
    scope = _scope(everything=everything, tenant=tenant, key=key, task=task, model=model)
    told = {"action": "force_backend", "scope": scope, "value": to}
    set_switch(admin_of(admin_url, admin_token), told, duration, reason, as_json=as_json)


@app.command(
    "force-fallback",
    epilog=examples("gateway switches force-fallback --task ocr --for 30m --reason 'we try the way without Triton'"),
)
def force_fallback(
    *,
    duration: For,
    reason: Why,
    everything: Everything = False,
    tenant: Tenant = "",
    key: Key = "",
    task: Task = "",
    model: Model = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Send these requests to their rules' fallbacks only."""
    scope = _scope(everything=everything, tenant=tenant, key=key, task=task, model=model)
    told = {"action": "force_fallback", "scope": scope}
    set_switch(admin_of(admin_url, admin_token), told, duration, reason, as_json=as_json)


@app.command(epilog=examples("gateway switches freeze --for 2h --reason 'incident 31: nobody touches routing'"))
def freeze(
    *,
    duration: For,
    reason: Why,
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Let nobody change the rules. Switches can still be set and ended."""
    told = {"action": "freeze", "scope": {"everything": True}}
    set_switch(admin_of(admin_url, admin_token), told, duration, reason, as_json=as_json)


@app.command(epilog=examples("gateway switches end 3f2a91c04d --reason 'acme has fixed its client'"))
def end(
    switch_id: Annotated[str, typer.Argument(metavar="ID", help="As `gateway switches list` shows it.")],
    reason: Reason = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Take a switch away before its time."""
    end_switch(admin_of(admin_url, admin_token), switch_id, reason, as_json=as_json)


def set_switch(
    admin: Admin, told: Mapping[str, Any], duration: str, reason: str, *, wait: bool = False, as_json: bool = False
) -> None:
    """Set it, say how far it has got, and maybe wait until it is drained."""
    ttl_s = seconds_of(duration, "--for")
    if not 0 < ttl_s <= LONGEST_S:
        raise Failure(f"--for {duration}: a switch lasts from one second to a week", EXIT_USAGE)
    body = {**told, "reason": reason, "ttl_s": ttl_s}
    made = admin.call("POST", "/switches", body=body, reason=reason)
    warn(made)
    if as_json and not wait:
        show_json(made)
    # Scripts take it back by this line's id.
    finish(made, f"switch {made['id']} ({words(made)} {scope_words(made['scope'])})", quiet=as_json)
    if wait:
        drained = _drained(admin, made)
        if as_json:
            show_json(drained)
        else:
            say("drained: nothing is in flight there")


def end_switch(admin: Admin, switch_id: str, reason: str, *, as_json: bool = False) -> None:
    """End it, and say how far that has got."""
    ended = admin.call("DELETE", f"/switches/{part(switch_id)}", reason=reason)
    if as_json:
        show_json(ended)
    finish(ended, f"switch {ended['id']} ({words(ended)} {scope_words(ended['scope'])}) is ended", quiet=as_json)


def words(switch: Mapping[str, Any]) -> str:
    """What it does: `force backend local`."""
    return f"{switch['action'].replace('_', ' ')} {switch.get('value') or ''}".rstrip()


def scope_words(scope: Mapping[str, Any]) -> str:
    """What it is for: `tenant acme`."""
    kind, name = next(iter(scope.items()))
    return "everything" if kind == "everything" else f"{kind} {name}"


def _all(admin: Admin) -> list[dict[str, Any]]:
    return admin.items("/switches", ALL)


def _scope(*, everything: bool, **named: str) -> dict[str, Any]:
    """The one that was given; more would leave open whether all of them have to hold."""
    given: dict[str, Any] = {kind: name for kind, name in named.items() if name}
    if everything:
        given["everything"] = True
    if len(given) != 1:
        options = ", ".join(f"--{kind}" for kind in ("everything", *named))
        raise Failure(f"give exactly one of {options}", EXIT_USAGE)
    return given


def _drained(admin: Admin, switch: Mapping[str, Any]) -> dict[str, Any]:
    """Wait until nothing is in flight in its scope; on a terminal with the count, else a line for each change."""
    console, last = Console(stderr=True), ""
    try:
        with console.status("waiting") as status:
            while True:
                found = next((one for one in _all(admin) if one["id"] == switch["id"]), None)
                if found is None:
                    raise Failure(f"switch {switch['id']} ended before all was drained", EXIT_REFUSED)
                if found["is_drained"]:
                    return found
                count = found["in_flight"]
                line = "waiting for the workers' counts" if count is None else f"{count} in flight"
                left = f"the switch ends by itself at {clock(found['expires_at'])}"
                status.update(escape(f"{line}; {left}"))
                if line != last and not console.is_terminal:
                    say(line, err=True)
                last = line
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise Failure(
            f"switch {switch['id']} stays; `gateway switches end {switch['id']}` takes it away", EXIT_REFUSED
        ) from None
