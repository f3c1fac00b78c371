"""`gateway rules`: see, replace and switch the routing rules through the control plane."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer
import yaml
from rich.console import Console
from rich.table import Table

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
STACK_FILE = Path(".run/stack.json")  # where `gateway up` says what it started
TIMEOUT_S = 10.0

app = typer.Typer(
    no_args_is_help=True,
    help="Routing rules: see, replace and switch them while the gateway runs.",
    epilog="Exit codes: 0 done on all workers, 1 refused or not on all workers, 2 usage, 3 no control plane.",
)

AdminUrl = Annotated[
    str,
    typer.Option(envvar="GATEWAY_ADMIN_URL", help="Control plane; default: as `gateway up` left it."),
]
AdminToken = Annotated[
    str,
    typer.Option(envvar="GATEWAY_ADMIN_TOKEN", help="Admin token; default: as `gateway up` left it."),
]


class _Failure(typer.Exit):
    """End with one clear line on stderr."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__(code)
        typer.echo(line, err=True)


@dataclass(frozen=True, slots=True)
class _Admin:
    """The control plane: one call, and its answer or the end of the command."""

    url: str
    token: str

    def call(self, method: str, path: str, *, body: object = None, revision: int | None = None) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.token}"}
        if revision is not None:
            headers["if-match"] = str(revision)
        try:
            answer = httpx.request(
                method,
                f"{self.url.rstrip('/')}/admin/v1{path}",
                headers=headers,
                json=body,
                timeout=TIMEOUT_S,
                trust_env=False,  # a proxy for the web does not lead to the control plane
            )
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise _Failure(f"not an address: {self.url}", EXIT_USAGE) from error
        except httpx.HTTPError as error:
            raise _Failure(f"no control plane answers at {self.url}", EXIT_UNREACHABLE) from error
        document = _object(answer)
        if answer.is_success and document is not None:
            return document
        raise _Failure(_refusal(answer, document), EXIT_REFUSED)


@app.command(epilog="Examples: gateway rules get | gateway rules get --json > rules.json")
def get(
    as_json: Annotated[bool, typer.Option("--json", help="Print the set as JSON, as `apply` takes it.")] = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Show the rules in force."""
    current = _admin(admin_url, admin_token).call("GET", "/rules")
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
    admin = _admin(admin_url, admin_token)
    revision = admin.call("GET", "/rules")["revision"] if expect is None else expect
    changed = admin.call("PUT", "/rules", body={"rules": rules}, revision=revision)
    _show(changed)
    _finish(changed)


@app.command(epilog="Example: gateway rules enable embeddings-canary")
def enable(name: str, admin_url: AdminUrl = "", admin_token: AdminToken = "") -> None:
    """Switch one rule on."""
    _switch(_admin(admin_url, admin_token), name, enabled=True)


@app.command(epilog="Example: gateway rules disable embeddings-canary")
def disable(name: str, admin_url: AdminUrl = "", admin_token: AdminToken = "") -> None:
    """Switch one rule off: its requests go to the next rule that takes them, or are refused if there is none."""
    _switch(_admin(admin_url, admin_token), name, enabled=False)


def _switch(admin: _Admin, name: str, *, enabled: bool) -> None:
    changed = admin.call("PATCH", f"/rules/{quote(name, safe='')}", body={"enabled": enabled})
    _show({"revision": changed["revision"], "rules": [changed["rule"]]})
    _finish(changed)


def _admin(url: str, token: str) -> _Admin:
    """From the options or the environment, else from the stack that runs in this folder."""
    if not (url and token):
        stack = _stack()
        url, token = url or str(stack.get("admin_url", "")), token or str(stack.get("admin_token", ""))
    if not url:
        raise _Failure(f"no control plane: give --admin-url, or run `gateway up` (no {STACK_FILE})", EXIT_USAGE)
    if not token:
        raise _Failure("no admin token: give --admin-token or set GATEWAY_ADMIN_TOKEN", EXIT_USAGE)
    return _Admin(url, token)


def _stack() -> Mapping[str, Any]:
    try:
        stack = json.loads(STACK_FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stack if isinstance(stack, dict) else {}


def _read(file: str) -> list[Any]:
    """The list of rules in a YAML file; what is in the rules is the control plane's to judge."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise _Failure(f"{file}: cannot be read", EXIT_USAGE) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise _Failure(f"{file}{where}: not valid YAML", EXIT_USAGE) from error
    rules = document.get("rules") if isinstance(document, dict) else document
    if not isinstance(rules, list):
        raise _Failure(f"{file}: must be a list of rules, or a mapping with `rules:`", EXIT_USAGE)
    return rules


def _object(answer: httpx.Response) -> dict[str, Any] | None:
    try:
        document = answer.json()
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _refusal(answer: httpx.Response, document: Mapping[str, Any] | None) -> str:
    if document is None or "detail" not in document:
        return f"refused: HTTP {answer.status_code}, not an answer of a control plane"
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        return "refused: the admin token is not the control plane's"
    return f"refused: {document['detail']}"


def _show(current: Mapping[str, Any]) -> None:
    table = Table(title=f"rules, revision {current['revision']}", title_justify="left")
    for heading in ("rule", "task", "tenant", "split", "fallback", "on"):
        table.add_column(heading, overflow="fold")
    for rule in current["rules"]:
        table.add_row(
            rule["name"],
            rule["match"]["task"],
            rule["match"]["tenant"],
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
        raise _Failure(
            f"saved as revision {changed['revision']}, but applied on only {workers}/{of} workers after {ms} ms",
            EXIT_REFUSED,
        )
