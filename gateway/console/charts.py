"""Lines over time, drawn by the bundled ECharts as SVG, so that the style sheet colours their words in both modes."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from nicegui import ui

PALETTE: Final = ("#2f7ed8", "#d9730d", "#0f9d76", "#b455c4", "#b58900", "#d6336c", "#5f7f95", "#7a5cff")
"""Told apart on white and on black, also by those who see red and green alike."""
Points = Sequence[tuple[float, float | None]]
"""Unix milliseconds, and what there was then; None: nothing."""


class LineChart:
    """Named lines over the same time; the words below the title say the newest figures to those who do not see it."""

    def __init__(self, title: str, *, unit: str = "", is_stacked: bool = False) -> None:
        self._title = title
        self._unit = unit
        self._is_stacked = is_stacked
        with ui.element("section").classes("chart").props(f'aria-label="{title}"'):
            ui.label(title).props("role=heading aria-level=2").classes("chart-title")
            self._words = ui.label("").classes("chart-words")
            self._chart = ui.echart(self._options(), renderer="svg").classes("chart-plot").props("aria-hidden=true")

    def show(self, lines: Mapping[str, Points], words: str = "") -> None:
        """Draw `lines` in place of those before."""
        self._words.text = words
        series = [self._line(name, points, place) for place, (name, points) in enumerate(lines.items())]
        options: dict[str, Any] = self._chart.options
        if series != options["series"]:
            options["series"] = series
            options["legend"] |= {"data": list(lines), "show": self._is_stacked or len(lines) > 1}
            options["grid"]["bottom"] = 40 if options["legend"]["show"] else 8
            self._chart.update()

    def _line(self, name: str, points: Points, place: int) -> dict[str, Any]:
        colour = PALETTE[place % len(PALETTE)]
        line: dict[str, Any] = {
            "name": name,
            "type": "line",
            "showSymbol": True,
            "showAllSymbol": True,
            "symbol": "none",
            "lineStyle": {"width": 2, "color": colour},
            "itemStyle": {"color": colour},
            "data": drawn(points),
        }
        if self._is_stacked:
            line |= {
                "stack": "all",
                "areaStyle": {"opacity": 0.35, "color": colour},
                "lineStyle": {"width": 1, "color": colour},
            }
        return line

    def _options(self) -> dict[str, Any]:
        return {
            "animation": False,
            "useUTC": True,  # as all times of the console
            "grid": {"left": 8, "right": 12, "top": 12, "bottom": 52, "containLabel": True},
            "legend": {"type": "scroll", "bottom": 0, "data": [], "icon": "roundRect", "itemHeight": 4},
            "tooltip": {"trigger": "axis", "confine": True},
            "xAxis": {"type": "time", "splitLine": {"show": False}, "axisLabel": {"hideOverlap": True}},
            "yAxis": {
                "type": "value",
                "min": 0,
                "splitLine": {"lineStyle": {"color": "rgba(128, 140, 155, 0.28)"}},
                "axisLabel": {":formatter": f"value => value + '{self._unit}'"},
            },
            "series": [],
        }


def drawn(points: Points) -> list[Any]:
    """The points of a line; one with nothing beside it would not be seen, and is drawn as a dot."""
    values = [None, *(value for _, value in points), None]
    return [
        {"value": [at, value], "symbol": "circle", "symbolSize": 5}
        if value is not None and values[i] is None and values[i + 2] is None
        else [at, value]
        for i, (at, value) in enumerate(points)
    ]
