"""Why a request went where it went, or where one would go: the API's explanation, laid out."""

from typing import Any, Final

from nicegui import ui

from gateway.console import words
from gateway.console.client import ApiError
from gateway.console.dialogs import Form, panel, say, text_of, texts
from gateway.console.pages.switches import scope_words
from gateway.console.tables import Column, Table, chip
from gateway.console.view import View
from gateway.ports import JsonObject

_FIELDS: Final = (
    ("task", "Task"),
    ("tenant", "Tenant"),
    ("key", "Key's id"),
    ("model", "Model"),
    ("version", "Version"),
    ("session", "Session"),
    ("headers", "Headers (name: value; ...)"),
)
_CANDIDATES: Final = (
    Column(field="rank", label="Order", kind="number"),
    Column(field="place", label="Place", kind="code"),
    Column(field="side", label="From"),
    Column(field="taken", label="", kind="chips"),
    Column(field="score", label="Score"),
    Column(field="reason", label="Why"),
)


def ask_explain(view: View) -> None:
    """Ask for a request, and show where it would go."""
    with (
        Form("Explain a request", "Nothing is sent anywhere.", confirm="Explain", is_wide=True) as form,
        ui.element("div").classes("fields"),
    ):
        fields = {name: ui.input(label).props("outlined dense") for name, label in _FIELDS}
        form.require(fields["task"])
        priority = ui.select(["interactive", "batch"], value="interactive", label="Priority").props("outlined dense")

    async def ask() -> JsonObject:
        request: dict[str, Any] = {name: text_of(field) for name, field in fields.items() if text_of(field)}
        pairs = [part.partition(":") for part in request.pop("headers", "").split(";") if part.strip()]
        request |= {"priority": priority.value, "headers": {name.strip(): value.strip() for name, _, value in pairs}}
        found = await view.api.change("POST", "/explain", body={"request": request})
        with view.client:
            show_explanation(found, "Where it would go")
        return {}

    form.then(ask, "Explained")


async def explain_past(view: View, request_id: str) -> None:
    """Show why one of the last requests went where it went."""
    try:
        found = await view.api.change("POST", "/explain", body={"request_id": request_id})
    except ApiError as error:
        say(error.detail)
        return
    show_explanation(found, f"Request {request_id}")


def show_explanation(found: JsonObject, title: str) -> None:
    """The rule, every candidate with its reason, what would apply, and what became of it."""
    with panel(title):
        rule = f"Rule '{found['rule']}'" if found["rule"] else "No rule takes it"
        ui.label(f"{rule}, at revision {found['revision']}.").classes("strong")
        if found.get("outcome"):
            ui.label(_outcome(found["outcome"]))
        if found["rules"]:
            ui.label("Rules, in their order").classes("tile-label")
            texts(f"{one['rule']}: {one['why']}" for one in found["rules"])
        table = Table(_CANDIDATES, label="Candidates", empty="There is no candidate.")
        table.show([_candidate(place, one) for place, one in enumerate(found["candidates"])])
        lines = [f"Limit of the {one['of']}: {one['limit']}" for one in found["limits"]]
        lines += [
            f"Switch: {one['action']} for {scope_words(one['scope'])}: {one['reason']}" for one in found["switches"]
        ]
        lines += [f"Header {name}: {value}" for name, value in found["headers"].items()]
        if found["policies"]:
            lines.append(f"Policies: {words.short(found['policies'], 400)}")
        if lines:
            ui.label("What applies").classes("tile-label")
            texts(lines)


def _outcome(one: JsonObject) -> str:
    where = f"at {one['place']}" if one.get("place") else "nowhere"
    return f"It ended {where} with {one['status']} {one['code']}, after {words.millis(one['total_ms'])}."


def _candidate(place: int, one: JsonObject) -> JsonObject:
    return {
        "key": str(place),
        "name": one["place"],
        "rank": words.number(one["rank"]),
        "place": one["place"],
        "side": one["side"],
        "taken": [chip("taken", "good")] if one["taken"] else [],
        "score": one["score"] or words.NONE,
        "reason": one["reason"] or words.NONE,
    }
