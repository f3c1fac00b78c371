"""Progressive rollouts: how far each has got, the new version beside the old one, on to the next step, or back."""

from collections.abc import Sequence
from typing import Any, Final

from nicegui import ui

from gateway.console import words
from gateway.console.dialogs import Form, button, panel, text_of, texts
from gateway.console.tables import Column, Table, Tone, act, bar, chip
from gateway.console.view import Page, View
from gateway.ports import JsonObject

_TONES: Final[dict[str, Tone]] = {
    "running": "busy",
    "done": "good",
    "aborted": "warn",
    "rolled_back": "bad",
    "failed": "bad",
}
_COLUMNS: Final = (
    Column(field="rule", label="Rule"),
    Column(field="target", label="To", kind="code"),
    Column(field="status", label="Status", kind="chips"),
    Column(field="progress", label="Progress", kind="bar"),
    Column(field="why", label="Why, and what next"),
    Column(field="errors", label="Errors, new / old", kind="number"),
    Column(field="p99", label="p99, new / old", kind="number"),
    Column(field="requests", label="Requests, new / old", kind="number"),
    Column(field="acts", label="", kind="acts"),
)
_STEPS: Final = "1, 10, 50, 100"


async def build(view: View) -> None:
    """The rollouts, the newest first, and a way to begin one."""
    page = Rollouts(view)
    view.every(1.0, page.load)


class Rollouts:
    """The list, and what can be done to those that run."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._found: dict[str, JsonObject] = {}
        if view.api.may("POST", "/rollouts"):
            button("Start a rollout", self._start, kind="main").classes("own-width")
        self._table = Table(_COLUMNS, label="Rollouts, the newest first", on_act=self._act, empty="No rollouts yet.")

    async def load(self) -> None:
        """Ask and show."""
        found = (await self._view.api.get("/rollouts"))["items"]
        self._found = {one["id"]: one for one in found}
        self._table.show([self._row(one) for one in found])

    async def _start(self) -> None:
        found = await self._view.ask("/rules")
        if found is not None:
            await ask_start(self._view, found["rules"])

    def _row(self, one: JsonObject) -> JsonObject:
        new, old = one["canary"], one["baseline"]
        acts = [act("details", "Details")]
        if one["status"] == "running" and self._view.api.may("POST", f"/rollouts/{one['id']}/promote"):
            acts += [act("promote", "Next step"), act("abort", "Abort", is_destructive=True)]
        share = 1.0 if one["status"] == "done" else one["percent"] / 100
        return {
            "key": one["id"],
            "name": f"rollout of {one['rule']}",
            "rule": one["rule"],
            "target": words.place(one["target"]),
            "status": [chip(one["status"].replace("_", " "), _TONES.get(one["status"], "plain")), *_held(one)],
            "progress": bar(share, f"{one['percent']} %, step {one['step'] + 1} of {len(one['steps'])}"),
            "why": _why(one),
            "errors": words.pair(words.percent(new["error_ratio"]), words.percent(old["error_ratio"])),
            "p99": words.pair(words.millis(new["p99_ms"]), words.millis(old["p99_ms"])),
            "requests": f"{words.number(new['requests'])} / {words.number(old['requests'])}",
            "acts": acts,
        }

    async def _act(self, name: str, row: dict[str, Any]) -> None:
        one = self._found.get(row["key"])
        if one is None:
            return
        if name == "details":
            _show_details(one)
            return
        is_abort = name == "abort"
        title = f"Abort the rollout of '{one['rule']}'" if is_abort else f"Next step of the rollout of '{one['rule']}'"
        text = (
            "The split becomes what it was."
            if is_abort
            else f"It goes on from {one['percent']} % now, without waiting."
        )
        with Form(title, text, confirm="Abort" if is_abort else "Next step", is_destructive=is_abort) as form:
            reason = form.reason(is_required=is_abort)

        async def change() -> JsonObject:
            why = text_of(reason)
            return await self._view.api.change("POST", f"/rollouts/{one['id']}/{name}", body={"note": why}, reason=why)

        form.then(self._view.and_soon(change), "The rollout is aborted" if is_abort else "The next step is in force")


async def ask_start(view: View, rules: Sequence[JsonObject], rule: str | None = None) -> None:
    """Ask for all that a rollout needs, and start it."""
    by_weight = [one for one in rules if one.get("strategy", "weighted") == "weighted"]  # the API takes no others
    names = [one["name"] for one in by_weight]
    first: JsonObject = next((one["split"][0] for one in by_weight if rule in (None, one["name"])), {})
    with Form(
        "Start a rollout", "The new target gets more and more of the rule's requests.", confirm="Start", is_wide=True
    ) as form:
        chosen = ui.select(names, label="Rule", value=rule or (names[0] if names else None)).props("outlined")
        with ui.element("div").classes("fields"):
            backend = form.require(_field("Backend", first.get("backend", "")))
            model = form.require(_field("Model", first.get("model", "")))
            version = _field("Version")
            steps = form.require(_field("Steps in percent", _STEPS))
            hold = form.require(_field("Seconds at each step", "60"))
        ui.label("The guard takes it back when the new target").classes("muted")
        with ui.element("div").classes("fields"):
            errors = _field("fails more often (%)", "2")
            slow = _field("has a p99 above (ms)")
            violations = _field("breaks its contract (%)")
            least = _field("after so many requests", "200")
        note = form.reason(is_required=False)

    async def change() -> JsonObject:
        target = {"backend": text_of(backend), "model": text_of(model), "version": text_of(version)}
        guard = {
            "max_error_ratio": _ratio(errors),
            "max_p99_ms": _whole(slow),
            "max_violation_ratio": _ratio(violations),
            "min_requests": _whole(least),
        }
        body = {
            "rule": chosen.value,
            "target": {k: v for k, v in target.items() if v},
            "steps": [int(part) if part.strip().isdigit() else part for part in text_of(steps).split(",")],
            "hold_s": _whole(hold),
            "guard": {k: v for k, v in guard.items() if v is not None},
            "note": text_of(note),
        }
        return await view.api.change("POST", "/rollouts", body=body, reason=text_of(note))

    form.then(view.and_soon(change), "The rollout has begun")


def _field(label: str, value: str = "") -> ui.input:
    return ui.input(label, value=value).props("outlined dense")


def _ratio(field: ui.input) -> float | str | None:
    """Percent as a ratio; what is no number is left for the API to refuse."""
    text = text_of(field)
    try:
        return float(text) / 100 if text else None
    except ValueError:
        return text


def _whole(field: ui.input) -> float | str | None:
    text = text_of(field)
    try:
        return int(text) if text else None
    except ValueError:
        return text


def _held(one: JsonObject) -> list[dict[str, str]]:
    return [chip("held", "warn", one["held"])] if one.get("held") and one["status"] == "running" else []


def _why(one: JsonObject) -> str:
    if one["status"] != "running":
        return one["reason"] or words.NONE
    if one["held"]:
        return f"Held: {one['held']}"
    return f"Next step at {words.when(one['next_at'])[11:]} UTC" if one["next_at"] else "The last step"


def _show_details(one: JsonObject) -> None:
    with panel(f"Rollout {one['id']} of '{one['rule']}'"):
        ui.label(f"By {one['actor']}, {words.when(one['started_at'])} UTC. {one['note']}")
        ui.label(f"Steps: {', '.join(f'{step} %' for step in one['steps'])}, {one['hold_s']} s each").classes("muted")
        guard = {name: value for name, value in (one["guard"] or {}).items() if value is not None}
        ui.label(f"Guard: {words.short(guard or 'the rule has none', 300)}").classes("muted")
        texts(f"{words.when(event['at'])[11:]}  {event['what']}" for event in one["events"])


PAGE = Page(path="/rollouts", title="Rollouts", icon="trending_up", build=build)
