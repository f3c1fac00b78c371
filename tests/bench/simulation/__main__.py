"""The simulator against reality on this machine: `python -m tests.bench.simulation`.

Two servers, three models, three settings, three loads. Each setting is calibrated, then measured under open traffic,
and the same arrivals are simulated: with the calibrated times as they are, and with these at the pace that the server
says it had in the run. One report has every cell: `report.html` and `report.json`.
"""

import asyncio
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from gateway.tuning.curves import LatencyCurve
from gateway.tuning.report import Report
from tests.bench.simulation import calibration, cells, page
from tests.bench.simulation.book import Book
from tests.bench.simulation.cells import LOADS, Cell
from tests.bench.simulation.engines import ENGINES, Counted, Engine
from tests.bench.simulation.subjects import SETTINGS, SUBJECTS, Subject
from tests.bench.simulation.summary import verdicts

console = Console(width=180, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """A run lasts `seconds`, or less where it has `requests` by then; each size is calibrated for `sizing_s`."""

    seconds: float
    requests: int
    sizing_s: float

    def of(self, rate: float) -> float:
        """Of a run."""
        return min(self.seconds, self.requests / rate)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The measured half of a cell."""

    load: float
    rate: float
    seconds: float
    trace: tuple[float, ...]
    report: Report
    counted: Counted


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a model on a server, in one round."""

    of: str
    subject: Subject
    name: str
    number: int

    async def measured(self, engine: Engine, load: float, *, capacity: float, lengths: Lengths) -> Run:
        """Under one load."""
        rate = load * capacity
        seconds = lengths.of(rate)
        trace = cells.instants(rate, seed=1000 * self.number + round(100 * load), seconds=seconds)
        report, counted = await cells.measured(engine, self.subject, self.name, trace=trace, seconds=seconds)
        return Run(load=load, rate=rate, seconds=seconds, trace=trace, report=report, counted=counted)

    async def found(self, engine: Engine, config: Path, lengths: Lengths) -> tuple[LatencyCurve, list[Cell]]:
        """All of its loads. The times are taken right before and right after each: machines change their pace."""
        subject, name, seconds = self.subject, self.name, lengths.sizing_s
        before = await calibration.measured(engine, subject, name, seconds=seconds)
        lone = await calibration.lone(engine, subject, name, before, seconds=4 * seconds)
        every, made = before, []
        for load in LOADS:
            capacity = cells.capacity(calibration.curve_of(subject, name, before.times, lone), name)
            run = await self.measured(engine, load, capacity=capacity, lengths=lengths)
            after = await calibration.measured(engine, subject, name, seconds=seconds)
            around = calibration.together(before, after)
            curve = calibration.curve_of(subject, name, around.times, lone)
            pace = calibration.pace(run.counted, around)
            made.append(
                Cell(
                    engine=self.of,
                    model=subject.name,
                    setting=name,
                    load=load,
                    round=self.number,
                    rate=run.rate,
                    seconds=run.seconds,
                    requests=run.report.whole.sent,
                    drift=calibration.drift(before, after),
                    pace=pace,
                    wrong=cells.wrong(run.report),
                    measured=cells.figures(run.report, run.counted.mean_batch),
                    predicted=await self.predicted(calibration.paced(curve, pace), config, run),
                    calibrated=await self.predicted(curve, config, run),
                    notes=run.report.notes,
                )
            )
            every, before = calibration.together(every, after), after
        return calibration.curve_of(subject, name, every.times, lone), made

    async def predicted(self, curve: LatencyCurve, config: Path, run: Run) -> cells.Figures:
        """The same arrivals, simulated: in a thread, for a simulation has a loop of its own."""
        return await asyncio.to_thread(cells.predicted, self.of, curve, config, trace=run.trace, seconds=run.seconds)


async def model_measured(book: Book, of: str, subject: Subject, settings: Sequence[str], lengths: Lengths) -> None:
    """Settings of a model on one server."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / of
        folder.mkdir()
        async with ENGINES[of](subject, folder) as engine:
            for name in settings:
                one = Setting(of=of, subject=subject, name=name, number=book.rounds(of, subject.name, name))
                config = folder / "repository" / subject.served(name) / "config.pbtxt"
                curve, made = await one.found(engine, config, lengths)
                book.curves.append(curve)
                book.cells += made
                for cell in made:
                    tell(cell)
                book.write()


def tell(cell: Cell) -> None:
    """One line."""
    off = "  ".join(f"{name} {getattr(cell.measured, name):9,.2f} {error:+7.1%}" for name, error in cell.errors.items())
    batches = f"batch {cell.measured.mean_batch:.2f} {cell.predicted.mean_batch:.2f}"
    name = " ".join(f"{one:<12}" for one in cell.name)
    moved = f"drift {cell.drift:+.1%} pace {cell.pace:.3f}"
    console.print(f"{name} {cell.rate:8.1f}/s  {off}  {batches}  {moved}  {page.verdict(cell.holds)}")


def todo(engine: str | None, model: str | None, rounds: int) -> Iterator[tuple[str, Subject]]:
    """Round by round."""
    for _ in range(rounds):
        for subject in SUBJECTS.values():
            for of in ENGINES:
                if of == (engine or of) and subject.name == (model or subject.name):
                    yield of, subject


def main(  # noqa: PLR0917 - options, as typer declares them
    engine: Annotated[str | None, typer.Option(help=f"One of {', '.join(ENGINES)}; both where none is given.")] = None,
    model: Annotated[str | None, typer.Option(help=f"One of {', '.join(SUBJECTS)}; all where none is given.")] = None,
    setting: Annotated[str | None, typer.Option(help=f"One of {', '.join(SETTINGS)}; all where none is given.")] = None,
    seconds: Annotated[float, typer.Option(help="Longest run.")] = 5.0,
    requests: Annotated[int, typer.Option(help="A run that has so many ends earlier.")] = 1500,
    sizing: Annotated[float, typer.Option(help="Seconds of calibration for each size of a batch.")] = 0.4,
    rounds: Annotated[int, typer.Option(help="The median of the errors of all rounds counts.")] = 3,
    output: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("build/simulation"),
    add: Annotated[bool, typer.Option("--add", help="Rounds to those that the report there has.")] = False,
) -> None:
    """Measure, simulate, compare. The status is 1 where a cell does not hold."""
    for name, known in ((engine, ENGINES), (model, SUBJECTS), (setting, SETTINGS)):
        if name is not None and name not in known:
            raise typer.BadParameter(f"'{name}' is not one of {', '.join(known)}")
    book, begun = Book(output, adds=add), time.monotonic()
    lengths = Lengths(seconds=seconds, requests=requests, sizing_s=sizing)
    settings = [setting] if setting else list(SETTINGS)
    for of, subject in todo(engine, model, rounds):
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as own:
                own.run(model_measured(book, of, subject, settings, lengths))
        except Exception as error:  # noqa: BLE001 - the other models can be measured all the same
            traceback.print_exc()
            book.notes.append(f"{of}, {subject.name}: not all was measured: {repr(error)[:400]}")
    book.write()
    table = Table("server", "model", "setting", "load", "rounds", *(f"{name} off by" for name in cells.BOUNDS), "holds")
    found = verdicts(book.cells)
    for one in found:
        errors = (f"{error:+.1%}" for error in one.errors.values())
        table.add_row(*one.name, str(one.rounds), *errors, page.verdict(one.holds))
    console.print(table)
    good, calibrated = sum(one.holds for one in found), sum(one.calibrated_holds for one in found)
    console.print(f"by the calibrated times as they are {calibrated} of {len(found)} cells hold")
    console.print(f"at the pace of each run {good} of {len(found)}; {output / 'report.html'}")
    console.print(f"{time.monotonic() - begun:.0f} s")
    raise typer.Exit(int(good < len(found) or bool(book.notes)))


if __name__ == "__main__":
    typer.run(main)
