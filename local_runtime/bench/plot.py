"""The sweep as pictures: a PNG, and an HTML file that needs nothing else. Imports its libraries only when it draws."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from local_runtime.bench.report import title
from local_runtime.bench.results import Results
from local_runtime.bench.variants import Kind, Variant

_COLOURS = {Kind.NAIVE: "#d62728", Kind.STATIC: "#9aa0a6", Kind.ADAPTIVE: "#1f77b4"}
_LATENCY = "throughput against latency"
_SWEEP = "throughput by max_batch_size"


class PlotUnavailable(Exception):
    """A plotting library is missing; the text says which and how to get it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line of one of the two pictures."""

    name: str
    kind: Kind
    x: Sequence[float]
    y: Sequence[float]
    marks: Sequence[str]
    is_dashed: bool = False


def _latency_lines(results: Results) -> Iterator[_Line]:
    """For each setting: p99 (ms) over QPS, one point for each concurrency. Of adaptive only the largest size."""
    shown = [results.naive, *results.of(Kind.STATIC), results.of(Kind.ADAPTIVE)[-1]]
    for variant in shown:
        points = [results.measured[variant, concurrency] for concurrency in results.concurrencies]
        yield _Line(
            name=title(variant),
            kind=variant.kind,
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
            kind=variants[0].kind,
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
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import, and optional
        from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, and optional
    except ImportError as error:
        raise PlotUnavailable(f"no plot without matplotlib: pip install matplotlib ({error})") from error
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    latency, sweep = figure.subplots(1, 2)
    for axes, lines in ((latency, _latency_lines(results)), (sweep, _sweep_lines(results))):
        for line in lines:
            is_static = line.kind is Kind.STATIC
            axes.plot(
                *(line.x, line.y, "--" if line.is_dashed else "-o"),
                color=None if is_static else _COLOURS[line.kind],
                label=line.name,
                linewidth=1 if is_static else 2.5,
                markersize=3 if is_static else 5,
                alpha=0.6 if is_static else 1,
                zorder=1 if is_static else 2,
            )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    latency.set(title=_LATENCY, xlabel="QPS", ylabel="p99 (ms)", yscale="log")
    sweep.set(title=_sweep_title(results), xlabel="max_batch_size", ylabel="QPS")
    sweep.set_xscale("log", base=2)
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
                mode="lines" if line.is_dashed else "lines+markers",
                line={
                    "color": None if line.kind is Kind.STATIC else _COLOURS[line.kind],
                    "dash": "dash" if line.is_dashed else None,
                    "width": 1 if line.kind is Kind.STATIC else 3,
                },
            )
            figure.add_trace(scatter, row=1, col=column)
    figure.update_xaxes(title_text="QPS", row=1, col=1)
    figure.update_yaxes(title_text="p99 (ms)", type="log", row=1, col=1)
    figure.update_xaxes(title_text="max_batch_size", type="log", dtick="0.30103", row=1, col=2)
    figure.update_yaxes(title_text="QPS", row=1, col=2)
    figure.update_layout(title=results.model, template="plotly_white")
    figure.write_html(path, include_plotlyjs=True)


def _sweep_title(results: Results) -> str:
    return f"{_SWEEP}, {results.concurrencies[-1]} in flight"
