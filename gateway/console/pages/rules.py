"""Tasks and rules: what takes which task, on or off, the weights of its targets; and the history, with a way back."""

from collections.abc import Mapping
from typing import Any, Final

from nicegui import ui

from gateway.console import words
from gateway.console.dialogs import Form, Range, button, panel, search, text_of, texts
from gateway.console.pages.effect import Effect
from gateway.console.pages.rollouts import ask_start
from gateway.console.tables import Column, Table, Tone, act, chip, having
from gateway.console.view import Page, View
from gateway.core.rules import Strategy
from gateway.ports import JsonObject

PAGE_SIZE: Final = 10
MOST: Final = 200  # as many as are kept
HISTORY_S: Final = 5.0
WORKERS_S: Final = 5.0
MAX_WEIGHT: Final = 100
STRATEGIES: Final[Mapping[Strategy, str]] = {
    "weighted": "by weight",
    "ordered": "in this order",
    "least_in_flight": "least in flight first",
    "fastest": "fastest first",
    "cheapest": "cheapest first",
    "prefix_affinity": "where its prefix was before",
}

_COLUMNS: Final = (
    Column(field="name", label="Rule"),
    Column(field="task", label="Task"),
    Column(field="state", label="State", kind="chips"),
    Column(field="split", label="Split", kind="chips"),
    Column(field="fallback", label="Fallback", kind="chips"),
    Column(field="more", label="Also"),
    Column(field="acts", label="", kind="acts"),
)
_HISTORY: Final = (
    Column(field="revision", label="Revision", kind="number"),
    Column(field="at", label="At (UTC)", kind="time"),
    Column(field="by", label="By"),
    Column(field="action", label="What"),
    Column(field="note", label="Note"),
    Column(field="count", label="Rules", kind="number"),
    Column(field="state", label="", kind="chips"),
    Column(field="acts", label="", kind="acts"),
)


async def build(view: View) -> None:
    """The rules, and their history."""
    page = Rules(view)
    view.every(WORKERS_S, page.load_workers)
    view.every(1.0, page.load)
    view.every(HISTORY_S, page.load_history)


class Rules:
    """The newest set as the page last saw it; every change names its revision."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._set: JsonObject = {"revision": 0, "rules": []}
        self._moving: dict[str, JsonObject] = {}
        self._on: frozenset[str] | None = None
        self._heading = ui.label("").classes("muted")
        self._filter = search("Filter by name, task, place ...", self._show)
        self._table = Table(_COLUMNS, label="Rules, the first that matches wins", on_act=self._act, empty="No rule.")
        ui.label("History").props("role=heading aria-level=2").classes("section")
        self._size = PAGE_SIZE
        self._history = Table(_HISTORY, label="Revisions, the newest first", on_act=self._act_on_revision)
        self._older = button("Older revisions", self._grow).classes("own-width")

    async def load_workers(self) -> None:
        """The backends that some worker has on; None where none tells."""
        reports = [one["report"] for one in (await self._view.api.get("/workers"))["items"] if one["report"]]
        self._on = frozenset(name for report in reports for name in report["replicas"]) if reports else None

    async def load(self) -> None:
        """The rules, and which of them a rollout moves."""
        self._set = found = await self._view.api.get("/rules")
        rollouts = await self._view.api.get("/rollouts")
        self._moving = {one["rule"]: one for one in rollouts["items"] if one["status"] == "running"}
        frozen = found.get("frozen")
        self._view.notice(
            "frozen",
            f"Changes are frozen by {frozen['owner']} for {words.lasting(frozen['remaining_s'])}: {frozen['reason']}"
            if frozen
            else "",
        )
        self._show()

    def _show(self) -> None:
        rows = [self._row(rule, self._moving.get(rule["name"])) for rule in self._set["rules"]]
        shown = having(rows, text_of(self._filter))
        some = f" {len(shown)} of {len(rows)} rules are shown." if len(shown) < len(rows) else ""
        self._heading.text = f"Revision {self._set['revision']}. The first rule that matches a request takes it.{some}"
        self._table.show(shown)

    async def load_history(self) -> None:
        """The newest revisions."""
        found = await self._view.api.get("/rules/revisions", limit=self._size)
        self._older.set_visibility(found["next"] is not None and self._size < MOST)
        may_roll_back = self._view.api.may("POST", "/rules/rollback")
        rows = []
        for one in found["items"]:
            acts = [] if one["in_force"] else [act("diff", "Compare with now")]
            if may_roll_back and not one["in_force"]:
                acts.append(act("rollback", "Roll back to it", is_destructive=True))
            rows.append(
                {
                    "key": str(one["revision"]),
                    "name": f"revision {one['revision']}",
                    "revision": words.number(one["revision"]),
                    "at": words.moment(one["at"]),
                    "by": one["by"] or words.NONE,
                    "action": one["action"],
                    "note": one["note"],
                    "count": words.number(one["rules"]),
                    "state": [chip("in force", "good")] if one["in_force"] else [],
                    "acts": acts,
                }
            )
        self._history.show(rows)

    def _grow(self) -> None:
        self._size = min(MOST, 2 * self._size)
        self._view.soon()

    def _row(self, rule: JsonObject, rollout: JsonObject | None) -> JsonObject:
        state = [chip("on", "good") if rule["enabled"] else chip("off", "bad")]
        if rollout:
            state.append(chip(f"rollout at {rollout['percent']} %", "busy"))
        targets = [*rule["split"], *rule.get("fallback", [])]
        if targets and all(self._is_off(target) for target in targets):
            state.append(chip("no place is on", "bad", "no worker has the backend of any of its places on"))
        acts = []
        if self._view.api.may("PATCH", f"/rules/{rule['name']}"):
            acts.append(act("off", "Switch off", is_destructive=True) if rule["enabled"] else act("on", "Switch on"))
            if len(rule["split"]) > 1 and is_weighted(rule):
                acts.append(act("weights", "Weights"))
            if not rollout and is_weighted(rule) and self._view.api.may("POST", "/rollouts"):
                acts.append(act("rollout", "Roll out"))
        return {
            "key": rule["name"],
            "name": rule["name"],
            "task": rule["match"].get("task", "*"),
            "state": state,
            "split": self._split(rule),
            "fallback": [self._place(target) for target in rule.get("fallback", [])],
            "more": _more(rule),
            "acts": acts,
        }

    def _split(self, rule: JsonObject) -> list[dict[str, str]]:
        """The places as the strategy takes them: with shares, in order, or just those that there are."""
        split = rule["split"]
        strategy: Strategy = rule.get("strategy", "weighted")
        if len(split) == 1:
            return [self._place(split[0], tone="busy")]
        if strategy == "weighted":
            total = sum(target.get("weight", 1) for target in split) or 1
            shares = (words.percent(target.get("weight", 1) / total, 0) for target in split)
            return [self._place(one, after=f" {share}", tone="busy") for one, share in zip(split, shares, strict=True)]
        numbers = (f"{i}. " if strategy == "ordered" else "" for i in range(1, len(split) + 1))
        places = [self._place(one, before=number, tone="busy") for one, number in zip(split, numbers, strict=False)]
        return [chip(STRATEGIES[strategy]), *places]

    def _place(self, target: JsonObject, *, before: str = "", after: str = "", tone: Tone = "plain") -> dict[str, str]:
        text = f"{before}{words.place(target)}{after}"
        if self._is_off(target):
            return chip(f"{text} (off)", "off", f"no worker has the backend '{target['backend']}' on: see Backends")
        return chip(text, tone)

    def _is_off(self, target: JsonObject) -> bool:
        return self._on is not None and target["backend"] not in self._on

    async def _act(self, name: str, row: dict[str, Any]) -> None:
        rule = next((one for one in self._set["rules"] if one["name"] == row["key"]), None)
        if rule is None:
            return
        if name == "weights":
            self._ask_weights(rule)
        elif name == "rollout":
            await ask_start(self._view, self._set["rules"], rule["name"])
        else:
            self._ask_switch(rule, enabled=name == "on")

    def _ask_switch(self, rule: JsonObject, *, enabled: bool) -> None:
        api, revision, name = self._view.api, self._set["revision"], rule["name"]
        word = "on" if enabled else "off"
        with Form(f"Switch {word} the rule '{name}'", confirm=f"Switch {word}", is_destructive=not enabled) as form:
            reason = form.reason(is_required=not enabled)
            Effect(api, self._with(rule, {"enabled": enabled})).look()

        async def change() -> JsonObject:
            body = {"enabled": enabled, "note": text_of(reason)}
            return await api.change("PATCH", f"/rules/{name}", body=body, reason=text_of(reason), revision=revision)

        form.then(self._view.and_soon(change), f"Rule '{name}' is {word}")

    def _ask_weights(self, rule: JsonObject) -> None:
        api, revision, name = self._view.api, self._set["revision"], rule["name"]
        labels: list[ui.label] = []
        ranges: list[Range] = []

        def rules() -> list[JsonObject]:
            split = [{**target, "weight": one.value} for target, one in zip(rule["split"], ranges, strict=True)]
            return self._with(rule, {"split": split})

        def changed() -> None:
            total = sum(one.value for one in ranges)
            for label, one, target in zip(labels, ranges, rule["split"], strict=True):
                label.text = f"{words.place(target)}: {one.value} ({words.percent(one.value / (total or 1), 0)})"
            effect.look()

        with Form(f"Weights of '{name}'", confirm="Save", is_wide=True) as form:
            for target in rule["split"]:
                labels.append(ui.label(""))
                most = max(MAX_WEIGHT, target["weight"])
                ranges.append(Range(f"Weight of {words.place(target)}", target["weight"], most, changed))
            effect = Effect(api, rules)
            reason = form.reason(is_required=False)
        changed()

        async def change() -> JsonObject:
            body = {"weights": [one.value for one in ranges], "note": text_of(reason)}
            return await api.change("PATCH", f"/rules/{name}", body=body, reason=text_of(reason), revision=revision)

        form.then(self._view.and_soon(change), f"Weights of '{name}' are saved")

    def _with(self, rule: JsonObject, fields: JsonObject) -> list[JsonObject]:
        """The whole set with some fields of one rule changed."""
        return [{**one, **fields} if one["name"] == rule["name"] else one for one in self._set["rules"]]

    async def _act_on_revision(self, name: str, row: dict[str, Any]) -> None:
        api, number, current = self._view.api, int(row["key"]), self._set["revision"]
        found = await self._view.ask(
            "/rules/diff",
            **{"from": current if name == "rollback" else number},
            to=number if name == "rollback" else current,
        )
        if found is None:
            return
        lines = [one["text"] for one in found["changes"]]
        if name == "diff":
            with panel(f"From revision {number} to revision {current}"):
                texts(lines, "The rules are the same.")
            return
        with Form(
            f"Roll back to revision {number}", "Workers would run:", confirm="Roll back", is_destructive=True
        ) as form:
            texts(lines, "the same rules as now.")
            reason = form.reason()

        async def change() -> JsonObject:
            body = {"revision": number, "note": text_of(reason)}
            return await api.change("POST", "/rules/rollback", body=body, reason=text_of(reason))

        form.then(self._view.and_soon(change), f"The rules of revision {number} are back")


def is_weighted(rule: Mapping[str, Any]) -> bool:
    """Whether the weights of its split have a say."""
    return bool(rule.get("strategy", "weighted") == "weighted")


def _more(rule: Mapping[str, Any]) -> str:
    """What else the rule says, in a few words."""
    match = {k: v for k, v in rule["match"].items() if k != "task" and v not in ("*", None, [], {}, "")}
    parts = [f"{k} {words.short(v, 40)}" for k, v in match.items()]
    if not is_weighted(rule) and len(rule["split"]) == 1:
        parts.append(STRATEGIES[rule["strategy"]])
    if rule.get("shadow"):
        parts.append(f"shadow {words.place(rule['shadow'])}")
    if rule.get("guard"):
        parts.append("guarded")
    if rule.get("limits"):
        parts.append("limited")
    return ", ".join(parts) or words.NONE


PAGE = Page(path="/rules", title="Tasks and rules", icon="alt_route", build=build)
