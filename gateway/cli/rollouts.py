"""`gateway rollouts`: move a rule's requests to another place step by step, watched by a guard."""

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.cli.admin_client import (
    EXIT_REFUSED,
    EXIT_USAGE,
    Admin,
    AdminToken,
    AdminUrl,
    Failure,
    Json,
    admin_of,
    part,
)
from gateway.cli.rules.words import guard_words
from gateway.cli.show import (
    add,
    clock,
    confirm,
    examples,
    fields,
    figure,
    percent,
    place,
    seconds_of,
    show,
    show_json,
    table,
    when,
)
from gateway.cli.terminal import say, visible

POLL_S: Final = 0.5
CHANGE_S: Final = 30.0  # a change waits for the control plane that looks at the rule, 15 s at most, and for workers
OPEN: Final = "running"
_FIGURES: Final[Mapping[str, Callable[[float | None], str]]] = {
    "requests": figure,
    "attempts": figure,
    "failed_attempts": figure,
    "error_ratio": percent,
    "violation_ratio": percent,
    "p99_ms": figure,
    "first_token_p99_ms": figure,
    "compared": figure,
    "disagreement": percent,
}

app = typer.Typer(
    no_args_is_help=True,
    help="Progressive rollouts: a rule's requests move to a new place in steps; a guard holds or takes them back.",
    epilog="Exit codes: 0 done, 1 refused or ended otherwise than it was to, 2 usage, 3 no control plane.",
)

RolloutId = Annotated[str, typer.Argument(metavar="ID", help="As `gateway rollouts list` shows it.")]
Note = Annotated[str, typer.Option(metavar="WORDS", help="Why; kept with the rollout and in the audit log.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show it until it ends; Ctrl-C leaves it going on.")]


@app.command(
    epilog=examples(
        "gateway rollouts start nlu --to triton/text_embedding:2 --hold 5m --max-error-ratio 0.02 --max-p99-ms 300",
        "gateway rollouts start chat --to vllm/own --hold 1h --watch",
    )
)
def start(
    rule: Annotated[str, typer.Argument(metavar="RULE", help="Whose requests.")],
    *,
    to: Annotated[str, typer.Option(metavar="BACKEND/MODEL[:VERSION]", help="Where they shall go.")],
    steps: Annotated[str, typer.Option(metavar="PERCENTS", help="The share of each step.")] = "1,10,50,100",
    hold: Annotated[str, typer.Option(metavar="TIME", help="How long each step is held: 60s, 5m, 1h.")] = "60s",
    sticky_by: Annotated[
        str, typer.Option(metavar="WHAT", help="Keep callers on their side by: request, tenant, session, ordering_key.")
    ] = "",
    max_error_ratio: Annotated[float | None, typer.Option(min=0, max=1, help="Of attempts there.")] = None,
    max_p99_ms: Annotated[int | None, typer.Option(min=1, help="Of whole answers.")] = None,
    max_first_token_ms: Annotated[int | None, typer.Option(min=1, help="p99 of streams' first parts.")] = None,
    max_violation_ratio: Annotated[float | None, typer.Option(min=0, max=1, help="Answers that break a contract.")] = (
        None
    ),
    max_disagreement: Annotated[float | None, typer.Option(min=0, max=1, help="With the rule's shadow.")] = None,
    min_requests: Annotated[int | None, typer.Option(min=1, help="Judge nothing before so many in the window.")] = None,
    window: Annotated[str, typer.Option(metavar="TIME", help="What the guard looks at; default: 60s.")] = "",
    note: Note = "",
    watch: Watch = False,
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Begin a rollout. Without a --max-... the guard of the rule is the rollout's too."""
    guard = {
        "max_error_ratio": max_error_ratio,
        "max_p99_ms": max_p99_ms,
        "max_first_token_ms": max_first_token_ms,
        "max_violation_ratio": max_violation_ratio,
        "max_disagreement": max_disagreement,
        "min_requests": min_requests,
        "window_s": seconds_of(window, "--window") if window else None,
    }
    body = {
        "rule": rule,
        "target": _target(to),
        "steps": _steps(steps),
        "hold_s": seconds_of(hold, "--hold"),
        "guard": _said(guard),
        "sticky_by": sticky_by,
        "note": note,
    }
    admin = admin_of(admin_url, admin_token)
    begun = admin.call("POST", "/rollouts", body=_said(body), timeout_s=CHANGE_S)
    if watch:
        _end(_watched(admin, begun), as_json=as_json)
    elif as_json:
        show_json(begun)
    else:
        say(f"rollout {begun['id']}: {_headline(begun)}")


@app.command("list", epilog=examples("gateway rollouts list", "gateway rollouts list --json"))
def list_rollouts(as_json: Json = False, admin_url: AdminUrl = "", admin_token: AdminToken = "") -> None:
    """Show the rollouts that are known, the newest first."""
    items = admin_of(admin_url, admin_token).items("/rollouts", 100)
    if as_json:
        show_json({"items": items})
        return
    if not items:
        say("no rollout is known")
        return
    shown = table("id", "rule\nto", "state", "by", "why", whole=("id", "state"))
    for one in items:
        state = f"{one['status'].replace('_', ' ')}, {one['percent']:g} %"
        state += "\nheld" if one["held"] else f"\nnext {when(one['next_at'])}" if one["next_at"] else ""
        why = one["held"] or one["reason"] or one["note"]
        add(shown, one["id"], f"{one['rule']}\n{place(one['target'])}", state, one["actor"], why)
    show(shown)


@app.command(
    "show", epilog=examples("gateway rollouts show 73f51c2c7e1e", "gateway rollouts show 73f51c2c7e1e --watch")
)
def show_rollout(
    rollout_id: RolloutId,
    watch: Watch = False,
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Show one rollout: its step, both sides' figures, and what has happened.

    With --watch it exits with 0 when the rollout is done, with 1 when it ends otherwise.
    """
    admin = admin_of(admin_url, admin_token)
    found = admin.call("GET", f"/rollouts/{part(rollout_id)}")
    if watch:
        _end(_watched(admin, found), as_json=as_json)
    elif as_json:
        show_json(found)
    else:
        _show(found)


@app.command(epilog=examples("gateway rollouts promote 73f51c2c7e1e --note 'the figures are good'"))
def promote(
    rollout_id: RolloutId,
    note: Note = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Go on to the next step now."""
    _move(admin_of(admin_url, admin_token), rollout_id, "promote", note, as_json=as_json)


@app.command(epilog=examples("gateway rollouts abort 73f51c2c7e1e --note 'callers complain'"))
def abort(
    rollout_id: RolloutId,
    note: Note = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """End it, and share the rule's requests as before it."""
    confirm(f"abort rollout {rollout_id}, and share the requests as before it?", yes=yes)
    _move(admin_of(admin_url, admin_token), rollout_id, "abort", note, as_json=as_json)


def _move(admin: Admin, rollout_id: str, how: str, note: str, *, as_json: bool) -> None:
    body = {"note": note} if note else {}
    moved = admin.call("POST", f"/rollouts/{part(rollout_id)}/{how}", body=body, timeout_s=CHANGE_S)
    if as_json:
        show_json(moved)
    else:
        say(f"rollout {moved['id']}: {_headline(moved)}")


def _target(to: str) -> dict[str, str]:
    """`triton/text_embedding:2`; names of models may have `/` and `:` themselves."""
    backend, _, rest = to.partition("/")
    if not backend or not rest:
        raise Failure(f"--to {to}: write it as backend/model or backend/model:version", EXIT_USAGE)
    model, _, version = rest.rpartition(":")
    if model and version.isdecimal():
        return {"backend": backend, "model": model, "version": version}
    return {"backend": backend, "model": rest}


def _steps(text: str) -> list[int]:
    try:
        return [int(step) for step in text.split(",")]
    except ValueError as error:
        raise Failure(f"--steps {text}: write them as 1,10,50,100", EXIT_USAGE) from error


def _said(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value not in (None, "", {})}


def _headline(one: Mapping[str, Any]) -> str:
    """Where it is, in one line."""
    state = one["status"].replace("_", " ")
    line = f"{one['rule']} -> {place(one['target'])}: {state}, {one['percent']:g} %"
    if one["held"]:
        return f"{line}, held: {one['held']}"
    return f"{line}: {one['reason']}" if one["reason"] else line


def _show(one: Mapping[str, Any]) -> None:
    show(_headline(one))
    told = {
        "steps": ", ".join(f"{step:g} %" for step in one["steps"]) + f", each held for {one['hold_s']:g} s",
        "begun": f"{clock(one['started_at'])} by {one['actor']}",
        "next": clock(one["next_at"]) if one["next_at"] else "",
        "guard": ", ".join(guard_words(one["guard"])) if one["guard"] else "none: nothing is watched",
        "note": one["note"],
    }
    show(fields(told))
    show(_figures_table(one))
    for event in one["events"]:
        say(f"{clock(event['at'])}  {event['what']}")


def _figures_table(one: Mapping[str, Any]) -> Table:
    shown = table("", "new place", "old place", right=("new place", "old place"))
    for name, words in _FIGURES.items():
        pair = [(one[side] or {}).get(name) for side in ("canary", "baseline")]
        if pair != [None, None]:
            add(shown, name.replace("_", " "), *(words(value) for value in pair))
    return shown


def _watched(admin: Admin, begun: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow it to its end; on a terminal in one line that changes, else with a line for each change."""
    console, one, last = Console(stderr=True), begun, ""
    try:
        with console.status(escape(visible(_headline(one)))) as status:
            while True:
                line = _headline(one)
                canary = one["canary"] or {}
                errors = percent(canary.get("error_ratio"))
                status.update(escape(f"{line}; {figure(canary.get('requests'))} requests, errors {errors}"))
                if line != last and not console.is_terminal:
                    say(line, err=True)
                last = line
                if one["status"] != OPEN:
                    return one
                time.sleep(POLL_S)
                one = admin.call("GET", f"/rollouts/{part(begun['id'])}")
    except KeyboardInterrupt:
        raise Failure(
            f"rollout {begun['id']} goes on; `gateway rollouts abort {begun['id']}` takes it back", EXIT_REFUSED
        ) from None


def _end(ended: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        show_json(ended)
    else:
        _show(ended)
    if ended["status"] != "done":
        raise typer.Exit(EXIT_REFUSED)
