"""`gateway load` once its options are read: the measurement, how it goes, and what is shown of it."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from gateway.cli.admin_client import EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_USAGE, Failure, stack_told
from gateway.cli.show import is_terminal, show, show_json
from gateway.cli.terminal import say
from gateway.cli.tuning.files import Files
from gateway.cli.tuning.load_plan import Given, plan_of
from gateway.cli.tuning.options import slo_of
from gateway.tuning import rendering
from gateway.tuning.load import runner, session
from gateway.tuning.load.asks import AskError
from gateway.tuning.load.finding import Found, Step
from gateway.tuning.load.runner import OnProgress
from gateway.tuning.load.session import Plan
from gateway.tuning.report import Report
from gateway.tuning.slo import PERCENT, Slo, Verdict, verdicts
from gateway.tuning.traffic import TrafficError

_Result = TypeVar("_Result")


def offer(given: Given, *, csv: Path | None, html: Path | None, as_json: bool, yes: bool) -> None:
    """Measure, show, and end the command with its exit code."""
    if given.find and not given.slo:
        raise Failure("--find: raises load until an SLO breaks: give one (--slo)", EXIT_USAGE)
    files = Files(csv=csv, html=html)
    files.check()
    with _refused():
        plan = plan_of(given, stack_told())
        slo = slo_of(given.slo)
        _allowed(plan, yes=yes)
        if given.find and slo is not None:
            found = _run(_find(plan, slo, is_quiet=as_json))
            _tell_found(found, slo, plan, files=files, as_json=as_json)
        else:
            report = _run(_measure(plan, is_quiet=as_json))
            _tell(report, verdicts(report, percent=slo.percent if slo else PERCENT), files=files, as_json=as_json)


def _tell(report: Report, judged: Sequence[Verdict], *, files: Files, as_json: bool) -> None:
    try:
        if as_json:
            show_json(report.as_json())
        else:
            show(rendering.table(report))
            for one in judged:
                say(str(one))
    finally:  # a full disk costs the file, and a closed stdout what is shown, but neither the other
        files.write([report])
    if session.is_unreached(report):
        raise Failure(f"nobody answers: {', '.join(sorted(report.whole.codes))}", EXIT_UNREACHABLE)
    raise typer.Exit(0 if all(one.is_held for one in judged) else EXIT_REFUSED)


def _tell_found(found: Found, slo: Slo, plan: Plan, *, files: Files, as_json: bool) -> None:
    reports = [step.report for step in found.steps]
    is_whole = not plan.parts[0].traffic.is_open
    try:
        if as_json:
            show_json(session.found_json(found, slo, is_whole=is_whole))
        else:
            for report in reports[-1:]:
                show(rendering.table(found.held.report if found.held else report))
            say(session.found_words(found, slo, is_whole=is_whole))
    finally:
        files.write(reports)
    if reports and session.is_unreached(reports[-1]):
        raise Failure(f"nobody answers: {', '.join(sorted(reports[-1].whole.codes))}", EXIT_UNREACHABLE)
    raise typer.Exit(0 if found.held else EXIT_REFUSED)


async def _measure(plan: Plan, *, is_quiet: bool) -> Report:
    with _shown(is_quiet=is_quiet) as on_progress:
        return await session.measure(plan, on_progress=on_progress)


async def _find(plan: Plan, slo: Slo, *, is_quiet: bool) -> Found:
    is_whole = not plan.parts[0].traffic.is_open

    def on_step(step: Step) -> None:
        if not is_quiet:
            say(session.step_words(step, slo, is_whole=is_whole), err=True)

    with _shown(is_quiet=is_quiet) as on_progress:
        return await session.find(plan, slo, on_progress=on_progress, on_step=on_step)


def _run(work: Coroutine[Any, Any, _Result]) -> _Result:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as own:
        return own.run(work)


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except (AskError, TrafficError, ValueError) as error:
        raise Failure(str(error), EXIT_USAGE) from error


@contextmanager
def _shown(*, is_quiet: bool) -> Iterator[OnProgress | None]:
    """How it goes, on stderr where somebody sees it."""
    console = Console(stderr=True)
    if is_quiet or not console.is_terminal:
        yield None
        return
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("begins")

        def on_progress(now: runner.Progress) -> None:
            told = (
                f"{min(now.at_s, now.whole_s):.0f}/{now.whole_s:.0f} s  {now.answered_per_s:,.0f}/s  "
                f"p50 {rendering.ms(now.p50)} p99 {rendering.ms(now.p99)} ms  "
                f"{now.failed:,} failed  {now.in_flight:,} under way"
            )
            progress.update(bar, completed=now.at_s, total=now.whole_s, description=told)

        yield on_progress


def _allowed(plan: Plan, *, yes: bool) -> None:
    """Load on other machines than this one must be meant."""
    others = sorted(host for host in plan.hosts if not session.is_loopback(host))
    if yes or not others:
        return
    question = f"put load on {', '.join(others)}?"
    if not is_terminal() or not typer.confirm(question, err=True):
        raise Failure(f"{', '.join(others)}: not this machine; --yes says that it may be put under load", EXIT_USAGE)
