"""Backends and their replicas: whether they live, why they get nothing, how much they have; drain one, and resume."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

from nicegui import ui

from gateway.console import words
from gateway.console.dialogs import Form, text_of
from gateway.console.pages.switches import TIMES, ask_end, in_flight
from gateway.console.tables import Column, Table, act, chip
from gateway.console.view import Page, View
from gateway.ports import JsonObject

FIGURES_S: Final = 5.0
_COLUMNS: Final = (
    Column(field="backend", label="Backend"),
    Column(field="kind", label="Kind"),
    Column(field="replica", label="Replica", kind="code"),
    Column(field="health", label="Health", kind="chips"),
    Column(field="note", label="Why"),
    Column(field="flight", label="In flight", kind="number"),
    Column(field="waiting", label="Waiting", kind="number"),
    Column(field="probe", label="Probe", kind="number"),
    Column(field="queue", label="Queue time", kind="number"),
    Column(field="batch", label="Mean batch", kind="number"),
    Column(field="engine", label="Engine"),
    Column(field="acts", label="", kind="acts"),
)


async def build(view: View) -> None:
    """Every replica of every backend."""
    page = Backends(view)
    view.every(FIGURES_S, page.load_figures)
    view.every(1.0, page.load)


class Backends:
    """The list; a drain is a switch for one replica."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._switches: dict[str, JsonObject] = {}
        self._figures: dict[tuple[str, str], tuple[str, str]] = {}
        self._found: dict[str, tuple[JsonObject, JsonObject]] = {}
        ui.label("A drained replica gets no new requests; what is in flight there ends by itself.").classes("muted")
        self._table = Table(_COLUMNS, label="Replicas of all backends", on_act=self._act, empty="No backends.")

    async def load(self) -> None:
        """Ask for replicas and switches, and show both."""
        backends = (await self._view.api.get("/backends"))["items"]
        switches = (await self._view.api.get("/switches"))["items"]
        self._switches = {one["id"]: one for one in switches}
        self._found = {
            f"{backend['backend']}@{replica['replica']}": (backend, replica)
            for backend in backends
            for replica in backend["replicas"] or [{"replica": ""}]
        }
        self._table.show([self._row(key, *both) for key, both in self._found.items()])

    async def load_figures(self) -> None:
        """What model servers count: how long requests wait there, and how many run together."""
        found = (await self._view.api.get("/models"))["items"]
        sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
        for model in found:
            for one in model["figures"]:
                into = sums[model["backend"], one["replica"]]
                for place, value in enumerate(
                    (one["queue_us"] * one["requests"], one["requests"], one["inferences"], one["executions"])
                ):
                    into[place] += value
        self._figures = {
            where: (
                words.millis(queue_us / requests / 1000 if requests else None),
                words.number(rows / batches if batches else None, 2),
            )
            for where, (queue_us, requests, rows, batches) in sums.items()
        }

    def _row(self, key: str, backend: JsonObject, replica: JsonObject) -> JsonObject:
        queue, batch = self._figures.get((backend["backend"], replica["replica"]), (words.NONE, words.NONE))
        held = self._held(replica)
        return {
            "key": key,
            "name": key.rstrip("@"),
            "backend": backend["backend"],
            "kind": backend["kind"],
            "replica": replica["replica"] or words.NONE,
            "health": [*self._health(backend, replica), *(part for one in held for part in _switch_chips(one))],
            "note": backend["detail"] if backend["is_on"] is False else replica.get("error") or words.NONE,
            "flight": words.number(replica.get("in_flight")),
            "waiting": words.number(replica.get("waiting")),
            "probe": words.millis(replica.get("latency_ms")),
            "queue": queue,
            "batch": batch,
            "engine": _engine(replica.get("engine")),
            "acts": self._acts(backend, held),
        }

    def _held(self, replica: JsonObject) -> list[JsonObject]:
        return [self._switches[one] for one in replica.get("switches", ()) if one in self._switches]

    def _acts(self, backend: JsonObject, held: Iterable[JsonObject]) -> list[dict[str, str]]:
        drains = [one for one in held if one["action"] == "drain"]
        if drains:
            return [act("resume", "Resume")] if self._view.api.may("DELETE", "/switches/x") else []
        if backend["is_on"] is False:
            return []  # it gets nothing as it is
        return [act("drain", "Drain", is_destructive=True)] if self._view.api.may("POST", "/switches") else []

    @staticmethod
    def _health(backend: JsonObject, replica: JsonObject) -> list[dict[str, str]]:
        found = [chip(words.short(reason, 60), "bad", reason) for reason in replica.get("shut") or ()]
        if replica.get("live") is False:
            found.append(chip("does not answer", "bad", replica.get("error", "")))
        elif replica.get("live"):
            found.insert(0, chip("live", "good"))
        if backend["is_on"] is False:
            found = [chip("off", "off"), *found]
        elif not backend["replicas"]:
            found.append(chip("no worker tells of it", "plain", backend["detail"]))
        return found

    async def _act(self, name: str, row: dict[str, Any]) -> None:
        both = self._found.get(row["key"])
        if both is None:
            return
        backend, replica = both
        if name == "resume":
            drains = [one for one in self._held(replica) if one["action"] == "drain"]
            ask_end(self._view, drains, f"Resume {row['name']}")
            return
        scope = (
            {"replica": f"{backend['backend']}@{replica['replica']}"}
            if replica["replica"]
            else {"backend": backend["backend"]}
        )
        text = "It gets no new requests until the time is over or it is resumed."
        with Form(f"Drain {row['name']}", text, confirm="Drain", is_destructive=True) as form:
            reason = form.reason()
            lasts = ui.select(TIMES, value=3600, label="For how long").props("outlined")

        async def change() -> JsonObject:
            body = {"action": "drain", "scope": scope, "reason": text_of(reason), "ttl_s": lasts.value}
            return await self._view.api.change("POST", "/switches", body=body, reason=text_of(reason))

        form.then(self._view.and_soon(change), f"{row['name']} drains")


def _switch_chips(one: JsonObject) -> list[dict[str, str]]:
    left = words.lasting(one["remaining_s"])
    title = f"{one['owner']}: {one['reason']}"
    if one["action"] == "drain":
        return [chip(f"draining, {left}", "warn", title), *in_flight(one)]
    return [chip(f"{one['action'].replace('_', ' ')}, {left}", "bad", title)]


def _engine(engine: JsonObject | None) -> str:
    if not engine:
        return words.NONE
    cache = engine.get("kv_used")
    used = "" if cache is None else f", KV {words.percent(cache, 0)}"
    return f"{engine['running']} run, {engine['waiting']} wait{used}"


PAGE = Page(path="/backends", title="Backends", icon="dns", build=build)
