"""The first page: what the gateway does now, and in the last minutes, by the places that answer."""

import time
from collections.abc import Sequence
from typing import Any, Final

from nicegui import ui

from gateway.console import words
from gateway.console.charts import LineChart
from gateway.console.tables import Column, Table, chip
from gateway.console.view import Page, View
from gateway.ports import JsonObject

WINDOWS: Final = {60: "1 minute", 300: "5 minutes", 1800: "30 minutes", 3600: "1 hour"}
LIVE_S: Final = 0.25  # workers tell four times a second: what is switched is seen within one
CHARTS_S: Final = 1.0  # between drawings of all charts but the first
LINES: Final = 8  # the busiest series; the others are one more line

_TILES: Final = (
    ("requests_per_s", "Requests / s"),
    ("error_ratio", "Errors"),
    ("p50_ms", "p50"),
    ("p99_ms", "p99"),
    ("first_token_p50_ms", "First token, p50"),
    ("tokens_per_s", "Tokens / s"),
    ("usd_per_hour", "Cost / hour"),
    ("in_flight", "In flight"),
    ("waiting", "Waiting"),
    ("workers", "Workers"),
)
_COLUMNS: Final = (
    Column(field="task", label="Task"),
    Column(field="rule", label="Rule"),
    Column(field="place", label="Place", kind="code"),
    Column(field="rate", label="Requests / s", kind="number"),
    Column(field="errors", label="Errors", kind="chips"),
    Column(field="p50", label="p50", kind="number"),
    Column(field="p99", label="p99", kind="number"),
    Column(field="failed", label="Failed attempts", kind="number"),
)


async def build(view: View) -> None:
    """Tiles, charts, and a table by series."""
    overview = Overview(view)
    view.every(LIVE_S, overview.load)


class Overview:
    """What the page shows of one answer of `/overview`."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._drawn_s = 0.0
        with ui.row().classes("row-of"):
            ui.label("The last").classes("muted")
            self._window = (
                ui.toggle(WINDOWS, value=60, on_change=view.soon)
                .props('no-caps flat dense aria-label="Time span" color="" toggle-color="" toggle-text-color=""')
                .classes("segments")
            )
            self._as_of = ui.label("").classes("muted")
        self._values: dict[str, ui.label] = {}
        self._notes: dict[str, ui.label] = {}
        with ui.element("div").classes("tiles"):
            for name, label in _TILES:
                self._tile(name, label)
        with ui.element("div").classes("charts"):
            self._traffic = LineChart("Requests per second, by place", is_stacked=True)
            self._latency = LineChart("Latency", unit=" ms")
            self._errors = LineChart("Errors", unit=" %")
            self._tokens = LineChart("Tokens per second")
            self._cost = LineChart("Cost per hour", unit=" $")
        ui.label("By task, rule and place").props("role=heading aria-level=2").classes("section")
        self._table = Table(_COLUMNS, label="Figures by task, rule and place", empty="No requests in this time.")

    async def load(self) -> None:
        """Ask and show."""
        window_s = int(self._window.value)
        told = await self._view.api.get("/overview", window_s=window_s)
        self._notice(told)
        self._as_of.text = f"as of {words.when(told['at'])} UTC"
        for name, value in _tile_words(told).items():
            self._values[name].text = value
        self._notes["workers"].text = _workers_note(told["workers"])
        self._show_charts(told)
        self._table.show([_row(one, told["window_s"]) for one in told["by"]])

    def _tile(self, name: str, label: str) -> None:
        with ui.element("div").classes("tile").props(f'role=group aria-label="{label}"'):
            ui.label(label).classes("tile-label")
            self._values[name] = ui.label(words.NONE).classes("tile-value").props(f"data-tile={name}")
            self._notes[name] = ui.label("").classes("tile-note")

    def _notice(self, told: JsonObject) -> None:
        workers, said = told["workers"], []
        if not workers["live"]:
            said.append("No worker is live: nothing is counted.")
        elif told["is_stale"]:
            newest = told.get("newest_s")
            said.append(
                f"Figures are stale: the newest are {words.lasting(newest)} old." if newest else "Figures are stale."
            )
        if workers.get("behind"):
            said.append(f"{workers['behind']} of {workers['live']} workers run an older rule set.")
        if workers.get("refused"):
            said.append(f"{workers['refused']} workers have refused the stored rule set.")
        self._view.notice("overview", " ".join(said))

    def _show_charts(self, told: JsonObject) -> None:
        points = told["points"]
        times = [millis_of(point["t"]) for point in points]
        step_s = max(1.0, (times[1] - times[0]) / 1000) if len(times) > 1 else 1.0

        def line(field: str, scale: float = 1.0) -> list[tuple[float, float | None]]:
            values = [point[field] for point in points]
            return [(t, None if v is None else round(v * scale, 3)) for t, v in zip(times, values, strict=True)]

        self._traffic.show(_by_place(told["by"], times, step_s), f"now {words.rate(told['requests_per_s'])} / s")
        if time.monotonic() - self._drawn_s < CHARTS_S:
            return
        self._drawn_s = time.monotonic()
        self._latency.show(
            {"p50": line("p50_ms"), "p99": line("p99_ms")},
            f"p50 {words.millis(told['p50_ms'])}, p99 {words.millis(told['p99_ms'])}",
        )
        shares = [100 * point["errors"] / point["requests"] if point["requests"] else None for point in points]
        self._errors.show({"errors": list(zip(times, shares, strict=True))}, words.percent(told["error_ratio"], 2))
        self._tokens.show({"tokens": line("tokens", 1 / step_s)}, f"{words.rate(told['tokens_per_s'])} / s")
        self._cost.show({"cost": line("usd", 3600 / step_s)}, f"{words.usd(told['usd_per_hour'])} / hour")


def millis_of(at: str | float) -> float:
    """An instant on the wire as Unix milliseconds."""
    return words.instant(at).timestamp() * 1000


def _by_place(series: Sequence[JsonObject], times: Sequence[float], step_s: float) -> dict[str, Any]:
    """Requests per second of each place, those of the busiest; the others are added up."""
    sums: dict[str, list[float]] = {}
    for one in series:
        name = _place(one)
        known = sums.setdefault(name, [0.0] * len(times))
        sums[name] = [a + b for a, b in zip(known, one["points"], strict=True)]
    busiest = sorted(sums, key=lambda name: -sum(sums[name]))
    others = busiest[LINES - 1 :] if len(busiest) > LINES else []
    if others:
        sums["others"] = [sum(column) for column in zip(*(sums.pop(name) for name in others), strict=True)]
    return {name: [(t, round(v / step_s, 2)) for t, v in zip(times, sums[name], strict=True)] for name in sorted(sums)}


def _place(one: JsonObject) -> str:
    return words.place(one) if one["backend"] else "not served"


def _tile_words(told: JsonObject) -> dict[str, str]:
    return {
        "requests_per_s": words.rate(told["requests_per_s"]),
        "error_ratio": words.percent(told["error_ratio"], 2),
        "p50_ms": words.millis(told["p50_ms"]),
        "p99_ms": words.millis(told["p99_ms"]),
        "first_token_p50_ms": words.millis(told["first_token_p50_ms"]),
        "tokens_per_s": words.rate(told["tokens_per_s"]),
        "usd_per_hour": words.usd(told["usd_per_hour"]),
        "in_flight": words.number(told["in_flight"]),
        "waiting": words.number(told["waiting"]),
        "workers": words.number(told["workers"]["live"]),
    }


def _workers_note(workers: JsonObject) -> str:
    parts = [f"{workers[name]} {name}" for name in ("behind", "refused") if workers.get(name)]
    return ", ".join(parts) or "all run the newest rules"


def _row(one: JsonObject, window_s: float) -> JsonObject:
    requests, errors = one["requests"], one["errors"]
    return {
        "key": "|".join((one["task"], one["rule"], _place(one))),
        "name": _place(one),
        "task": one["task"],
        "rule": one["rule"] or words.NONE,
        "place": _place(one),
        "rate": words.rate(requests / window_s),
        "errors": [chip(words.percent(errors / requests if requests else None), "bad" if errors else "good")],
        "p50": words.millis(one["p50_ms"]),
        "p99": words.millis(one["p99_ms"]),
        "failed": words.number(one["failed_attempts"]),
    }


PAGE = Page(path="/", title="Overview", icon="dashboard", build=build)
