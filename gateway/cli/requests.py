"""`gateway requests`: the last requests of all workers, and what became of each."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from gateway.cli.admin_client import AdminToken, AdminUrl, Json, admin_of, part
from gateway.cli.show import add, examples, fields, figure, instant, show, show_json, table, when
from gateway.cli.terminal import say

app = typer.Typer(
    no_args_is_help=True,
    help="The last requests: where each went, why, and how long it took. Never bodies, prompts or secrets.",
    epilog="Exit codes: 0 done, 1 refused, 2 usage, 3 no control plane.",
)
MAX_SHOWN = 10_000
SHORT: Final = 8
_OWN_ID: Final = re.compile("[0-9a-f]{32}")


@app.command(
    "list",
    epilog=examples(
        "gateway requests list --code no_healthy_backend",
        "gateway requests list --tenant acme",
        "gateway requests list --rule nlu --json",
    ),
)
def list_requests(
    *,
    task: Annotated[str, typer.Option(metavar="NAME", help="Of this task alone.")] = "",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Of this tenant alone.")] = "",
    code: Annotated[str, typer.Option(metavar="CODE", help="How they ended: ok, or an error's code.")] = "",
    rule: Annotated[str, typer.Option(metavar="NAME", help="The rule that took them.")] = "",
    backend: Annotated[str, typer.Option(metavar="NAME", help="Where they were answered.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=MAX_SHOWN, help="At most so many.")] = 50,
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Show the last requests, the newest first: ids shortened, places without their server; `show` has all of it."""
    admin = admin_of(admin_url, admin_token)
    items = admin.items("/requests", limit, task=task, tenant=tenant, code=code, rule=rule, backend=backend)
    if as_json:
        show_json({"items": items})
        return
    if not items:
        say("no such request is recorded")
        return
    headings = ("at (UTC)", "id", "tenant", "task\nrule", "place", "end", "ms")
    shown = table(*headings, right=("ms",), whole=("at (UTC)", "id"))
    for one in items:
        place, _, _ = one["place"].partition("@")
        of = f"{one['task']}\n{one['rule'] or '-'}"
        cells = (one["tenant"], of, place, _end(one), figure(one["total_ms"]))
        add(shown, when(one["at_ms"]), _short(one["id"]), *cells, style="red" if _is_bad(one) else None)
    show(shown)


@app.command("show", epilog=examples("gateway requests show 0f3bc022"))
def show_request(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Its x-request-id, or how that begins.")],
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Show all that is recorded of one request. `gateway explain --request-id` says what the rules made of it."""
    one = admin_of(admin_url, admin_token).call("GET", f"/requests/{part(request_id)}")
    if as_json:
        show_json(one)
        return
    show(recorded(one))
    shown = table("rank", "candidate", "why", right=("rank",))
    for i, (place, why) in enumerate(zip(one["candidates"], one["why"], strict=False)):
        is_planned = i < one["planned"]
        add(shown, i + 1 if is_planned else None, place, why, style="green" if place == one["place"] else None)
    show(shown)


def recorded(one: Mapping[str, Any]) -> Table:
    """What is recorded of a request, without its candidates."""
    told: dict[str, object] = {"at": instant(one["at_ms"]), "end": _end(one)}
    for name, value in one.items():
        if name.endswith("_ms") and name != "at_ms":
            told[name.removesuffix("_ms").replace("_", " ")] = "" if value is None else figure(value, "ms")
        elif name == "stream":
            told[name] = "yes" if value else ""
        elif name == "stands_for":
            told["stands for"] = f"{value:,} of its kind" if value > 1 else ""
        elif name not in _TOLD:
            told[name.replace("_", " ")] = value
    used = {name.replace("_", " "): value for name, value in one["usage"].items() if value}
    told["used"] = ", ".join(f"{name} {value:g}" for name, value in used.items())
    told["headers"] = ", ".join(f"{name}: {value}" for name, value in one["headers"].items())
    told["notes"] = "; ".join(one["notes"])
    return fields(told)


_TOLD: Final = frozenset(("at_ms", "status", "code", "candidates", "why", "usage", "headers", "notes", "planned"))
"""What stands elsewhere, or in another form."""


def _is_bad(one: Mapping[str, Any]) -> bool:
    return int(one["status"]) >= 400  # noqa: PLR2004 - HTTP's errors begin there


def _short(request_id: str) -> str:
    """The beginning of an id that the gateway has made, which is enough to ask for it; one of a caller as it is."""
    return request_id[:SHORT] if _OWN_ID.fullmatch(request_id) else request_id


def _end(one: Mapping[str, Any]) -> str:
    return f"{one['status']} {one['code']}".strip()
