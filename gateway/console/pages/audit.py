"""The audit log: who did what, when, from where and why."""

from typing import Any, Final

from nicegui import ui

from gateway.admin.access.roles import PREFIX
from gateway.console import words
from gateway.console.dialogs import button, panel, text_of
from gateway.console.tables import Column, Table, act, chip
from gateway.console.view import Page, View
from gateway.ports import JsonObject

REFRESH_S: Final = 2.0
PAGE_SIZE: Final = 50
MOST: Final = 500
_COLUMNS: Final = (
    Column(field="at", label="At (UTC)", kind="time"),
    Column(field="who", label="Who"),
    Column(field="origin", label="From", kind="code"),
    Column(field="action", label="What"),
    Column(field="target", label="Of what", kind="code"),
    Column(field="reason", label="Why"),
    Column(field="outcome", label="Outcome", kind="chips"),
    Column(field="acts", label="", kind="acts"),
)


async def build(view: View) -> None:
    """The newest entries, filtered."""
    page = Audit(view)
    view.every(REFRESH_S, page.load)


class Audit:
    """The list, as long as it was asked for."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._size = PAGE_SIZE
        self._found: dict[str, JsonObject] = {}
        with ui.element("div").classes("fields").props('role=search aria-label="Filter"'):
            self._filters = {
                name: ui.input(label, on_change=view.soon).props("outlined dense clearable debounce=300")
                for name, label in (("actor", "Who"), ("action", "What"), ("target", "Of what"))
            }
        if view.api.may("GET", "/audit/export"):
            ui.html(
                f'<a class="link" href="{PREFIX}/audit/export" download="audit.ndjson">Export all (NDJSON)</a>',
                sanitize=False,
            )
        self._table = Table(_COLUMNS, label="Audit log, the newest first", on_act=self._act, empty="No entries.")
        self._more = button("Older entries", self._grow).classes("own-width")

    async def load(self) -> None:
        """Ask and show."""
        filters = {name: text_of(field) for name, field in self._filters.items()}
        found = await self._view.api.get("/audit", limit=self._size, **filters)
        self._found = {one["id"]: one for one in found["items"]}
        self._more.set_visibility(found["next"] is not None and self._size < MOST)
        self._table.show([_row(one) for one in found["items"]])

    def _grow(self) -> None:
        self._size = min(MOST, 2 * self._size)
        self._view.soon()

    async def _act(self, _: str, row: dict[str, Any]) -> None:
        one = self._found.get(row["key"])
        if one is None:
            return
        with panel(f"{one['action']} by {one['actor']}"):
            for label, name in (("Before", "before"), ("After", "after")):
                if one[name] is not None:
                    ui.label(label).classes("tile-label")
                    ui.label(words.pretty(one[name])).classes("json")


def _row(one: JsonObject) -> JsonObject:
    has_more = one["before"] is not None or one["after"] is not None
    return {
        "key": one["id"],
        "name": f"{one['action']} {one['target']}",
        "at": words.moment(one["at"]),
        "who": f"{one['actor'] or 'nobody'} ({one['role'] or 'no role'})",
        "origin": one["from"] or words.NONE,
        "action": one["action"],
        "target": one["target"] or words.NONE,
        "reason": one["reason"] or words.NONE,
        "outcome": [chip(one["outcome"], "good" if one["outcome"] == "ok" else "bad")],
        "acts": [act("look", "Before, after")] if has_more else [],
    }


PAGE = Page(path="/audit", title="Audit", icon="history", build=build)
