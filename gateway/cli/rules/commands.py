"""`gateway rules`: see, compare, try, replace and switch the routing rules through the control plane."""

from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gateway.cli.admin_client import (
    EXIT_REFUSED,
    EXIT_USAGE,
    Admin,
    AdminToken,
    AdminUrl,
    Failure,
    Json,
    Refusal,
    admin_of,
    part,
    query,
)
from gateway.cli.rules import history, words
from gateway.cli.rules.files import RuleFile, read
from gateway.cli.show import clock, confirm, examples, finish, show, show_json, warn
from gateway.cli.terminal import say
from gateway.settings.yaml_text import YamlFault, read_yaml

EXIT_DIFFERENT = 1  # of `diff`, as of diff(1), which has 2 for trouble
EXIT_TROUBLE = 2
MAX_LAST = 10_000
UNREADABLE = "the rules in force cannot be read now, so nothing can be held against them"

app = typer.Typer(
    no_args_is_help=True,
    help="Routing rules: see, compare, try, replace and switch them while the gateway runs; take changes back.",
    epilog="Exit codes: 0 done on all workers, 1 refused or not on all workers, 2 usage, 3 no control plane. "
    "Of `diff`: 0 no difference, 1 differences, 2 trouble, 3 no control plane.",
)
app.registered_commands += history.app.registered_commands

File = Annotated[
    str, typer.Argument(metavar="FILE", help="YAML or JSON: `rules:` with a list, or the list; - = stdin.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The rule's name.")]
Note = Annotated[str, typer.Option(metavar="WORDS", help="Why; kept with the revision and in the audit log.")]


@app.command(epilog=examples("gateway rules get", "gateway rules get --json > rules.json"))
def get(as_json: Json = False, admin_url: AdminUrl = "", admin_token: AdminToken = "") -> None:
    """Show the rules in force. With --json as `apply` takes them."""
    current = admin_of(admin_url, admin_token).call("GET", "/rules")
    if as_json:
        show_json(current)
        return
    show(words.rules_table(current["rules"], f"rules, revision {current['revision']}"))
    if frozen := current.get("frozen"):
        say(
            f"changes are frozen until {clock(frozen['expires_at'])} UTC by {frozen['owner']}: {frozen['reason']}",
            err=True,
        )


@app.command(
    epilog=examples(
        "gateway rules diff rules.yaml", "gateway rules diff --from 41", "gateway rules diff --from 41 --to 43 --json"
    )
)
def diff(
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="Held against the rules in force; - = stdin.")] = "",
    first: Annotated[int | None, typer.Option("--from", min=0, metavar="REVISION", help="The older one.")] = None,
    last: Annotated[
        int | None, typer.Option("--to", min=0, metavar="REVISION", help="The newer one; default: in force.")
    ] = None,
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Show what a file would change, or what has changed between two revisions.

    Exits with 0 where nothing differs, 1 where something does, 2 where that cannot be told.
    """
    if bool(file) == (first is not None) or (file and last is not None):
        raise Failure("give a file, or --from REVISION and maybe --to REVISION", EXIT_USAGE)
    admin = admin_of(admin_url, admin_token)
    try:
        if file:
            found = _validated(admin, read(file))
        else:
            found = admin.ask("GET", f"/rules/diff{query(**{'from': first, 'to': last})}")
    except Refusal as refusal:
        raise Failure(refusal.line, max(refusal.exit_code, EXIT_TROUBLE)) from refusal
    changes = found["changes"]
    if changes is None:
        raise Failure(UNREADABLE, EXIT_TROUBLE)
    if as_json:
        show_json({"changes": changes})
    else:
        _show_changes(changes)
    raise typer.Exit(EXIT_DIFFERENT if changes else 0)


@app.command(
    epilog=examples(
        "gateway rules check rules.yaml",
        "gateway rules check rules.yaml --last 10000",
        "gateway rules check rules.yaml --offline --config deploy/gateway.yaml",
    )
)
def check(
    file: File,
    *,
    last: Annotated[int, typer.Option(min=1, max=MAX_LAST, help="Try them on so many of the last requests.")] = 1000,
    samples: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Try them on these requests instead: a list, as of `explain`.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no control plane; see --config.")] = False,
    config: Annotated[
        Path, typer.Option(metavar="FILE", envvar="GATEWAY_CONFIG", help="With --offline: what they have to fit.")
    ] = Path("deploy/gateway.yaml"),
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Say whether a set would be taken, what it would change, and what would have become of the last requests.

    A fault is told with its line. Nothing is changed.
    """
    given = read(file)
    if offline:
        from gateway.cli.rules.offline import checked

        found = checked(given, config)
    else:
        admin = admin_of(admin_url, admin_token)
        found = _valid(admin, given)
        found["dry_run"] = _dry_run(admin, given, last, samples)
    if as_json:
        show_json(found)
        return
    say(f"{given.name}: good ({len(given.rules)} rules)")
    warn(found)
    if found["changes"] is None:
        say(f"warning: {UNREADABLE}", err=True)
    else:
        _show_changes(found["changes"])
    for line in words.dry_run_words(found["dry_run"]) if found.get("dry_run") else ():
        say(line)


@app.command(
    epilog=examples(
        "gateway rules apply rules.yaml --note 'ticket 812'", "gateway rules apply --yes --expect 7 - < rules.yaml"
    )
)
def apply(
    file: File,
    *,
    note: Note = "",
    expect: Annotated[
        int | None,
        typer.Option(help="Refuse unless this revision is in force; default: the one in force now.", min=0),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Replace the whole set; it is taken whole or refused whole.

    It shows what would change and asks: where nobody can be asked, say --yes. When somebody else was quicker it shows
    what they have changed.
    """
    given = read(file)
    admin = admin_of(admin_url, admin_token)
    revision: int = admin.call("GET", "/rules")["revision"]
    valid = _valid(admin, given)
    changes = valid["changes"]
    if changes is None:
        raise Failure(f"refused: {UNREADABLE}", EXIT_REFUSED)
    if not as_json:
        _show_changes(changes)
    warn(valid)  # before it is asked: what is put then says no more
    if not changes and expect in (None, revision):
        _still_in_force(admin, revision, as_json=as_json)
        return
    if changes:
        confirm(f"put this in force in place of revision {revision}?", yes=yes)
    changed = _put(admin, given, note, revision if expect is None else expect)
    if as_json:
        show_json(changed)
    finish(changed, f"saved as revision {changed['revision']}", quiet=as_json)


@app.command(epilog=examples("gateway rules enable embeddings-canary --note 'ticket 812'"))
def enable(
    name: Name, note: Note = "", as_json: Json = False, admin_url: AdminUrl = "", admin_token: AdminToken = ""
) -> None:
    """Switch one rule on."""
    _patch(admin_of(admin_url, admin_token), name, {"enabled": True, "note": note}, as_json=as_json)


@app.command(epilog=examples("gateway rules disable embeddings-canary --note 'slow answers'"))
def disable(
    name: Name, note: Note = "", as_json: Json = False, admin_url: AdminUrl = "", admin_token: AdminToken = ""
) -> None:
    """Switch one rule off: its requests go to the next rule that takes them, or are refused if there is none."""
    _patch(admin_of(admin_url, admin_token), name, {"enabled": False, "note": note}, as_json=as_json)


@app.command(epilog=examples("gateway rules weights embeddings-canary 90 10 --note 'ten percent to version 2'"))
def weights(
    name: Name,
    shares: Annotated[list[int], typer.Argument(metavar="WEIGHT...", min=0, help="In the order of the rule's split.")],
    note: Note = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Share a rule's requests anew among the places of its split."""
    _patch(admin_of(admin_url, admin_token), name, {"weights": shares, "note": note}, as_json=as_json)


def _patch(admin: Admin, name: str, change: Mapping[str, Any], *, as_json: bool) -> None:
    body = {field: value for field, value in change.items() if value != ""}
    changed = admin.call("PATCH", f"/rules/{part(name)}", body=body)
    if as_json:
        show_json(changed)
    else:
        show(words.rules_table([changed["rule"]], f"rules, revision {changed['revision']}"))
    warn(changed)
    finish(changed, f"saved as revision {changed['revision']}", quiet=as_json)


def _validated(admin: Admin, given: RuleFile) -> dict[str, Any]:
    """What the control plane makes of the file. Raises `Refusal`, with the line of the fault."""
    try:
        return admin.ask("POST", "/rules/validate", body={"rules": given.rules})
    except Refusal as refusal:
        raise _lined(refusal, given) from refusal


def _valid(admin: Admin, given: RuleFile) -> dict[str, Any]:
    try:
        return _validated(admin, given)
    except Refusal as refusal:
        raise Failure(refusal.line, refusal.exit_code) from refusal


def _lined(refusal: Refusal, given: RuleFile) -> Refusal:
    """The same refusal with the line of the file, where it is about the rules."""
    if refusal.document.get("code") != "invalid_rules":
        return refusal
    return Refusal(f"refused: {given.fault(refusal.document['detail'])}", refusal.exit_code, refusal.document)


def _put(admin: Admin, given: RuleFile, note: str, revision: int) -> dict[str, Any]:
    body = {"rules": given.rules, **({"note": note} if note else {})}
    try:
        return admin.ask("PUT", "/rules", body=body, revision=revision)
    except Refusal as refusal:
        meanwhile = refusal.document.get("changes")
        if refusal.document.get("status") == HTTPStatus.PRECONDITION_FAILED and meanwhile:
            say(f"changed meanwhile, since revision {revision}:", err=True)
            Console(stderr=True).print(words.changes_text(meanwhile), soft_wrap=True)
        raise Failure(_lined(refusal, given).line, refusal.exit_code) from refusal


def _still_in_force(admin: Admin, revision: int, *, as_json: bool) -> None:
    """Nothing to change: the same set is in force, which is a failure all the same where a worker does not run it."""
    workers = admin.call("GET", "/workers")["items"]
    there = sum(worker["revision"] >= revision and worker["state"] == "serving" for worker in workers)
    if there < len(workers):
        raise Failure(f"revision {revision} is this set, but only {there}/{len(workers)} workers run it", EXIT_REFUSED)
    if as_json:
        show_json({"revision": revision, "changes": []})
    else:
        say(f"revision {revision} is in force on {there}/{len(workers)} workers")


def _dry_run(admin: Admin, given: RuleFile, last: int, samples: Path | None) -> dict[str, Any] | None:
    """What would have become of the requests; None, said on stderr, where there are none to look at."""
    body: dict[str, Any] = {"rules": given.rules, "last": last}
    if samples is not None:
        body = {"rules": given.rules, "requests": _samples(samples)}
    try:
        return admin.ask("POST", "/rules/dry-run", body=body)
    except Refusal as refusal:
        if samples is not None or refusal.exit_code != EXIT_REFUSED:
            raise Failure(refusal.line, refusal.exit_code) from refusal
        say(f"warning: not tried on requests: {refusal.document.get('detail', refusal.line)}", err=True)
        return None


def _samples(file: Path) -> list[Any]:
    try:
        document = read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YamlFault) as error:
        raise Failure(f"{file}: cannot be read", EXIT_USAGE) from error
    requests = document.get("requests") if isinstance(document, dict) else document
    if not isinstance(requests, list):
        raise Failure(f"{file}: must be a list of requests, such as `- {{task: ocr, tenant: acme}}`", EXIT_USAGE)
    return requests


def _show_changes(changes: list[Mapping[str, Any]]) -> None:
    if changes:
        show(words.changes_text(changes))
    else:
        say("no differences")
