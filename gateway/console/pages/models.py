"""Models: their versions on each server, what they count; load, unload, deploy a version, and roll back."""

from typing import Any, Final

from nicegui import ui

from gateway.console import words
from gateway.console.dialogs import Form, text_of
from gateway.console.tables import Column, Table, Tone, act, bar, chip
from gateway.console.view import Page, View
from gateway.ports import JsonObject

REFRESH_S: Final = 2.0
LOAD_S: Final = 660.0  # beyond the API's own patience with a load

UNDONE: Final = ("running", "done", "interrupted")  # deploys that can be rolled back

_TONES: Final[dict[str, Tone]] = {"READY": "good", "LOADING": "busy", "UNLOADING": "busy", "UNAVAILABLE": "plain"}
_STATUS: Final[dict[str, Tone]] = {
    "running": "busy",
    "done": "good",
    "failed": "bad",
    "rolled_back": "bad",
    "interrupted": "warn",
}
_COLUMNS: Final = (
    Column(field="model", label="Model"),
    Column(field="backend", label="Backend"),
    Column(field="ready", label="Servers", kind="chips"),
    Column(field="versions", label="Versions", kind="chips"),
    Column(field="requests", label="Requests", kind="number"),
    Column(field="failures", label="Failures", kind="number"),
    Column(field="batch", label="Mean batch", kind="number"),
    Column(field="queue", label="Queue time", kind="number"),
    Column(field="compute", label="Compute time", kind="number"),
    Column(field="acts", label="", kind="acts"),
)
_DEPLOYS: Final = (
    Column(field="model", label="Model"),
    Column(field="versions", label="Version"),
    Column(field="status", label="Status", kind="chips"),
    Column(field="progress", label="Progress", kind="bar"),
    Column(field="why", label="Why"),
    Column(field="at", label="Began (UTC)", kind="time"),
    Column(field="acts", label="", kind="acts"),
)
_TEXTS: Final = {
    "load": "Every server that has it loads it, or loads it anew.",
    "unload": "No server serves it any more; what has begun is finished.",
    "rollback": "Its last deploy is undone.",
}


async def build(view: View) -> None:
    """The models, and their deploys."""
    page = Models(view)
    view.every(REFRESH_S, page.load)


class Models:
    """Both lists."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._table = Table(
            _COLUMNS, label="Models of all backends", on_act=self._act, empty="No server tells of models."
        )
        self._unreachable = ui.label("").classes("muted")
        ui.label("Deploys").props("role=heading aria-level=2").classes("section")
        self._deploys = Table(
            _DEPLOYS, label="Deploys, the newest first", on_act=self._act_on_deploy, empty="No deploys yet."
        )

    async def load(self) -> None:
        """Ask and show."""
        found = await self._view.api.get("/models")
        deploys = await self._view.api.get("/deploys")
        self._unreachable.text = " ".join(f"{one['backend']}: {one['reason']}." for one in found["unreachable"])
        newest = {one["model"]: one["status"] for one in reversed(deploys["items"])}
        self._table.show([self._row(one, newest.get(one["model"], "")) for one in found["items"]])
        self._deploys.show([self._deploy(one) for one in deploys["items"]])

    def _row(self, one: JsonObject, deploy: str) -> JsonObject:
        """A row; `deploy` is the status of the model's newest one."""
        figures = one["figures"]
        requests = sum(f["requests"] for f in figures)
        batches = sum(f["executions"] for f in figures)
        ready = sum(replica["ready"] for replica in one["replicas"])

        def mean(name: str) -> str:
            return words.millis(sum(f[name] * f["requests"] for f in figures) / requests / 1000 if requests else None)

        offered = (
            ("load", "Load", False),
            ("unload", "Unload", True),
            ("deploy", "Deploy", False),
            ("rollback", "Roll back", True),
        )
        return {
            "key": f"{one['backend']}/{one['model']}",
            "name": one["model"],
            "only": one["backend"],
            "model": one["model"],
            "backend": one["backend"],
            "ready": [
                chip(f"{ready} of {len(one['replicas'])} ready", "good" if ready == len(one["replicas"]) else "warn")
            ],
            "versions": _versions(one),
            "requests": words.number(requests),
            "failures": words.number(sum(f["failures"] for f in figures)),
            "batch": words.number(sum(f["inferences"] for f in figures) / batches if batches else None, 2),
            "queue": mean("queue_us"),
            "compute": mean("compute_infer_us"),
            "acts": [
                act(name, label, is_destructive=destructive)
                for name, label, destructive in offered
                if self._view.api.may("POST", f"/models/{one['model']}/{name}")
                and (name != "rollback" or deploy in UNDONE)
            ],
        }

    def _deploy(self, one: JsonObject) -> JsonObject:
        may = self._view.api.may("POST", f"/deploys/{one['id']}/rollback")
        offered = []
        if may and one["status"] in UNDONE:
            offered.append(act("rollback", "Roll back", is_destructive=True))
        if may and one["status"] == "interrupted":
            offered.append(act("continue", "Go on"))
        return {
            "key": one["id"],
            "name": f"deploy of {one['model']}",
            "model": one["model"],
            "versions": f"{one['old'] or '?'} -> {one['new']}",
            "status": [chip(one["status"].replace("_", " "), _STATUS.get(one["status"], "plain"))],
            "progress": bar(one["weight"] / 100, f"{one['step']}, {one['weight']} %"),
            "why": one["reason"] or "; ".join(one["notes"][-1:]) or words.NONE,
            "at": words.moment(one["started_ms"]),
            "acts": offered,
        }

    async def _act(self, name: str, row: dict[str, Any]) -> None:
        if name == "deploy":
            self._ask_deploy(row)
            return
        model, is_destructive = row["model"], name != "load"
        label = {"load": "Load", "unload": "Unload", "rollback": "Roll back"}[name]
        with Form(f"{label} '{model}'", _TEXTS[name], confirm=label, is_destructive=is_destructive) as form:
            reason = form.reason(is_required=is_destructive)

        async def change() -> JsonObject:
            body = None if name == "rollback" else {"backend": row["only"]}
            why = text_of(reason)
            return await self._view.api.change(
                "POST", f"/models/{model}/{name}", body=body, reason=why, within_s=LOAD_S
            )

        form.then(
            self._view.and_soon(change), f"{label} of '{model}' is done" if name != "rollback" else "It goes back"
        )

    def _ask_deploy(self, row: dict[str, Any]) -> None:
        model = row["model"]
        text = "The version's folder is in the repository. Its callers are moved share by share."
        with Form(f"Deploy a version of '{model}'", text, confirm="Deploy", is_destructive=True) as form:
            version = form.require(ui.input("Version").props("outlined inputmode=numeric"))
            canary = ui.number("First share in percent", value=10, min=1, max=100, precision=0).props("outlined")
            hold = ui.number("Seconds at each share", value=10, min=0).props("outlined step=any")
            reason = form.reason()

        async def change() -> JsonObject:
            body = {"version": text_of(version), "backend": row["only"], "canary": canary.value, "hold_s": hold.value}
            return await self._view.api.change("POST", f"/models/{model}/deploy", body=body, reason=text_of(reason))

        form.then(self._view.and_soon(change), f"The deploy of '{model}' has begun")

    async def _act_on_deploy(self, name: str, row: dict[str, Any]) -> None:
        is_back = name == "rollback"
        label = "Roll back" if is_back else "Go on"
        with Form(f"{label}: {row['name']}", confirm=label, is_destructive=is_back) as form:
            reason = form.reason(is_required=is_back)

        async def change() -> JsonObject:
            return await self._view.api.change("POST", f"/deploys/{row['key']}/{name}", reason=text_of(reason))

        form.then(self._view.and_soon(change), "It goes back" if is_back else "It goes on")


def _versions(one: JsonObject) -> list[dict[str, str]]:
    """Each version with its state; where servers differ, each state with how many are in it."""
    states: dict[tuple[str, str], list[str]] = {}
    for replica in one["replicas"]:
        for version in replica["versions"]:
            states.setdefault((version["version"], version["state"]), []).append(version["reason"])
    servers = len(one["replicas"])
    found = []
    for (version, state), reasons in sorted(states.items()):
        share = f" on {len(reasons)} of {servers}" if len(reasons) < servers else ""
        found.append(chip(f"{version or '?'} {state.lower()}{share}", _TONES.get(state, "plain"), reasons[0]))
    return found


PAGE = Page(path="/models", title="Models", icon="view_in_ar", build=build)
