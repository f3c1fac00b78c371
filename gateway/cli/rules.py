"""`gateway rules`: see, replace and switch the routing rules through the control plane."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
import yaml
from rich.console import Console
from rich.table import Table

from gateway.cli.admin_client import EXIT_REFUSED, EXIT_USAGE, Admin, AdminToken, AdminUrl, Failure, admin_of

app = typer.Typer(
    no_args_is_help=True,
    help="Routing rules: see, replace and switch them while the gateway runs.",
    epilog="Exit codes: 0 done on all workers, 1 refused or not on all workers, 2 usage, 3 no control plane.",
)


@app.command(epilog="Examples: gateway rules get | gateway rules get --json > rules.json")
def get(
    as_json: Annotated[bool, typer.Option("--json", help="Print the set as JSON, as `apply` takes it.")] = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Show the rules in force."""
    current = admin_of(admin_url, admin_token).call("GET", "/rules")
    if as_json:
        typer.echo(json.dumps(current, indent=2))
    else:
        _show(current)


@app.command(epilog="Examples: gateway rules apply rules.yaml | gateway rules apply --expect 7 - < rules.yaml")
def apply(
    file: Annotated[str, typer.Argument(help="YAML or JSON: `rules:` with a list, or the list; - = stdin.")],
    expect: Annotated[
        int | None,
        typer.Option(help="Refuse unless this revision is in force; default: the one in force now.", min=0),
    ] = None,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Replace the whole set; it is taken whole or refused whole."""
    rules = _read(file)
    admin = admin_of(admin_url, admin_token)
    revision = admin.call("GET", "/rules")["revision"] if expect is None else expect
    changed = admin.call("PUT", "/rules", body={"rules": rules}, revision=revision)
    _show(changed)
    _finish(changed)


@app.command(epilog="Example: gateway rules enable embeddings-canary")
def enable(name: str, admin_url: AdminUrl = "", admin_token: AdminToken = "") -> None:
    """Switch one rule on."""
    _switch(admin_of(admin_url, admin_token), name, enabled=True)


@app.command(epilog="Example: gateway rules disable embeddings-canary")
def disable(name: str, admin_url: AdminUrl = "", admin_token: AdminToken = "") -> None:
    """Switch one rule off: its requests go to the next rule that takes them, or are refused if there is none."""
    _switch(admin_of(admin_url, admin_token), name, enabled=False)


def _switch(admin: Admin, name: str, *, enabled: bool) -> None:
    changed = admin.call("PATCH", f"/rules/{quote(name, safe='')}", body={"enabled": enabled})
    _show({"revision": changed["revision"], "rules": [changed["rule"]]})
    _finish(changed)


def _read(file: str) -> list[Any]:
    """The list of rules in a YAML file; what is in the rules is the control plane's to judge."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{file}: cannot be read", EXIT_USAGE) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise Failure(f"{file}{where}: not valid YAML", EXIT_USAGE) from error
    rules = document.get("rules") if isinstance(document, dict) else document
    if not isinstance(rules, list):
        raise Failure(f"{file}: must be a list of rules, or a mapping with `rules:`", EXIT_USAGE)
    return rules


def _show(current: Mapping[str, Any]) -> None:
    table = Table(title=f"rules, revision {current['revision']}", title_justify="left")
    for heading in ("rule", "task", "tenant", "strategy", "split", "fallback", "on"):
        table.add_column(heading, overflow="fold")
    for rule in current["rules"]:
        table.add_row(
            rule["name"],
            rule["match"]["task"],
            rule["match"]["tenant"],
            rule["strategy"] if len(rule["split"]) > 1 else "",
            _targets(rule["split"], weights=rule["strategy"] == "weighted" and len(rule["split"]) > 1),
            _targets(rule["fallback"], weights=False),
            "yes" if rule["enabled"] else "no",
            style=None if rule["enabled"] else "dim",
        )
    Console().print(table)


def _targets(targets: list[Mapping[str, Any]], *, weights: bool) -> str:
    return "\n".join(
        f"{t['backend']}/{t['model']}"
        + (f":{t['version']}" if t.get("version") else "")
        + (f"  {t['weight']}" if weights else "")
        for t in targets
    )


def _finish(changed: Mapping[str, Any]) -> None:
    """Say what to mind and how far the change has got; an incomplete one is a failure that scripts can see."""
    for warning in changed["warnings"]:
        typer.echo(f"warning: {warning}", err=True)
    workers, of, ms = (changed["applied"][key] for key in ("workers", "of", "ms"))
    if of == 0:
        typer.echo("saved; no worker is running")
    elif workers == of:
        typer.echo(f"applied on {workers}/{of} workers in {ms} ms")
    else:
        raise Failure(
            f"saved as revision {changed['revision']}, but applied on only {workers}/{of} workers after {ms} ms",
            EXIT_REFUSED,
        )
