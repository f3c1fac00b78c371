"""`gateway keys`: make, show and change API keys while everything runs."""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from gateway.cli.admin_client import EXIT_USAGE, AdminToken, AdminUrl, Failure, Json, Reason, admin_of
from gateway.cli.show import add, fields, table
from gateway.cli.show import show as show_table
from gateway.cli.terminal import say

app = typer.Typer(help="Make, show and change API keys; all workers follow within a second.", no_args_is_help=True)

PAGE = 500
MAX_DAYS = 36_500
_KINDS = {"requests": int, "tokens": int, "usd": float, "concurrent": int}

KeyId = Annotated[str, typer.Argument(metavar="ID", help="The key's id, not the key itself.")]


@app.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Whose key it is.")],
    name: Annotated[str, typer.Argument(help="What people call it.")],
    *,
    task: Annotated[list[str] | None, typer.Option(help="Only for this task; again for more.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="It may name this model alone; again for more.")] = None,
    origin: Annotated[list[str] | None, typer.Option(help="Only for pages of this origin; again for more.")] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="LIMIT", help="Such as requests=60/minute, tokens=1e6/day, usd=10/month, concurrent=4."),
    ] = None,
    batch: Annotated[bool, typer.Option("--batch", help="Its requests are never interactive.")] = False,
    admin: Annotated[bool, typer.Option("--admin", help="It may load and unload models on /v2/repository.")] = False,
    days: Annotated[int, typer.Option(min=0, max=MAX_DAYS, help="It expires after so many days; 0: never.")] = 0,
    reason: Reason = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Make a key and print it: it is shown this once.

    Without --limit it has those of the configuration's section `limits`.

    Try:

        gateway keys create acme "web shop"

        gateway keys create acme nightly --batch --task text-embedding --limit requests=100/second --days 90

        KEY=$(gateway keys create acme ci --json | jq -r .key)
    """
    body = {
        "tenant": tenant,
        "name": name,
        "tasks": task or None,
        "models": model or None,
        "origins": origin or None,
        "limits": [_limit(text) for text in limit] if limit else None,
        "priority": "batch" if batch else "interactive",
        "admin": admin,
        "expires_at": (datetime.now(UTC) + timedelta(days=days)).isoformat() if days else None,
    }
    _made(admin_of(admin_url, admin_token).call("POST", "/keys", body=body, reason=reason), as_json=as_json)


@app.command("list")
def list_keys(
    tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Show all keys, in the order in which they were made. Those of the configuration are not among them.

    Try:

        gateway keys list --tenant acme
    """
    plane, cursor = admin_of(admin_url, admin_token), ""
    items: list[dict[str, Any]] = []
    while True:
        asked = {"limit": PAGE, **({"tenant": tenant} if tenant else {}), **({"cursor": cursor} if cursor else {})}
        page = plane.call("GET", f"/keys?{urlencode(asked)}")
        items += page["items"]
        cursor = page["next"] or ""
        if not cursor:
            break
    if as_json:
        typer.echo(json.dumps({"items": items, "next": None}, indent=2))
    elif items:
        _show(items)
    else:
        say("there are no keys but those of the configuration")


@app.command()
def show(key_id: KeyId, as_json: Json = False, admin_url: AdminUrl = "", admin_token: AdminToken = "") -> None:
    """Show one key with all that it may.

    Try:

        gateway keys show abcdefghijklm
    """
    _one(admin_of(admin_url, admin_token).call("GET", _path(key_id)), as_json=as_json)


@app.command()
def rotate(
    key_id: KeyId,
    grace: Annotated[int, typer.Option(min=0, help="For so many seconds the old secret stays good.")] = 0,
    reason: Reason = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Give a key a new secret and print it. The old one is out at once, with the client tokens made with it.

    Try:

        gateway keys rotate abcdefghijklm --grace 3600
    """
    path, body = f"{_path(key_id)}/rotate", {"grace_s": grace}
    _made(admin_of(admin_url, admin_token).call("POST", path, body=body, reason=reason), as_json=as_json)


@app.command()
def disable(
    key_id: KeyId, reason: Reason = "", as_json: Json = False, admin_url: AdminUrl = "", admin_token: AdminToken = ""
) -> None:
    """Let a key in no more, until it is enabled again.

    Try:

        gateway keys disable abcdefghijklm
    """
    admin = admin_of(admin_url, admin_token)
    _done(admin.call("PATCH", _path(key_id), body={"disabled": True}, reason=reason), f"{key_id} is disabled", as_json)


@app.command()
def enable(
    key_id: KeyId, reason: Reason = "", as_json: Json = False, admin_url: AdminUrl = "", admin_token: AdminToken = ""
) -> None:
    """Let a disabled key in again.

    Try:

        gateway keys enable abcdefghijklm
    """
    admin = admin_of(admin_url, admin_token)
    _done(admin.call("PATCH", _path(key_id), body={"disabled": False}, reason=reason), f"{key_id} is enabled", as_json)


@app.command()
def delete(
    key_id: KeyId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    reason: Reason = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Take a key away for good. What it has used stays in the books.

    Try:

        gateway keys delete abcdefghijklm --yes
    """
    if not yes:
        typer.confirm(f"delete {key_id} for good?", abort=True)
    done = admin_of(admin_url, admin_token).call("DELETE", _path(key_id), reason=reason)
    _done(done, f"{key_id} is deleted", as_json)


def _path(key_id: str) -> str:
    if key_id.startswith("gw_"):  # it would be written into logs of all who carry the address
        raise Failure("give the key's id, not the key: it is the part between the first two `_`", EXIT_USAGE)
    return f"/keys/{quote(key_id, safe='')}"


def _limit(text: str) -> dict[str, Any]:
    """`requests=60/minute` as the control plane takes it, which judges the rest."""
    kind, equals, rest = text.partition("=")
    amount, slash, per = rest.partition("/")
    try:
        number = float(amount) if equals and kind in _KINDS else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise Failure(f"--limit {text}: write it as requests=60/minute, usd=10/month or concurrent=4", EXIT_USAGE)
    return {kind: number if kind == "usd" else int(number), **({"per": per} if slash else {})}


def _done(answer: Mapping[str, Any], words: str, as_json: bool) -> None:
    say(json.dumps(answer, indent=2) if as_json else words)


def _made(key: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(key, indent=2))
        return
    say(key["key"])
    say(f"Keep it: it is not shown again. Its id is {key['id']}, for all other commands.", err=True)


def _one(key: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(key, indent=2))
        return
    show_table(fields({name: _words(name, value) for name, value in key.items()}))


def _show(items: Sequence[Mapping[str, Any]]) -> None:
    shown = table("id", "tenant", "name", "may", "limits", "state", whole=("id",))  # ids are copied out of here
    for key in items:
        may = ", ".join(key["scopes"]) or "all tasks"
        if key["priority"] == "batch":
            may += ", batch only"
        cells = (key["id"], key["tenant"], key["name"], may, _words("limits", key["limits"]), _state(key))
        add(shown, *cells)
    show_table(shown)


def _state(key: Mapping[str, Any]) -> str:
    if key["disabled"]:
        return "disabled"
    if key["expires_at"] is None:
        return "in force"
    expires = datetime.fromisoformat(key["expires_at"])
    return f"{'expired' if expires <= datetime.now(UTC) else 'until'} {expires:%Y-%m-%d %H:%M}"


def _words(name: str, value: Any) -> str:
    if value is None:
        return {"limits": "the configuration's", "expires_at": "never"}.get(name, "-")
    if name == "limits":
        return "\n".join(_limit_words(limit) for limit in value) or "none"
    return ", ".join(value) or "-" if isinstance(value, list) else str(value)


def _limit_words(limit: Mapping[str, Any]) -> str:
    kind = next(kind for kind in _KINDS if kind in limit)
    rest = {k: v for k, v in limit.items() if k not in (kind, "per") and (k, v) != ("shared_by", "key")}
    per = f"/{limit['per']}" if "per" in limit else ""
    return " ".join((f"{kind}={limit[kind]:g}{per}", *(f"{k}={v}" for k, v in rest.items())))
