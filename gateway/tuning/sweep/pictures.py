"""The pictures of a sweep: throughput against latency with what was chosen, and throughput along the widest axis."""

import math
from collections.abc import Sequence
from typing import Final

from gateway.tuning.sweep.record import Run
from gateway.tuning.sweep.search import Goal
from gateway.tuning.sweep.settings import Load, Setting
from local_runtime.bench.plot import Line, Picture

_COLOURS: Final = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22")
_GREY, _RED, _STAR, _BLACK = "#8a8f98", "#d62728", "#e6a700", "#4c8bf5"
_LABELLED: Final = 8  # points of the front; with more of them labels would cover each other
_MOST_LINES: Final = 8


def pictures(runs: Sequence[Run], *, chosen: Run, found: Run, front: Sequence[Run], goal: Goal) -> tuple[Picture, ...]:
    """One, or two where something has several values at the chosen load. Failed runs have no place in them."""
    answered = [run for run in runs if math.isfinite(run.seen().p99_ms)]
    first = _against_latency(answered, chosen=chosen, found=found, front=front, goal=goal)
    second = _along_axis(answered, chosen.cell.load)
    return (first,) if second is None else (first, second)


def _against_latency(runs: Sequence[Run], *, chosen: Run, found: Run, front: Sequence[Run], goal: Goal) -> Picture:
    near = [run for run in front if math.isfinite(run.seen().p99_ms)]
    lines = [
        _points("measured", runs, _GREY),
        _points("nothing beats these", near, _BLACK, style="line", is_labelled=True),
    ]
    if goal.p99_ms and runs:
        qps = [run.seen().qps for run in runs]
        ends = [min(qps), max(qps)]
        words = f"p99 bound, {goal.p99_ms:g} ms"
        lines.append(
            Line(name=words, colour=_RED, x=ends, y=[goal.p99_ms] * 2, marks=[words] * 2, style="dashes", is_thin=True)
        )
    if found is not chosen:
        lines.append(_points("as found", [found], _RED))
    lines.append(_points(f"chosen: {chosen.cell.setting}, {chosen.cell.load}", [chosen], _STAR, style="star"))
    return Picture(
        title="throughput against latency", x_label="answers per second", y_label="p99 (ms)", lines=lines, is_y_log=True
    )


def _points(name: str, runs: Sequence[Run], colour: str, *, style: str = "points", is_labelled: bool = False) -> Line:
    labels = [_short(run) for run in runs] if is_labelled and len(runs) <= _LABELLED else []
    return Line(
        name=name,
        colour=colour,
        x=[run.seen().qps for run in runs],
        y=[run.seen().p99_ms for run in runs],
        marks=[f"{run.cell.setting}, {run.cell.load}" for run in runs],
        labels=labels,
        style="star" if style == "star" else "line" if style == "line" else "points",
        is_thin=style == "line",
    )


def _short(run: Run) -> str:
    setting = run.cell.setting
    return f"{setting.max_batch_size} x{setting.count}, {setting.delay_us / 1000:g} ms"


def _along_axis(runs: Sequence[Run], load: Load) -> Picture | None:
    """Throughput along the one of size, delay and instances that has most values; a line for each of the rest."""
    there = [run for run in runs if run.cell.load == load and run.cell.setting.batching != "adaptive"]
    by_axis = {
        name: {getattr(run.cell.setting, name) for run in there} for name in ("max_batch_size", "delay_us", "count")
    }
    axis = max(by_axis, key=lambda name: len(by_axis[name]))
    if len(by_axis[axis]) < 2:  # noqa: PLR2004 - one value makes no line
        return None
    groups: dict[str, dict[int, Run]] = {}
    for run in sorted(there, key=lambda run: run.is_long):  # the longer run of a setting counts
        groups.setdefault(_rest(run.cell.setting, axis), {})[getattr(run.cell.setting, axis)] = run
    largest = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))[:_MOST_LINES]
    lines = [
        Line(
            name=name,
            colour=_COLOURS[place % len(_COLOURS)],
            x=[_shown(axis, value) for value in sorted(group)],
            y=[group[value].seen().qps for value in sorted(group)],
            marks=[str(group[value].cell.setting) for value in sorted(group)],
        )
        for place, (name, group) in enumerate(sorted(largest))
    ]
    words = {"max_batch_size": "max_batch_size (rows)", "delay_us": "max_queue_delay (ms)", "count": "instances"}
    ticks = tuple(sorted(by_axis[axis])) if axis != "delay_us" and min(by_axis[axis]) > 0 else ()
    return Picture(
        title=f"throughput by {axis.replace('delay_us', 'max_queue_delay')}, {load}",
        x_label=words[axis],
        y_label="answers per second",
        lines=lines,
        x_ticks=ticks,
    )


def _shown(axis: str, value: int) -> float:
    return value / 1000 if axis == "delay_us" else value


def _rest(setting: Setting, axis: str) -> str:
    """All of the setting but what the axis shows."""
    parts = {
        "max_batch_size": f"max {setting.max_batch_size}",
        "delay_us": "no dynamic batching" if setting.batching == "none" else f"delay {setting.delay_us / 1000:g} ms",
        "count": f"{setting.count} instance{'' if setting.count == 1 else 's'}",
    }
    preferred = f", preferred {'+'.join(map(str, setting.preferred))}" if setting.preferred else ""
    return ", ".join(words for name, words in parts.items() if name != axis) + preferred
