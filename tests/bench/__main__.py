"""`make bench`: every speed goal, measured beside what it is held against. docs/benchmarks.md is the manual.

The gateway, or what it is compared with, has one core; the load, the upstream and Redis have another. Subjects are run
in turns, and medians are told. Figures depend on the machine: compare within one run.
"""

import compileall
import gc
import json
import os
import tempfile
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import typer
import uvloop

from tests.bench.suite import machine, peers, report
from tests.bench.suite.bench import Bench, Failed, Row
from tests.bench.suite.report import Found, Report
from tests.bench.suite.rows import ROWS
from tests.kit.ending import sigterm_as_ctrl_c

ROUNDS, QUICK_ROUNDS = 5, 2
SECONDS, QUICK_SECONDS = 2, 1
PAGE = machine.ROOT / "docs" / "benchmarks.md"
INTERRUPTED = 130


def main(
    *,
    quick: bool = typer.Option(default=False, help="Under three minutes: fewer and shorter rounds, no slow peers."),
    only: str = typer.Option("", help=f"These rows, with commas, of {', '.join(ROWS)}. The report keeps its others."),
    rounds: int = typer.Option(0, help=f"Runs of each subject: {ROUNDS}, quick {QUICK_ROUNDS}."),
    seconds: int = typer.Option(0, help=f"Length of a run: {SECONDS}, quick {QUICK_SECONDS}."),
    with_peers: bool = typer.Option(False, "--peers", help="Install the missing peers before."),
    output: Path = typer.Option(Path("build/bench"), help="Folder of report.json and report.md."),  # noqa: B008 - Typer's way
    page: bool = typer.Option(default=False, help="Put the tables into docs/benchmarks.md, too."),
) -> None:
    """Measure; about a quarter of an hour. Exit status 1 where a goal is missed or a row failed."""
    chosen = only.split(",") if only else list(ROWS)
    if unknown := sorted(set(chosen) - set(ROWS)):
        raise typer.BadParameter(f"no such row: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if with_peers:
        for fault in peers.install(peers.FOLDER, list(peers.PEERS), say):
            say(fault)
    rounds, seconds = rounds or (QUICK_ROUNDS if quick else ROUNDS), seconds or (QUICK_SECONDS if quick else SECONDS)
    form = f"{'quick' if quick else 'long'}, {rounds} rounds of {seconds} s"
    kept = begun(output / "report.json", {**machine.described(peers.FOLDER), "form": form})
    for package in ("gateway", "local_runtime"):  # an installed gateway has its byte code, and starts with it
        compileall.compile_dir(machine.ROOT / package, quiet=1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})  # what Redis, Triton and upstreams inherit
    sigterm_as_ctrl_c()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # the load's own pauses would be seen as the gateway's
    for number, name in enumerate(chosen, 1):
        say(f"[{number}/{len(chosen)}] {ROWS[name].title}")
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            bench = Bench(
                folder=Path(folder),
                peers=peers.FOLDER,
                rounds=rounds,
                seconds=seconds,
                is_quick=quick,
                cores=cores,
                say=say,
            )
            found, is_interrupted = measured(ROWS[name], bench)
        if not is_interrupted or name not in kept.rows:  # a part is no better than what was whole
            kept = kept.with_row(found)
        write(output, kept, page=page)
        if is_interrupted:
            raise typer.Exit(INTERRUPTED)
    print(report.goals_table(kept.rows.values()))
    if kept.missed:
        print("\nmissed:\n" + "\n".join(f"- {one}" for one in kept.missed))
        raise typer.Exit(1)


def measured(row: Row, bench: Bench) -> tuple[Found, bool]:
    """What the row found, whatever befell it; and whether a person stopped it."""
    date, before, is_interrupted = datetime.now(UTC).isoformat(timespec="seconds"), os.getloadavg()[0], False
    try:
        uvloop.run(row.measure(bench))
    except Failed as error:
        bench.failed(str(error))
    except KeyboardInterrupt:
        is_interrupted = True
        bench.failed("interrupted")
    except Exception as error:  # noqa: BLE001 - the report tells it, and the other rows are measured
        bench.failed(f"{type(error).__name__}: {error}")
        traceback.print_exc()
    found = Found(
        name=row.name,
        title=row.title,
        date=date,
        revision=machine.revision(),
        load=(before, os.getloadavg()[0]),
        goals=row.goals,
        runs=tuple(bench.runs),
        notes=tuple(bench.notes),
        errors=tuple(bench.errors),
    )
    return found, is_interrupted


def begun(file: Path, setting: Mapping[str, str]) -> Report:
    """What the file holds, if it was measured in the same setting; else nothing yet."""
    if file.exists():
        found = report.parse(json.loads(file.read_text()))
        if found.setting == setting:
            return found
        say(f"{file} is of another setting, and is begun anew")
    return Report(setting=setting)


def write(folder: Path, kept: Report, *, page: bool) -> None:
    """After each row: who stops the bench keeps what it had."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(kept.as_json(), indent=1) + "\n")
    text = report.markdown(kept)
    (folder / "report.md").write_text(text)
    if page:
        PAGE.write_text(report.into_page(PAGE.read_text(), text))


def say(text: str) -> None:
    """One line for who waits."""
    print(text, flush=True)


if __name__ == "__main__":
    typer.run(main)
