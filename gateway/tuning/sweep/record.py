"""The runs of a sweep in its folder, each written when it has ended, so that a sweep that was stopped can go on."""

import contextlib
import fcntl
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from gateway.tuning.report import ClassReport, Report, ServerReport, parse_report
from gateway.tuning.sweep.search import Seen, Step
from gateway.tuning.sweep.settings import Cell, SweepError, parse_cell

FORM: Final = "sweep-runs/1"
FILE: Final = "runs.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that was made.

    Attributes:
        why: as `search.Step` has it.
        report: what was measured; None where the setting could not be served, and `error` says why.
        memory_bytes: of the server after the run; 0 where it is not known.
    """

    cell: Cell
    is_long: bool
    why: str
    report: Report | None = None
    memory_bytes: int = 0
    error: str = ""

    @property
    def whole(self) -> ClassReport | None:
        """All requests together."""
        return None if self.report is None else self.report.whole

    @property
    def server(self) -> ServerReport | None:
        """What the server counted."""
        return self.report.servers[0] if self.report is not None and self.report.servers else None

    def seen(self) -> Seen:
        """As the search sees it. Answers that are wrong do not count, and make no p99."""
        whole = self.whole
        latency = None if whole is None else whole.latency
        return Seen(
            cell=self.cell,
            is_long=self.is_long,
            qps=0.0 if whole is None else whole.qps,
            goodput=0.0 if whole is None else whole.goodput,
            p99_ms=math.inf if latency is None else latency.p99,
            memory_bytes=self.memory_bytes,
        )

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {
            **self.cell.as_json(),
            "is_long": self.is_long,
            "why": self.why,
            "memory_bytes": self.memory_bytes,
            "error": self.error,
            "report": None if self.report is None else self.report.as_json(),
        }


def failed(step: Step, reason: str) -> Run:
    """A run that could not be made."""
    return Run(cell=step.cell, is_long=step.is_long, why=step.why, error=reason)


def parse_run(given: Mapping[str, Any]) -> Run:
    """A run out of `as_json`. Raises KeyError, TypeError or ValueError for what is none."""
    return Run(
        cell=parse_cell(dict(given)),
        is_long=given["is_long"],
        why=given["why"],
        memory_bytes=given["memory_bytes"],
        error=given["error"],
        report=None if given["report"] is None else parse_report(given["report"]),
    )


class Record:
    """The runs of one sweep; made by `opened`."""

    def __init__(self, file: TextIO, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self._file = file

    def add(self, run: Run) -> None:
        """Keep a run, on disk at once."""
        try:
            self._file.write(json.dumps(run.as_json()) + "\n")
            self._file.flush()
        except OSError as error:
            raise SweepError(f"--output: {FILE} cannot be written: {error.strerror}") from error
        self.runs.append(run)


@contextlib.contextmanager
def opened(folder: Path, space: Mapping[str, Any], *, is_resumed: bool) -> Iterator[Record]:
    """The record in `folder`, which nobody else can open meanwhile.

    `space` is all that decides about the runs; a folder of another one is refused. Raises SweepError.
    """
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise SweepError(f"--output {folder}: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SweepError(f"--output {folder}: another sweep writes into it now") from error
        file.seek(0)
        try:
            lines = file.read().splitlines(keepends=True)
        except UnicodeDecodeError as error:
            raise SweepError(f"--output {folder}: {FILE} is no record of a sweep: {error}") from error
        header = {"form": FORM, "space": json.loads(json.dumps(space))}
        first = json.dumps(header) + "\n"
        if "".join(lines) != first and first.startswith("".join(lines)):  # new, or killed while it began
            file.truncate(0)
            file.write(first)
            file.flush()
            yield Record(file, ())
            return
        if not is_resumed:
            raise SweepError(f"--output {folder}: holds a sweep; go on with it by --resume, or name another folder")
        runs = _runs(lines, header, folder)
        if lines[-1:] and not lines[-1].endswith("\n"):  # killed while it wrote
            file.truncate(sum(len(line.encode()) for line in lines[:-1]))
        yield Record(file, runs)


def _runs(lines: Sequence[str], header: Mapping[str, Any], folder: Path) -> list[Run]:
    whole = [line for line in lines if line.endswith("\n")]
    try:
        first, *rest = (json.loads(line) for line in whole)
        space = first["space"] if first["form"] == FORM else {"form": first["form"]}
        differing = [name for name, value in header["space"].items() if space.get(name) != value]
        runs = [] if differing else [parse_run(one) for one in rest]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SweepError(f"--resume: {folder / FILE} is no record of a sweep: {error}") from error
    if differing:
        raise SweepError(f"--resume: {folder} holds a sweep of something else: its {', '.join(differing)} differ")
    return runs
