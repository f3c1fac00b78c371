"""`gateway rules history`, `show`, `rollback` and `export`: what the rules were, and the way back."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.admin_client import (
    EXIT_REFUSED,
    EXIT_USAGE,
    Admin,
    AdminToken,
    AdminUrl,
    Failure,
    Json,
    admin_of,
    query,
)
from gateway.cli.rules import words
from gateway.cli.rules.files import written
from gateway.cli.show import add, clock, confirm, examples, fields, finish, show, show_json, table, warn, when
from gateway.cli.terminal import say

app = typer.Typer()

_WHOLE = ("", "at (UTC)", "what")

Kept = Annotated[int, typer.Argument(metavar="REVISION", min=0, help="One of `gateway rules history`.")]


@app.command(epilog=examples("gateway rules history", "gateway rules history --limit 200 --json"))
def history(
    limit: Annotated[int, typer.Option(min=1, max=200, help="At most so many.")] = 20,
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Show the revisions that are kept, the newest first: who changed the rules, when, how and why."""
    items = admin_of(admin_url, admin_token).items("/rules/revisions", limit)
    if as_json:
        show_json({"items": items})
        return
    shown = table("revision", "", "at (UTC)", "by", "what", "rules", "note", right=("revision", "rules"), whole=_WHOLE)
    for one in items:
        there = "in force" if one["in_force"] else " "
        add(shown, one["revision"], there, when(one["at"]), one["by"], one["action"], one["rules"], one["note"])
    show(shown)


@app.command("show", epilog=examples("gateway rules show 41"))
def show_revision(
    revision: Kept, as_json: Json = False, admin_url: AdminUrl = "", admin_token: AdminToken = ""
) -> None:
    """Show the rules of one revision, and whose change it was."""
    found = admin_of(admin_url, admin_token).call("GET", f"/rules/revisions/{revision}")
    if as_json:
        show_json(found)
        return
    show(fields({"at": clock(found["at"]), "by": found["by"], "what": found["action"], "note": found["note"]}))
    show(words.rules_table(found["rules"], f"rules, revision {found['revision']}"))


@app.command(epilog=examples("gateway rules rollback --note 'version 2 is slow'", "gateway rules rollback 41 --yes"))
def rollback(
    revision: Annotated[
        int | None, typer.Argument(metavar="[REVISION]", min=0, help="Default: the one before the one in force.")
    ] = None,
    note: Annotated[str, typer.Option(metavar="WORDS", help="Why; kept with the revision.")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Put an older set in force again, as a new revision: nothing of the history is lost.

    It shows what that would change and asks: where nobody can be asked, say --yes.
    """
    admin = admin_of(admin_url, admin_token)
    current: int = admin.call("GET", "/rules")["revision"]
    wanted = _before(admin, current) if revision is None else revision
    changes = admin.call("GET", f"/rules/diff{query(**{'from': current, 'to': wanted})}")["changes"]
    if not as_json:
        show(words.changes_text(changes) if changes else f"revision {wanted} is no other set than {current}")
    confirm(f"put revision {wanted} in force in place of {current}?", yes=yes)
    body = {"revision": wanted, **({"note": note} if note else {})}
    changed = admin.call("POST", "/rules/rollback", body=body, revision=current)
    if as_json:
        show_json(changed)
    warn(changed)
    finish(changed, f"revision {wanted} is back as revision {changed['revision']}", quiet=as_json)


@app.command(epilog=examples("gateway rules export rules.yaml", "gateway rules export --revision 41 | less"))
def export(
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="Default, and -: stdout.")] = "-",
    revision: Annotated[int | None, typer.Option(min=0, help="Default: the one in force.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, which `apply` takes too.")] = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Write the rules as YAML that `apply` takes: always in the same form, so that two exports can be compared."""
    admin = admin_of(admin_url, admin_token)
    found = admin.call("GET", "/rules" if revision is None else f"/rules/revisions/{revision}")
    if as_json and file == "-":
        show_json({"revision": found["revision"], "rules": found["rules"]})
        return
    if as_json:
        raise Failure("give either a file or --json", EXIT_USAGE)
    text = written(found["rules"])
    if file == "-":
        typer.echo(text, nl=False)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"{file}: cannot be written ({error.strerror})", EXIT_USAGE) from error
    say(f"revision {found['revision']}: {len(found['rules'])} rules in {file}", err=True)


def _before(admin: Admin, current: int) -> int:
    """The revision before the one in force."""
    older: list[dict[str, Any]] = [one for one in admin.items("/rules/revisions", 2) if one["revision"] < current]
    if not older:
        raise Failure("refused: no revision before the one in force is kept", EXIT_REFUSED)
    return int(older[0]["revision"])
