"""What a sweep has found, for a reader: table, advice as a `config.pbtxt`, pictures, files."""

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from gateway.core.memory_plan import GIB
from gateway.tuning import rendering
from gateway.tuning.curves import LatencyCurve
from gateway.tuning.sweep.pictures import pictures
from gateway.tuning.sweep.record import Run
from gateway.tuning.sweep.search import Goal, best, front, rank
from gateway.tuning.sweep.settings import SweepError, configured
from local_runtime.bench import plot
from local_runtime.bench.variants import config_text, left_out

FORM: Final = "sweep/1"
COLUMNS: Final = ("setting", "load", "answers/s", "good/s", "p50 ms", "p99 ms", "mean batch", "busy", "run")
SHOWN: Final = 20  # rows of the table on a terminal; files have all


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The runs of a sweep of a model, `cells` of them possible; `place` is where, in words."""

    model: str
    place: str
    goal: Goal
    cells: int
    runs: Sequence[Run]
    message: Any  # the ModelConfig to write the advice into

    @property
    def chosen(self) -> Run:
        """The run of the best setting (`search.best`). There is a run."""
        found = best([run.seen() for run in self.runs], self.goal)
        return next(run for run in self.runs if run.seen() == found)

    @property
    def found(self) -> Run:
        """A run of the setting that was there before: at the chosen one's load, where there is one; longest last."""
        setting, load = self.runs[0].cell.setting, self.chosen.cell.load
        return max(
            (run for run in self.runs if run.cell.setting == setting),
            key=lambda run: (run.cell.load == load, run.is_long),
        )

    @property
    def settled(self) -> list[Run]:
        """Of each cell that answered the run that counts: the long one, where there is one."""
        answered = [run for run in self.runs if run.report is not None]
        return list({run.cell: run for run in sorted(answered, key=lambda run: run.is_long)}.values())

    @property
    def front(self) -> list[Run]:
        """The settled runs that no other beats in both throughput and p99, by throughput."""
        by_seen = {run.seen(): run for run in self.settled}
        return [by_seen[one] for one in front(list(by_seen))]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "form": FORM,
            "model": self.model,
            "place": self.place,
            "goal": {"p99_ms": self.goal.p99_ms, "memory_bytes": self.goal.memory_bytes},
            "cells": self.cells,
            "chosen": self.runs.index(self.chosen),
            "keeps_bounds": self.chosen.seen().keeps(self.goal),
            "found": self.runs.index(self.found),
            "front": [self.runs.index(run) for run in self.front],
            "runs": [run.as_json() for run in self.runs],
            "config_pbtxt": pbtxt(self),
        }


def need_libraries() -> None:
    """Raises SweepError where a library for the pictures is missing: before anything is measured."""
    try:
        plot.need_libraries()
    except plot.PlotUnavailable as error:
        raise SweepError(f"{error} (both come with the extra 'tuning')") from error


def ordered(outcome: Outcome) -> list[Run]:
    """The best first; what failed last."""
    return sorted(outcome.runs, key=lambda run: (run.is_long, *rank(run.seen(), outcome.goal)), reverse=True)


def table(outcome: Outcome) -> Table:
    """The best runs and what was found, the chosen one in bold."""
    runs = ordered(outcome)
    shown = runs[:SHOWN]
    shown += [outcome.found] if outcome.found not in shown else []
    title = f"{outcome.model} on {outcome.place}"
    made = rendering.empty_table(*COLUMNS, names=("setting", "load", "run"), title=title)
    for run in shown:
        made.add_row(*cells(run), style="bold" if run is outcome.chosen else None)
    if len(runs) > len(shown):
        made.caption = f"{len(shown)} of {len(runs)} runs; sweep.json has all"
    return made


def cells(run: Run) -> tuple[str, ...]:
    """A run's row of the table."""
    names = str(run.cell.setting), str(run.cell.load)
    kind = f"{'long' if run.is_long else 'short'}, {run.why}"
    if run.whole is None or run.server is None:
        return (*names, *("-",) * 6, f"failed: {run.error}")
    latency = run.whole.latency
    return (
        *names,
        f"{run.whole.qps:,.1f}",
        f"{run.whole.goodput:,.1f}",
        "-" if latency is None else f"{latency.p50:,.1f}",
        "-" if latency is None else f"{latency.p99:,.1f}",
        f"{run.server.mean_batch:.1f}",
        "-" if run.server.busy is None else f"{100 * run.server.busy:.0f} %",
        kind,
    )


def words(run: Run, goal: Goal) -> str:
    """A run's figures in one line."""
    if run.whole is None:
        return f"failed: {run.error}"
    p99 = "no p99" if run.whole.latency is None else f"p99 {run.whole.latency.p99:,.1f} ms"
    memory = f", {run.memory_bytes / GIB:.2f} GiB" if goal.memory_bytes else ""
    within = f"within {goal.p99_ms:g} ms " if goal.p99_ms else ""
    return f"{run.whole.goodput:,.1f} answers/s {within}at {run.cell.load}, {p99}{memory}"


def reasons(outcome: Outcome) -> Iterator[str]:
    """Why this setting, in lines with their numbers."""
    chosen, found = outcome.chosen, outcome.found
    yield f"{chosen.cell.setting}: {words(chosen, outcome.goal)}"
    if chosen.cell.setting == found.cell.setting:
        yield "that is the setting that was found: nothing measured was better"
    else:
        yield f"as found, {found.cell.setting}: {words(found, outcome.goal)}"
        if chosen.cell.load == found.cell.load and (before := found.seen().goodput):
            yield f"{100 * (chosen.seen().goodput / before - 1):+.0f} % answers per second"
    if not chosen.seen().keeps(outcome.goal):
        yield "NO setting kept the bounds; this one comes nearest"
    kinds = f"{sum(run.is_long for run in outcome.runs)} long, {sum(not run.is_long for run in outcome.runs)} short"
    yield f"{len(outcome.runs)} runs ({kinds}) of {outcome.cells} possible on {outcome.place}"
    if left := left_out(outcome.message):
        yield f"measured without the model's {', '.join(left)}"


def pbtxt(outcome: Outcome) -> str:
    """The chosen setting, ready to be the model's config.pbtxt, and why as a comment."""
    why = "\n".join(f"#   {line}" for line in reasons(outcome))
    text = config_text(configured(outcome.message, outcome.chosen.cell.setting))
    return f"# Chosen by `gateway sweep`:\n{why}\n{text}"


def write(outcome: Outcome, folder: Path, *, curve: LatencyCurve | None) -> None:
    """sweep.json, config.pbtxt, plot.png and report.html, and curve.json where one was measured. Raises SweepError."""
    try:
        _write(outcome, folder, curve=curve)
    except OSError as error:
        raise SweepError(f"--output {folder}: {error}") from error


def _write(outcome: Outcome, folder: Path, *, curve: LatencyCurve | None) -> None:
    (folder / "curve.json").unlink(missing_ok=True)  # a sweep before this one may have had one
    (folder / "sweep.json").write_text(json.dumps(outcome.as_json(), indent=2) + "\n", encoding="utf-8")
    (folder / "config.pbtxt").write_text(pbtxt(outcome), encoding="utf-8")
    if curve is not None:
        (folder / "curve.json").write_text(json.dumps(curve.as_json()) + "\n", encoding="utf-8")
    drawn = pictures(
        outcome.settled, chosen=outcome.chosen, found=outcome.found, front=outcome.front, goal=outcome.goal
    )
    heading = f"{outcome.model}: swept on {outcome.place}"
    plot.write_png(drawn, folder / "plot.png", heading=heading)
    body = _html(outcome, plot.html_figure(drawn))
    (folder / "report.html").write_text(rendering.page(heading, body), encoding="utf-8")


def _html(outcome: Outcome, figure: str) -> str:
    """What stands on the page around the pictures."""
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in reasons(outcome))
    runs, chosen = ordered(outcome), outcome.chosen
    place = next(index for index, run in enumerate(runs) if run is chosen)
    return (
        f"<ul>{lines}</ul>{figure}"
        f"<h2>All runs</h2>{rendering.html_table(COLUMNS, [cells(run) for run in runs], chosen=place)}"
        f"<h2>config.pbtxt</h2><pre>{html.escape(pbtxt(outcome))}</pre>"
    )
