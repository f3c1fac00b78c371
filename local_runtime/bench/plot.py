"""What was measured as pictures: a PNG, and an HTML file that needs nothing else.

`pictures` are those of the bench; whoever has others draws them by the same functions. Imports its libraries only when
it draws.
"""

import dataclasses
import html
import importlib.util
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from local_runtime.bench.report import title
from local_runtime.bench.results import Results
from local_runtime.bench.variants import Kind, Variant

_COLOURS = {Kind.NAIVE: "#d62728", Kind.ADAPTIVE: "#1f77b4"}
# Of the static settings: one for each delay. Their sizes differ in how strong it is.
_DELAY_COLOURS = ("#7f7f7f", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2")
_FAINTEST = 0.3
_MOST_STEPPED = 10  # times the least value: beyond, even steps would crowd at an axis's end


class PlotUnavailable(Exception):
    """A plotting library is missing; the text says which and how to get it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a picture, or points of one kind: `marks` says what each point is, where it can be pointed at.

    `labels` are written beside the points. `style`: a line with its points, dashes alone, points alone, or one star.
    """

    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    marks: Sequence[str]
    labels: Sequence[str] = ()
    style: Literal["line", "dashes", "points", "star"] = "line"
    strength: float = 1.0
    is_thin: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Axes with their units, and lines. With `x_ticks` the x axis is logarithmic and shows these."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_ticks: Sequence[int] = ()
    is_y_log: bool = False


def _colour(results: Results, variant: Variant) -> str:
    """The same in both pictures."""
    if variant.kind is not Kind.STATIC:
        return _COLOURS[variant.kind]
    delays_us = sorted({one.delay_us for one in results.of(Kind.STATIC)})
    return _DELAY_COLOURS[delays_us.index(variant.delay_us) % len(_DELAY_COLOURS)]


def _strength(results: Results, variant: Variant) -> float:
    """The opacity of a static setting's line, by its size."""
    sizes = _sizes(results)
    if variant.kind is not Kind.STATIC or len(sizes) == 1:
        return 1.0
    return _FAINTEST + (1 - _FAINTEST) * sizes.index(variant.max_batch_size) / (len(sizes) - 1)


def _sizes(results: Results) -> list[int]:
    return sorted({variant.max_batch_size for variant in results.variants})


def _latency_lines(results: Results) -> Iterator[Line]:
    """For each setting: p99 (ms) over QPS, one point for each concurrency. Of adaptive only the largest size."""
    shown = [results.naive, *results.of(Kind.STATIC), results.of(Kind.ADAPTIVE)[-1]]
    for variant in shown:
        points = [results.measured[variant, concurrency] for concurrency in results.concurrencies]
        yield Line(
            name=title(variant),
            is_thin=variant.kind is Kind.STATIC,
            colour=_colour(results, variant),
            strength=_strength(results, variant),
            x=[point.qps for point in points],
            y=[point.p99_ms for point in points],
            marks=[f"{concurrency} in flight" for concurrency in results.concurrencies],
        )


def _sweep_lines(results: Results) -> Iterator[Line]:
    """At the highest concurrency: QPS over max_batch_size."""
    concurrency = results.concurrencies[-1]

    def line(name: str, variants: Sequence[Variant], *, x: Sequence[float] | None = None) -> Line:
        return Line(
            name=name,
            is_thin=variants[-1].kind is Kind.STATIC,
            colour=_colour(results, variants[-1]),
            x=x or [variant.max_batch_size for variant in variants],
            y=[results.measured[variant, concurrency].qps for variant in variants],
            marks=[title(variant) for variant in variants],
            style="dashes" if x is not None else "line",
        )

    adaptive = results.of(Kind.ADAPTIVE)
    ends = [adaptive[0].max_batch_size, adaptive[-1].max_batch_size]
    yield line("naive", [results.naive] * 2, x=ends)
    static = results.of(Kind.STATIC)
    for delay_us in sorted({variant.delay_us for variant in static}):
        of_delay = [variant for variant in static if delay_us == variant.delay_us or variant.max_batch_size == 1]
        yield line(f"delay {delay_us} us", of_delay)
    yield line("adaptive", adaptive)


def pictures(results: Results) -> tuple[Picture, Picture]:
    """Throughput against latency, and throughput by size at the highest concurrency."""
    return (
        Picture(
            title="throughput against latency",
            x_label="QPS",
            y_label="p99 (ms)",
            lines=list(_latency_lines(results)),
            is_y_log=True,
        ),
        Picture(
            title=f"throughput by max_batch_size, {results.concurrencies[-1]} in flight",
            x_label="max_batch_size",
            y_label="QPS",
            lines=list(_sweep_lines(results)),
            x_ticks=_sizes(results),
        ),
    )


def need_libraries() -> None:
    """Raises PlotUnavailable where one of the two is missing: before anything is measured."""
    for name in ("matplotlib", "plotly"):
        if importlib.util.find_spec(name) is None:
            raise PlotUnavailable(f"no plot without {name}: pip install {name}")


def write_png(pictures: Sequence[Picture], path: Path, *, heading: str) -> None:
    """The pictures side by side. Raises PlotUnavailable without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import, and optional
        from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, and optional
    except ImportError as error:
        raise PlotUnavailable(f"no plot without matplotlib: pip install matplotlib ({error})") from error
    figure = Figure(figsize=(6.5 * len(pictures), 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, picture in zip(figure.subplots(1, len(pictures), squeeze=False)[0], pictures, strict=True):
        for line in picture.lines:
            _draw(axes, line)
        _label(axes, picture)
    figure.suptitle(heading)
    figure.savefig(path, dpi=120)


def _draw(axes: Any, line: Line) -> None:
    axes.plot(
        *(line.x, line.y, {"line": "-o", "dashes": "--", "points": "o", "star": "*"}[line.style]),
        color=line.colour,
        label=line.name,
        linewidth=1 if line.is_thin else 2.5,
        markersize=16 if line.style == "star" else 3 if line.is_thin else 5,
        alpha=line.strength,
        zorder={"star": 4, "points": 1}.get(line.style, 1 if line.is_thin else 2),
    )
    for x, y, text in zip(line.x, line.y, line.labels, strict=False):
        axes.annotate(text, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=7)


def _label(axes: Any, picture: Picture) -> None:
    from matplotlib import ticker  # noqa: PLC0415 - slow to import, and optional

    axes.grid(alpha=0.3)
    axes.margins(x=0.16)  # room for what is written beside the points
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)  # never over the points
    axes.set(title=picture.title, xlabel=picture.x_label, ylabel=picture.y_label)
    if picture.is_y_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.FixedLocator(_log_ticks(picture)))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    if picture.x_ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(picture.x_ticks, labels=[str(size) for size in picture.x_ticks])
        axes.xaxis.set_minor_locator(ticker.NullLocator())


# Follows the reader's choice of dark or light, also where it changes.
_FOLLOWING = """<script>
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => {
    const ink = dark.matches ? "#e6e6e6" : "#222", grid = dark.matches ? "#3a3f47" : "#e3e3e3";
    const change = {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font.color": ink};
    const plot = document.querySelector(".js-plotly-plot");
    for (const name of Object.keys(plot.layout).filter((key) => /^[xy]axis/.test(key))) {
      change[name + ".gridcolor"] = change[name + ".zerolinecolor"] = change[name + ".linecolor"] = grid;
    }
    Plotly.relayout(plot, change);
  };
  dark.addEventListener("change", follow);
  follow();
})();
</script>"""
_STYLE = """<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
</style>"""


def write_html(pictures: Sequence[Picture], path: Path, *, heading: str) -> None:
    """The pictures, to be looked at closely, in one file that needs no network, in the reader's light or dark.

    Raises PlotUnavailable without plotly.
    """
    name = html.escape(heading)
    path.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>{_STYLE}</head>'
        f"<body><h1>{name}</h1>{html_figure(pictures)}</body></html>\n",
        encoding="utf-8",
    )


def html_figure(pictures: Sequence[Picture]) -> str:
    """The pictures side by side for somebody's page: all that they need, and in the page's ink where that is dark.

    Raises PlotUnavailable without plotly.
    """
    try:
        from plotly import graph_objects, subplots  # type: ignore[import-untyped] # noqa: PLC0415 - slow, optional
    except ImportError as error:
        raise PlotUnavailable(f"no HTML without plotly: pip install plotly ({error})") from error
    figure: Any = subplots.make_subplots(rows=1, cols=len(pictures), subplot_titles=[one.title for one in pictures])
    for column, picture in enumerate(pictures, start=1):
        for line in picture.lines:
            figure.add_trace(_trace(graph_objects, line), row=1, col=column)
        x = {"type": "log", "tickvals": list(picture.x_ticks)} if picture.x_ticks else {}
        figure.update_xaxes(title_text=picture.x_label, row=1, col=column, **x)
        y = {"type": "log", "tickvals": _log_ticks(picture), "tickformat": "~r"} if picture.is_y_log else {}
        figure.update_yaxes(title_text=picture.y_label, row=1, col=column, **y)
    figure.update_layout(template="plotly_white", height=560, legend={"orientation": "h", "y": -0.18})
    return f"{figure.to_html(include_plotlyjs=True, full_html=False)}{_FOLLOWING}"


def _log_ticks(picture: Picture) -> list[float]:
    """Where a logarithmic y axis has numbers: 1, 2 and 5 of each power of ten, or round steps within less than one."""
    values = [y for line in picture.lines for y in line.y if y > 0] or [1.0]
    low, high = min(values), max(values)
    if high > _MOST_STEPPED * low:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    most = (high - low) / 4 or low
    power = 10.0 ** math.floor(math.log10(most))
    step = max(factor * power for factor in (1, 2, 5) if factor * power <= most)
    return [index * step for index in range(max(1, math.floor(low / step)), math.ceil(high / step) + 1)]


def _trace(graph_objects: Any, line: Line) -> Any:
    modes = {"line": "lines+markers", "dashes": "lines", "points": "markers", "star": "markers"}
    return graph_objects.Scatter(
        x=list(line.x),
        y=list(line.y),
        text=list(line.labels) or list(line.marks),
        hovertext=list(line.marks),
        textposition="top right",
        cliponaxis=False,
        name=line.name,
        opacity=line.strength,
        mode=modes[line.style] + ("+text" if line.labels else ""),
        marker={"symbol": "star", "size": 16} if line.style == "star" else {},
        line={
            "color": line.colour,
            "dash": "dash" if line.style == "dashes" else None,
            "width": 1.5 if line.is_thin else 3,
        },
    )
