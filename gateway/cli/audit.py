"""`gateway audit`: who did what on the control plane, when, why and from where."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.admin_client import EXIT_USAGE, AdminToken, AdminUrl, Failure, Json, admin_of
from gateway.cli.show import add, examples, show, show_json, table, when
from gateway.cli.terminal import say

app = typer.Typer(
    no_args_is_help=True,
    help="Who did what on the control plane, when, why and from where.",
    epilog="Exit codes: 0 done, 1 refused, 2 usage, 3 no control plane.",
)
MAX_SHOWN = 10_000


@app.command(
    "list",
    epilog=examples("gateway audit list", "gateway audit list --action rules.", "gateway audit list --actor guard"),
)
def list_audit(
    *,
    actor: Annotated[str, typer.Option(metavar="NAME", help="Only of this one; guard and rollout act too.")] = "",
    action: Annotated[
        str, typer.Option(metavar="ACTION", help="Such as rules.put; `rules.` for all that begin so.")
    ] = "",
    target: Annotated[str, typer.Option(metavar="NAME", help="What was changed: a rule, a switch, a key.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=MAX_SHOWN, help="At most so many.")] = 50,
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Show the last entries, the newest first: what was refused is red, with its code.

    With --json they have what was before and after too.
    """
    admin = admin_of(admin_url, admin_token)
    items = admin.items("/audit", limit, actor=actor, action=action, target=target)
    if as_json:
        show_json({"items": items})
        return
    if not items:
        say("there are no such entries")
        return
    shown = table("at (UTC)", "who\nfrom", "what", "target", "why", whole=("at (UTC)",))
    for one in items:
        is_done = one["outcome"] == "ok"
        who = "\n".join(word for word in (f"{one['actor']} ({one['role']})", one["from"]) if word)
        what = one["action"] if is_done else f"{one['action']}\n{one['outcome']}"
        add(shown, when(one["at"]), who, what, one["target"], one["reason"], style=None if is_done else "red")
    show(shown)


@app.command(
    epilog=examples("gateway audit export audit.ndjson", "gateway audit export - | jq -c 'select(.actor==\"ci\")'")
)
def export(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A line for each entry, the oldest first; - = stdout.")],
    as_json: Annotated[bool, typer.Option("--json", help="Say how many there were as JSON, on stderr.")] = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Write the whole log as JSON, an entry a line."""
    lines = admin_of(admin_url, admin_token).lines("/audit/export")
    count = 0
    try:
        if file == "-":
            for count, line in enumerate(lines, 1):  # noqa: B007 - what is counted is said below
                sys.stdout.write(f"{line}\n")
        else:
            # Under its name only when it is whole: half a log looks like a log.
            unfinished = Path(f"{file}.part")
            with unfinished.open("w", encoding="utf-8") as writer:
                for count, line in enumerate(lines, 1):  # noqa: B007 - the same
                    writer.write(f"{line}\n")
            unfinished.replace(file)
    except OSError as error:
        raise Failure(f"{file}: cannot be written ({error.strerror})", EXIT_USAGE) from error
    if as_json:
        typer.echo(json.dumps({"entries": count}), err=True)
    else:
        say(f"{count:,} entries", err=True)
