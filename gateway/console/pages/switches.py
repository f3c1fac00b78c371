"""Switches: what stands above all rules for a while, with its count-down; set one, or end it."""

from typing import Any, Final

from nicegui import ui

from gateway.console import words
from gateway.console.dialogs import Form, button, text_of
from gateway.console.tables import Column, Table, Tone, act, chip
from gateway.console.view import Page, View
from gateway.core.switches import ACTIONS, SCOPES_OF, Action
from gateway.ports import JsonObject

TIMES: Final = {
    300: "5 minutes",
    900: "15 minutes",
    3600: "1 hour",
    14_400: "4 hours",
    86_400: "1 day",
    604_800: "7 days",
}
KEPT: Final = 10  # that have ended while the page was open
MARGIN_S: Final = 3  # a switch that goes away with so little time left has ended by itself

_MEANING: Final[dict[Action, str]] = {
    "block": "Nothing of this is served: requests are refused, places get none.",
    "drain": "No new requests; those in flight, and sequences that have begun, go on.",
    "force_backend": "Everything of this goes to one backend.",
    "force_fallback": "Everything of this goes to the fallbacks of its rules.",
    "freeze": "Nobody changes the rules; what takes a rollout back still may.",
}
_TONES: Final[dict[str, Tone]] = {"block": "bad", "drain": "warn", "freeze": "busy"}
_COLUMNS: Final = (
    Column(field="action", label="Switch", kind="chips"),
    Column(field="scope", label="For"),
    Column(field="left", label="Ends in", kind="number"),
    Column(field="flight", label="In flight", kind="chips"),
    Column(field="reason", label="Reason"),
    Column(field="owner", label="Owner"),
    Column(field="until", label="Until (UTC)", kind="time"),
    Column(field="acts", label="", kind="acts"),
)


async def build(view: View) -> None:
    """The switches in force, and those that ended while one looked."""
    page = Switches(view)
    view.every(1.0, page.load)


class Switches:
    """The list, which counts down."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._seen: dict[str, JsonObject] = {}
        if view.api.may("POST", "/switches"):
            button("Set a switch", self._ask, kind="main").classes("own-width")
        self._table = Table(_COLUMNS, label="Switches in force", on_act=self._act, empty="No switch is set.")
        self._ended = ui.element("div").props('role=status aria-label="Ended"').classes("ended")

    async def load(self) -> None:
        """Ask, show, and say which have ended since."""
        found = (await self._view.api.get("/switches"))["items"]
        now = {one["id"]: one for one in found}
        for gone in [one for key, one in self._seen.items() if key not in now]:
            self._say_ended(gone)
        self._seen = now
        self._table.show([self._row(one) for one in found])

    def _row(self, one: JsonObject) -> JsonObject:
        may_end = self._view.api.may("DELETE", f"/switches/{one['id']}")
        return {
            "key": one["id"],
            "name": f"{one['action']} {scope_words(one['scope'])}",
            "action": [chip(one["action"].replace("_", " "), _TONES.get(one["action"], "plain"))],
            "scope": scope_words(one["scope"]) + (f" -> {one['value']}" if one["value"] else ""),
            "left": words.lasting(one["remaining_s"]),
            "flight": in_flight(one),
            "reason": one["reason"],
            "owner": one["owner"],
            "until": words.moment(one["expires_at"]),
            "acts": [act("end", "End")] if may_end else [],
        }

    def _say_ended(self, gone: JsonObject) -> None:
        how = "expired by itself" if gone["remaining_s"] <= MARGIN_S else "was ended"
        with self._ended:
            ui.label(f"{gone['action'].replace('_', ' ')} for {scope_words(gone['scope'])} {how}.").classes("muted")
        kept = list(self._ended)
        if len(kept) > KEPT:
            self._ended.remove(kept[0])

    async def _act(self, _: str, row: dict[str, Any]) -> None:
        one = self._seen.get(row["key"])
        if one is not None:
            ask_end(self._view, [one], f"End: {row['name']}")

    def _ask(self) -> None:
        with Form("Set a switch", confirm="Set it", is_destructive=True) as form:
            chosen = ui.select({name: name.replace("_", " ") for name in ACTIONS}, value="block", label="What").props(
                "outlined"
            )
            meaning = ui.label("").classes("muted")
            scope = ui.select([], label="For").props("outlined")
            name = ui.input("Its name").props("outlined")
            value = ui.input("The backend").props("outlined")
            lasts = ui.select(TIMES, value=900, label="For how long").props("outlined")
            reason = form.reason()

        def fit() -> None:
            action = chosen.value
            meaning.text = _MEANING[action]
            scope.set_options(
                list(SCOPES_OF[action]),
                value=scope.value if scope.value in SCOPES_OF[action] else SCOPES_OF[action][-1],
            )
            name.set_visibility(scope.value != "everything")
            value.set_visibility(action == "force_backend")

        chosen.on_value_change(fit)
        scope.on_value_change(fit)
        fit()

        async def change() -> JsonObject:
            body = {
                "action": chosen.value,
                "scope": {scope.value: True if scope.value == "everything" else text_of(name)},
                "value": text_of(value) if chosen.value == "force_backend" else "",
                "reason": text_of(reason),
                "ttl_s": lasts.value,
            }
            return await self._view.api.change("POST", "/switches", body=body, reason=text_of(reason))

        form.then(self._view.and_soon(change), "The switch is set")


def ask_end(view: View, switches: list[JsonObject], title: str) -> None:
    """End switches before their time."""
    with Form(title, "Rules decide again as if it had not been.", confirm="End") as form:
        reason = form.reason(is_required=False)

    async def change() -> JsonObject:
        told: JsonObject = {}
        for one in switches:
            told = await view.api.change("DELETE", f"/switches/{one['id']}", reason=text_of(reason))
        return told

    form.then(view.and_soon(change), "The switch is ended")


def scope_words(scope: JsonObject) -> str:
    """What a switch is for."""
    kind, name = next(iter(scope.items()), ("", ""))
    return kind if kind == "everything" else f"{kind} {name}"


def in_flight(one: JsonObject) -> list[dict[str, str]]:
    """How far a drain has got."""
    if one["action"] != "drain":
        return []
    if one["is_drained"]:
        return [chip("drained: 0 in flight", "good")]
    if one["in_flight"] is None:
        return [chip("counting", "plain")]
    return [chip(f"{one['in_flight']} in flight", "warn")]


PAGE = Page(path="/switches", title="Switches", icon="toggle_on", build=build)
