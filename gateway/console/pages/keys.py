"""Keys: what each may do and how much; made, rotated, switched off; and what tenants have used today."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from nicegui import ui

from gateway.console import words
from gateway.console.dialogs import Form, button, search, shown_once, text_of
from gateway.console.tables import Column, Table, Tone, act, bar, chip
from gateway.console.view import Page, View
from gateway.ports import JsonObject

REFRESH_S: Final = 5.0
PAGE_SIZE: Final = 50
NEAR: Final = 0.8
GRACES: Final = {0: "at once", 3600: "after 1 hour", 86_400: "after 1 day", 604_800: "after 7 days"}
Kind = tuple[str, str | None]
KINDS: Final[Mapping[Kind, str]] = {
    ("requests", "minute"): "Requests per minute",
    ("requests", "day"): "Requests per day",
    ("tokens", "minute"): "Tokens per minute",
    ("tokens", "day"): "Tokens per day",
    ("usd", "day"): "Dollars per day",
    ("concurrent", None): "Requests at once",
}
LIMITS: Final = "Where no limit is given, those of the configuration hold."

_COLUMNS: Final = (
    Column(field="name", label="Name"),
    Column(field="id", label="Id", kind="code"),
    Column(field="tenant", label="Tenant"),
    Column(field="state", label="State", kind="chips"),
    Column(field="scopes", label="May"),
    Column(field="limits", label="Limits"),
    Column(field="used", label="Tenant's use today of the day's limit", kind="bar"),
    Column(field="expires", label="Expires (UTC)", kind="time"),
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
        self._found: dict[str, JsonObject] = {}
        self._pages = [""]  # the cursors of the pages before this one, and its own
        self._next = ""
        if view.api.may("POST", "/keys"):
            button("Make a key", self._ask, kind="main").classes("own-width")
        self._tenant = search("Only this tenant's", self._turn_back)
        self._table = Table(_COLUMNS, label="Keys", on_act=self._act, empty="No keys but those of the configuration.")
        with ui.element("div").classes("row-of"):
            self._newer = button("Page before", self._turn_back_one)
            self._older = button("Next page", self._turn)
            self._where = ui.label("").classes("muted")
        ui.label("Used today (UTC)").props("role=heading aria-level=2").classes("section")
        self._usage = Table(_USAGE, label="What tenants have used today", empty="Nothing was used today.")

    async def load(self) -> None:
        """Ask and show."""
        pages, tenant = self._pages, text_of(self._tenant)
        asked = {"limit": PAGE_SIZE, "cursor": pages[-1], "tenant": tenant}
        keys = await self._view.api.get("/keys", **asked)
        usage = (await self._view.api.get("/usage", by="tenant,task"))["items"]
        if pages is not self._pages:
            return  # another page is wanted meanwhile
        self._found = {one["id"]: one for one in keys["items"]}
        self._table.show([self._row(one, usage) for one in keys["items"]])
        self._next = keys["next"] or ""
        self._newer.set_visibility(len(self._pages) > 1)
        self._older.set_visibility(bool(self._next))
        first = (len(pages) - 1) * PAGE_SIZE + 1
        whose = f" of '{tenant}'" if tenant else ""
        self._where.text = f"Keys {first} to {first + len(keys['items']) - 1}{whose}" if keys["items"] else ""
        total = sum(one["requests"] for one in usage) or 1
        self._usage.show([_usage_row(one, total) for one in usage])

    def _turn(self) -> None:
        if self._next:
            self._pages = [*self._pages, self._next]
            self._next = ""
            self._view.soon()

    def _turn_back_one(self) -> None:
        self._pages = self._pages[:-1] or [""]
        self._view.soon()

    def _turn_back(self) -> None:
        self._pages = [""]
        self._view.soon()

    def _row(self, one: JsonObject, usage: Sequence[JsonObject]) -> JsonObject:
        acts = []
        if self._view.api.may("PATCH", f"/keys/{one['id']}"):
            acts = [
                act("on", "Enable") if one["disabled"] else act("off", "Disable", is_destructive=True),
                act("rotate", "Rotate", is_destructive=True),
                act("limits", "Limits"),
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
            "expires": words.moment(one["expires_at"]),
            "acts": acts,
        }

    async def _act(self, name: str, row: dict[str, Any]) -> None:
        if name == "rotate":
            self._ask_rotate(row)
            return
        if name == "limits":
            self._ask_limits(self._found[row["key"]])
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

    def _ask_limits(self, key: JsonObject) -> None:
        """The usual limits as fields; the others of the key stay as they are."""
        known, others = usual(key["limits"] or [])
        with Form(f"Limits of '{key['name']}'", LIMITS, confirm="Save", is_wide=True) as form:
            fields = _limit_fields(known)
            if others:
                ui.label(f"These stay: {'; '.join(map(_limit_words, others))}").classes("muted")
            reason = form.reason()

        async def change() -> JsonObject:
            body = {"limits": [*_limits(fields), *others] or None}
            return await self._view.api.change(
                "PATCH", f"/keys/{key['id']}", body=body, reason=text_of(reason), revision=key["revision"]
            )

        form.then(self._view.and_soon(change), f"Limits of '{key['name']}' are saved")

    def _ask(self) -> None:
        with Form("Make a key", LIMITS, confirm="Make it", is_wide=True) as form:
            name = form.require(ui.input("Name").props("outlined"))
            tenant = form.require(ui.input("Tenant").props("outlined"))
            scopes = ui.input("Tasks, with commas (empty: every task)").props("outlined")
            fields = _limit_fields({})
            days = ui.number("Days until it expires (empty: never)", min=1, precision=0).props("outlined")
            reason = form.reason(is_required=False)

        async def change() -> JsonObject:
            body: dict[str, Any] = {"name": text_of(name), "tenant": text_of(tenant)}
            tasks = [part.strip() for part in text_of(scopes).split(",") if part.strip()]
            body |= {"tasks": tasks} if tasks else {}
            body |= {"limits": limits} if (limits := _limits(fields)) else {}
            body |= {"expires_at": words.in_days(float(days.value))} if days.value else {}
            return await self._made("/keys", body, text_of(reason), f"The key '{text_of(name)}'")

        form.then(self._view.and_soon(change), "The key is made")

    async def _made(self, path: str, body: JsonObject, reason: str, title: str) -> JsonObject:
        found = await self._view.api.change("POST", path, body=body, reason=reason)
        with self._view.client:
            shown_once(title, found["key"])
        return {}


def usual(limits: Sequence[JsonObject]) -> tuple[dict[Kind, float], list[JsonObject]]:
    """The limits that have a field, with their amounts; and the others: of one task, with a burst, of a tenant."""
    known: dict[Kind, float] = {}
    others = []
    for limit in limits:
        found = {name: value for name, value in limit.items() if (name, value) != ("shared_by", "key")}
        per = found.pop("per", None)
        kind = (next(iter(found)), per)
        if len(found) == 1 and kind in KINDS and kind not in known:
            known[kind] = found[kind[0]]
        else:
            others.append(limit)
    return known, others


def _limit_fields(known: Mapping[Kind, float]) -> dict[Kind, ui.number]:
    with ui.element("div").classes("fields"):
        return {kind: _number(label, known.get(kind), is_whole=kind[0] != "usd") for kind, label in KINDS.items()}


def _number(label: str, value: float | None, *, is_whole: bool) -> ui.number:
    step, least = (1, 1) if is_whole else ("any", 0)
    return ui.number(label, value=value, min=least, precision=0 if is_whole else None).props(
        f"outlined dense step={step}"
    )


def _limits(fields: Mapping[Kind, ui.number]) -> list[JsonObject]:
    found: list[JsonObject] = []
    for (name, per), field in fields.items():
        if field.value is not None:
            amount = float(field.value) if name == "usd" else int(field.value)
            found.append({name: amount, **({"per": per} if per else {})})
    return found


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


def _usage_row(one: JsonObject, total: int) -> JsonObject:
    return {
        "key": f"{one['tenant']}|{one['task']}",
        "name": f"{one['tenant']} {one['task']}",
        "tenant": one["tenant"],
        "task": one["task"],
        "requests": words.number(one["requests"]),
        "share": bar(one["requests"] / total, words.percent(one["requests"] / total, 0)),
        "failed": words.number(one["failed"]),
        "tokens": words.pair(words.number(one["input_tokens"]), words.number(one["output_tokens"])),
        "cost": words.usd(one["cost_usd"]),
    }


PAGE = Page(path="/keys", title="Keys and limits", icon="vpn_key", build=build)
