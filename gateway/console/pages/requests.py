"""The last requests, with filters, and why each went where it went; or where one would go."""

from typing import Any, Final

from nicegui import ui

from gateway.console import words
from gateway.console.dialogs import button
from gateway.console.pages.explaining import ask_explain, explain_past
from gateway.console.tables import Column, Table, act, chip
from gateway.console.view import Page, View
from gateway.ports import JsonObject

REFRESH_S: Final = 2.0
SIZE: Final = 50
_FILTERS: Final = (("task", "Task"), ("tenant", "Tenant"), ("rule", "Rule"), ("backend", "Backend"), ("code", "Code"))
_COLUMNS: Final = (
    Column(field="at", label="At (UTC)", kind="time"),
    Column(field="task", label="Task"),
    Column(field="tenant", label="Tenant"),
    Column(field="code", label="Outcome", kind="chips"),
    Column(field="rule", label="Rule"),
    Column(field="place", label="Place", kind="code"),
    Column(field="total", label="Total", kind="number"),
    Column(field="queue", label="Queue", kind="number"),
    Column(field="tokens", label="Tokens in / out", kind="number"),
    Column(field="cost", label="Cost", kind="number"),
    Column(field="acts", label="", kind="acts"),
)


async def build(view: View) -> None:
    """The newest requests, live until they are held."""
    page = Requests(view)
    view.every(REFRESH_S, page.load)


class Requests:
    """The list."""

    def __init__(self, view: View) -> None:
        self._view = view
        with ui.element("div").classes("fields").props('role=search aria-label="Filter"'):
            self._filters = {
                name: ui.input(label, on_change=view.soon).props("outlined dense clearable debounce=300")
                for name, label in _FILTERS
            }
        with ui.element("div").classes("row-of"):
            self._is_live = ui.switch("Live", value=True)
            if view.api.may("POST", "/explain"):
                button("Explain a request", lambda: ask_explain(view), kind="main")
        self._table = Table(_COLUMNS, label="Requests, the newest first", on_act=self._act, empty="No requests.")

    async def load(self) -> None:
        """Ask and show, unless the list is held."""
        if not self._is_live.value:
            return
        filters = {name: str(field.value or "").strip() for name, field in self._filters.items()}
        found = await self._view.api.get("/requests", limit=SIZE, **filters)
        self._table.show([_row(one) for one in found["items"]])

    async def _act(self, _: str, row: dict[str, Any]) -> None:
        await explain_past(self._view, row["id"])


def _row(one: JsonObject) -> JsonObject:
    usage = one.get("usage") or {}
    return {
        "key": f"{one['id']}|{one['at_ms']}",
        "id": one["id"],
        "name": one["id"],
        "at": words.moment(one["at_ms"]),
        "task": one["task"],
        "tenant": one["tenant"] or words.NONE,
        "code": [chip(f"{one['status']} {one['code']}", "good" if one["code"] == "ok" else "bad")],
        "rule": one["rule"] or words.NONE,
        "place": one["place"] or words.NONE,
        "total": words.millis(one["total_ms"]),
        "queue": words.millis(one["queue_ms"]),
        "tokens": words.pair(words.number(usage.get("input_tokens")), words.number(usage.get("output_tokens"))),
        "cost": words.usd(usage.get("cost_usd")),
        "acts": [act("explain", "Explain")],
    }


PAGE = Page(path="/requests", title="Requests", icon="receipt_long", build=build)
