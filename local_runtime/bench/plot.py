"""The sweep as pictures: a PNG, and an HTML file that needs nothing else. Imports its libraries only when it draws."""

import dataclasses
import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from local_runtime.bench.report import title
from local_runtime.bench.results import Results
from local_runtime.bench.variants import Kind, Variant

_COLOURS = {Kind.NAIVE: "#d62728", Kind.ADAPTIVE: "#1f77b4"}
# Of the static settings: one for each delay. Their sizes differ in how strong it is.
_DELAY_COLOURS = ("#7f7f7f", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2")
_FAINTEST = 0.3
_LATENCY = "throughput against latency"
_SWEEP = "throughput by max_batch_size"


class PlotUnavailable(Exception):
    """A plotting library is missing; the text says which and how to get it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line of one of the two pictures."""

    name: str
    variant: Variant
    colour: str
    strength: float = 1.0
    x: Sequence[float]
    y: Sequence[float]
    marks: Sequence[str]
    is_dashed: bool = False

    @property
    def is_static(self) -> bool:
        """Drawn thinner: there are many of them."""
        return self.variant.kind is Kind.STATIC


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


def _latency_lines(results: Results) -> Iterator[_Line]:
    """For each setting: p99 (ms) over QPS, one point for each concurrency. Of adaptive only the largest size."""
    shown = [results.naive, *results.of(Kind.STATIC), results.of(Kind.ADAPTIVE)[-1]]
    for variant in shown:
        points = [results.measured[variant, concurrency] for concurrency in results.concurrencies]
        yield _Line(
            name=title(variant),
            variant=variant,
            colour=_colour(results, variant),
            strength=_strength(results, variant),
            x=[point.qps for point in points],
            y=[point.p99_ms for point in points],
            marks=[f"{concurrency} in flight" for concurrency in results.concurrencies],
        )


def _sweep_lines(results: Results) -> Iterator[_Line]:
    """At the highest concurrency: QPS over max_batch_size."""
    concurrency = results.concurrencies[-1]

    def line(name: str, variants: Sequence[Variant], *, x: Sequence[float] | None = None) -> _Line:
        return _Line(
            name=name,
            variant=variants[-1],
            colour=_colour(results, variants[-1]),
            x=x or [variant.max_batch_size for variant in variants],
            y=[results.measured[variant, concurrency].qps for variant in variants],
            marks=[title(variant) for variant in variants],
            is_dashed=x is not None,
        )

    adaptive = results.of(Kind.ADAPTIVE)
    ends = [adaptive[0].max_batch_size, adaptive[-1].max_batch_size]
    yield line("naive", [results.naive] * 2, x=ends)
    static = results.of(Kind.STATIC)
    for delay_us in sorted({variant.delay_us for variant in static}):
        of_delay = [variant for variant in static if delay_us == variant.delay_us or variant.max_batch_size == 1]
        yield line(f"delay {delay_us} us", of_delay)
    yield line("adaptive", adaptive)


def write_png(results: Results, path: Path) -> None:
    """Both pictures side by side. Raises PlotUnavailable without matplotlib."""
    try:
        from matplotlib import ticker  # noqa: PLC0415 - slow to import, and optional
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import, and optional
        from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, and optional
    except ImportError as error:
        raise PlotUnavailable(f"no plot without matplotlib: pip install matplotlib ({error})") from error
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    latency, sweep = figure.subplots(1, 2)
    for axes, lines in ((latency, _latency_lines(results)), (sweep, _sweep_lines(results))):
        for line in lines:
            axes.plot(
                *(line.x, line.y, "--" if line.is_dashed else "-o"),
                color=line.colour,
                label=line.name,
                linewidth=1 if line.is_static else 2.5,
                markersize=3 if line.is_static else 5,
                alpha=line.strength,
                zorder=1 if line.is_static else 2,
            )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    latency.set(title=_LATENCY, xlabel="QPS", ylabel="p99 (ms)", yscale="log")
    sweep.set(title=_sweep_title(results), xlabel="max_batch_size", ylabel="QPS")
    latency.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    latency.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    sweep.set_xscale("log", base=2)
    sweep.set_xticks(_sizes(results), labels=[str(size) for size in _sizes(results)])
    for axis in (latency.yaxis, sweep.xaxis):
        axis.set_minor_locator(ticker.NullLocator())
    figure.suptitle(results.model)
    figure.savefig(path, dpi=120)


def write_html(results: Results, path: Path) -> None:
    """Both pictures, to be looked at closely; opens without a network. Raises PlotUnavailable without plotly."""
    try:
        from plotly import graph_objects, subplots  # type: ignore[import-untyped] # noqa: PLC0415 - slow, optional
    except ImportError as error:
        raise PlotUnavailable(f"no HTML without plotly: pip install plotly ({error})") from error
    figure: Any = subplots.make_subplots(rows=1, cols=2, subplot_titles=(_LATENCY, _sweep_title(results)))
    for column, lines in ((1, _latency_lines(results)), (2, _sweep_lines(results))):
        for line in lines:
            scatter = graph_objects.Scatter(
                x=list(line.x),
                y=list(line.y),
                text=list(line.marks),
                name=line.name,
                opacity=line.strength,
                mode="lines" if line.is_dashed else "lines+markers",
                line={
                    "color": line.colour,
                    "dash": "dash" if line.is_dashed else None,
                    "width": 1.5 if line.is_static else 3,
                },
            )
            figure.add_trace(scatter, row=1, col=column)
    figure.update_xaxes(title_text="QPS", row=1, col=1)
    figure.update_yaxes(title_text="p99 (ms)", type="log", dtick="D2", row=1, col=1)
    figure.update_xaxes(title_text="max_batch_size", type="log", tickvals=_sizes(results), row=1, col=2)
    figure.update_yaxes(title_text="QPS", row=1, col=2)
    figure.update_layout(title=results.model, template="plotly_white")
    page = figure.to_html(include_plotlyjs=True)
    name = f"<title>{html.escape(results.model)}: batching measured</title>"
    path.write_text(page.replace("<head>", f"<head>{name}", 1), encoding="utf-8")


def _sweep_title(results: Results) -> str:
    return f"{_SWEEP}, {results.concurrencies[-1]} in flight"
