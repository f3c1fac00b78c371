"""Keys: what each may do and how much; made, rotated, switched off; and what tenants have used today."""

from collections.abc import Sequence
from typing import Any, Final

from nicegui import ui

from gateway.console import words
from gateway.console.dialogs import Form, button, shown_once, text_of
from gateway.console.tables import Column, Table, Tone, act, bar, chip
from gateway.console.view import Page, View
from gateway.ports import JsonObject

REFRESH_S: Final = 5.0
SIZE: Final = 200
NEAR: Final = 0.8
GRACES: Final = {0: "at once", 3600: "after 1 hour", 86_400: "after 1 day", 604_800: "after 7 days"}

_COLUMNS: Final = (
    Column(field="name", label="Name"),
    Column(field="id", label="Id", kind="code"),
    Column(field="tenant", label="Tenant"),
    Column(field="state", label="State", kind="chips"),
    Column(field="scopes", label="May"),
    Column(field="limits", label="Limits"),
    Column(field="used", label="Tenant's use today of the day's limit", kind="bar"),
    Column(field="expires", label="Expires (UTC)"),
    Column(field="acts", label="", kind="acts"),
)
_USAGE: Final = (
    Column(field="tenant", label="Tenant"),
    Column(field="task", label="Task"),
    Column(field="requests", label="Requests", kind="number"),
    Column(field="share", label="Share of requests", kind="bar"),
    Column(field="failed", label="Failed", kind="number"),
    Column(field="tokens", label="Tokens in / out", kind="number"),
    Column(field="cost", label="Cost", kind="number"),
)


async def build(view: View) -> None:
    """Keys, and what was used today."""
    page = Keys(view)
    view.every(REFRESH_S, page.load)


class Keys:
    """Both lists. A secret is shown when it is made, and never again."""

    def __init__(self, view: View) -> None:
        self._view = view
        if view.api.may("POST", "/keys"):
            button("Make a key", self._ask, kind="main").classes("own-width")
        self._table = Table(_COLUMNS, label="Keys", on_act=self._act, empty="No keys but those of the configuration.")
        ui.label("Used today (UTC)").props("role=heading aria-level=2").classes("section")
        self._usage = Table(_USAGE, label="What tenants have used today", empty="Nothing was used today.")

    async def load(self) -> None:
        """Ask and show."""
        keys = (await self._view.api.get("/keys", limit=SIZE))["items"]
        usage = (await self._view.api.get("/usage", by="tenant,task"))["items"]
        self._table.show([self._row(one, usage) for one in keys])
        most = max((one["requests"] for one in usage), default=0) or 1
        self._usage.show([_usage_row(one, most) for one in usage])

    def _row(self, one: JsonObject, usage: Sequence[JsonObject]) -> JsonObject:
        acts = []
        if self._view.api.may("PATCH", f"/keys/{one['id']}"):
            acts = [
                act("on", "Enable") if one["disabled"] else act("off", "Disable", is_destructive=True),
                act("rotate", "Rotate", is_destructive=True),
            ]
        return {
            "key": one["id"],
            "name": one["name"],
            "id": one["id"],
            "tenant": one["tenant"],
            "state": [chip("disabled", "bad") if one["disabled"] else chip("enabled", "good")],
            "scopes": ", ".join(one["scopes"]) or "every task",
            "limits": "; ".join(_limit_words(limit) for limit in one["limits"] or ()) or "the configuration's",
            "used": _used(one, usage),
            "expires": words.when(one["expires_at"]),
            "acts": acts,
        }

    async def _act(self, name: str, row: dict[str, Any]) -> None:
        if name == "rotate":
            self._ask_rotate(row)
            return
        label = "Enable" if name == "on" else "Disable"
        with Form(f"{label} the key '{row['name']}'", confirm=label, is_destructive=name == "off") as form:
            reason = form.reason(is_required=name == "off")

        async def change() -> JsonObject:
            body = {"disabled": name == "off"}
            return await self._view.api.change("PATCH", f"/keys/{row['id']}", body=body, reason=text_of(reason))

        form.then(self._view.and_soon(change), f"The key '{row['name']}' is {label.lower()}d")

    def _ask_rotate(self, row: dict[str, Any]) -> None:
        with Form(f"A new secret for '{row['name']}'", confirm="Rotate", is_destructive=True) as form:
            reason = form.reason()
            grace = ui.select(GRACES, value=0, label="The secret before ends").props("outlined")

        async def change() -> JsonObject:
            body = {"grace_s": grace.value}
            return await self._made(
                f"/keys/{row['id']}/rotate", body, text_of(reason), f"New secret of '{row['name']}'"
            )

        form.then(self._view.and_soon(change), "The key has a new secret")

    def _ask(self) -> None:
        with Form("Make a key", confirm="Make it") as form:
            name = form.require(ui.input("Name").props("outlined"))
            tenant = form.require(ui.input("Tenant").props("outlined"))
            scopes = ui.input("Tasks, with commas (empty: every task)").props("outlined")
            limit = ui.number("Requests per minute (empty: the configuration's)", min=1, precision=0).props("outlined")
            days = ui.number("Days until it expires (empty: never)", min=1, precision=0).props("outlined")
            reason = form.reason(is_required=False)

        async def change() -> JsonObject:
            body: dict[str, Any] = {"name": text_of(name), "tenant": text_of(tenant)}
            tasks = [part.strip() for part in text_of(scopes).split(",") if part.strip()]
            body |= {"tasks": tasks} if tasks else {}
            body |= {"limits": [{"requests": int(limit.value), "per": "minute"}]} if limit.value else {}
            body |= {"expires_at": words.in_days(float(days.value))} if days.value else {}
            return await self._made("/keys", body, text_of(reason), f"The key '{text_of(name)}'")

        form.then(self._view.and_soon(change), "The key is made")

    async def _made(self, path: str, body: JsonObject, reason: str, title: str) -> JsonObject:
        found = await self._view.api.change("POST", path, body=body, reason=reason)
        with self._view.client:
            shown_once(title, found["key"])
        return {}


def _limit_words(limit: JsonObject) -> str:
    kind = next((name for name in ("requests", "tokens", "usd", "concurrent") if limit.get(name) is not None), "")
    where = "".join(f" of {limit[name]}" for name in ("task", "model") if limit.get(name))
    period = f"per {limit['per']}" if limit.get("per") else "at once"
    return f"{limit.get(kind, 0):,} {kind} {period}{where}"


def _used(one: JsonObject, usage: Sequence[JsonObject]) -> JsonObject | None:
    """The fullest of the key's limits for a day, by what its tenant has used of it; None where it has none."""
    mine = [row for row in usage if row["tenant"] == one["tenant"]]
    counts = {
        "requests": sum(row["requests"] for row in mine),
        "tokens": sum(row["input_tokens"] + row["output_tokens"] for row in mine),
        "usd": sum(row["cost_usd"] for row in mine),
    }
    found = [
        (counts[kind] / limit[kind], f"{counts[kind]:,.4g} of {limit[kind]:,.4g} {kind}")
        if kind == "usd"
        else (counts[kind] / limit[kind], f"{counts[kind]:,} of {limit[kind]:,} {kind}")
        for limit in one["limits"] or ()
        for kind in counts
        if limit.get(kind) and limit.get("per") == "day"
    ]
    if not found:
        return None
    share, text = max(found)
    tone: Tone = "bad" if share >= 1 else "warn" if share >= NEAR else "good"
    return bar(share, text, tone)


def _usage_row(one: JsonObject, most: int) -> JsonObject:
    return {
        "key": f"{one['tenant']}|{one['task']}",
        "name": f"{one['tenant']} {one['task']}",
        "tenant": one["tenant"],
        "task": one["task"],
        "requests": words.number(one["requests"]),
        "share": bar(one["requests"] / most, words.number(one["requests"])),
        "failed": words.number(one["failed"]),
        "tokens": f"{words.number(one['input_tokens'])} / {words.number(one['output_tokens'])}",
        "cost": words.usd(one["cost_usd"]),
    }


PAGE = Page(path="/keys", title="Keys and limits", icon="vpn_key", build=build)
