"""`gateway load`: offer traffic to a gateway or a model server, and tell what came of it."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from gateway.cli.admin_client import EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_USAGE, Failure, say, stack_told
from gateway.cli.load_plan import Given, plan_of
from gateway.cli.show import examples, is_terminal, show, show_json
from gateway.tuning import rendering
from gateway.tuning.load import runner, session
from gateway.tuning.load.asks import AskError
from gateway.tuning.load.finding import Found, Step
from gateway.tuning.load.runner import OnProgress
from gateway.tuning.load.session import Plan
from gateway.tuning.report import Report
from gateway.tuning.slo import Slo, parse_slo
from gateway.tuning.traffic import TrafficError

_WHAT: Final = "What is asked"
_HOW_MUCH: Final = "How much"
_OUTPUT: Final = "What is told"
_Result = TypeVar("_Result")

app = typer.Typer()


@app.command(
    epilog=examples(
        "gateway load",
        "gateway load --rate 200 --slo p99=100ms --html report.html",
        "gateway load --task image-classification --image cat.jpg --concurrency 16",
        "gateway load --tensor text_encoder --rate 10..500 --rows 4",
        "gateway load --tensor text_encoder --grpc 127.0.0.1:18001",
        'gateway load --chat "Say hello." --concurrency 4',
        "gateway load --find --rate 50 --slo p99=100ms",
        "gateway load --traffic mixed.yaml --duration 1m",
    )
)
def load(  # noqa: PLR0917 - Typer declares options as parameters
    url: Annotated[str, typer.Option(help="Of the gateway, or a model server; default: as `up` left it.")] = "",
    grpc: Annotated[str, typer.Option(metavar="HOST:PORT", help="Ask Triton straight instead (with --tensor).")] = "",
    key: Annotated[str, typer.Option(envvar="GATEWAY_LOAD_KEY", help="API key; default: as `up` left it.")] = "",
    task: Annotated[
        str, typer.Option(help="A task of the task API; with --chat the model.", rich_help_panel=_WHAT)
    ] = "",
    body: Annotated[
        str,
        typer.Option("--input", metavar="JSON", help="Its input; @FILE: one a line, in turn.", rich_help_panel=_WHAT),
    ] = "",
    image: Annotated[str, typer.Option(metavar="FILE", help="An image as its input.", rich_help_panel=_WHAT)] = "",
    tensor: Annotated[
        str, typer.Option(metavar="MODEL", help="A model by its tensors, on /v2 or --grpc.", rich_help_panel=_WHAT)
    ] = "",
    length: Annotated[
        int, typer.Option(min=1, help="Of dimensions of any size in made-up tensors.", rich_help_panel=_WHAT)
    ] = 128,
    chat: Annotated[str, typer.Option(metavar="PROMPT", help="A streamed chat.", rich_help_panel=_WHAT)] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Of its answer.", rich_help_panel=_WHAT)] = 32,
    traffic: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Several classes at once, in YAML (docs/load.md).", rich_help_panel=_WHAT),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Of each request.", rich_help_panel=_WHAT)] = None,
    priority: Annotated[str, typer.Option(help="interactive or batch.", rich_help_panel=_WHAT)] = "interactive",
    rate: Annotated[
        str, typer.Option(metavar="N[..M]", help="Requests per second: open loop.", rich_help_panel=_HOW_MUCH)
    ] = "",
    arrivals: Annotated[str, typer.Option(help="poisson, constant or bursty.", rich_help_panel=_HOW_MUCH)] = "poisson",
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Recorded instants to replay.", rich_help_panel=_HOW_MUCH)
    ] = None,
    speed: Annotated[float, typer.Option(help="So many times as fast.", rich_help_panel=_HOW_MUCH)] = 1.0,
    concurrency: Annotated[
        int, typer.Option(min=0, help="Callers who wait: closed loop; default: 8.", rich_help_panel=_HOW_MUCH)
    ] = 0,
    think_ms: Annotated[
        float, typer.Option(min=0, help="Between an answer and the next.", rich_help_panel=_HOW_MUCH)
    ] = 0.0,
    duration: Annotated[
        str, typer.Option(metavar="TIME", help="Default: 10s, or the trace.", rich_help_panel=_HOW_MUCH)
    ] = "",
    warmup: Annotated[
        str, typer.Option(metavar="TIME", help="Not counted; default: 1s (trace, ramp: 0s).", rich_help_panel=_HOW_MUCH)
    ] = "",
    grace: Annotated[str, typer.Option(metavar="TIME", help="For the last answers.", rich_help_panel=_HOW_MUCH)] = "5s",
    connections: Annotated[int, typer.Option(min=1, help="To one address, at most.", rich_help_panel=_HOW_MUCH)] = 1000,
    seed: Annotated[int, typer.Option(help="Of the arrivals.", rich_help_panel=_HOW_MUCH)] = 0,
    slo: Annotated[str, typer.Option(metavar="50ms|p99=50ms", help="What is good.", rich_help_panel=_OUTPUT)] = "",
    find: Annotated[
        bool, typer.Option("--find", help="Find the highest load that holds --slo.", rich_help_panel=_OUTPUT)
    ] = False,
    ops_url: Annotated[
        str, typer.Option(envvar="GATEWAY_OPS_URL", help="For batches and queues.", rich_help_panel=_OUTPUT)
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.", rich_help_panel=_OUTPUT)] = False,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as CSV.", rich_help_panel=_OUTPUT)] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="And as a page.", rich_help_panel=_OUTPUT)] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Another machine may be asked.")] = False,
) -> None:
    """Offer load, and tell throughput, latencies from when requests were due, errors, and the servers' batches.

    Exit codes: 0 measured (an SLO held), 1 an SLO was not held, 2 usage, 3 nobody answers. Ctrl-C ends early.
    """
    if find and not slo:
        raise Failure("--find: raises load until an SLO breaks: give one (--slo)", EXIT_USAGE)
    for path in (csv, html):
        if path is not None and not path.parent.is_dir():
            raise Failure(f"{path}: there is no such folder", EXIT_USAGE)
    given = Given(
        url=url,
        grpc=grpc,
        key=key,
        task=task,
        input=body,
        image=image,
        tensor=tensor,
        length=length,
        chat=chat,
        max_tokens=max_tokens,
        traffic=traffic,
        rows=rows,
        priority=priority,
        rate=rate,
        arrivals=arrivals,
        trace=trace,
        speed=speed,
        concurrency=concurrency,
        think_ms=think_ms,
        duration=duration,
        warmup=warmup,
        grace=grace,
        connections=connections,
        seed=seed,
        slo=slo,
        find=find,
        ops_url=ops_url,
    )
    with _refused():
        plan = plan_of(given, stack_told())
        wanted = parse_slo(slo) if slo else Slo(ms=0.0)
        _allowed(plan, yes=yes)
        files = Files(csv=csv, html=html)
        if find:
            found = _run(_find(plan, wanted, is_quiet=as_json))
            _tell_found(found, wanted, plan, files=files, as_json=as_json)
        else:
            report = _run(_measure(plan, is_quiet=as_json))
            _tell(report, wanted, plan, files=files, as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What is written beside what is shown."""

    csv: Path | None
    html: Path | None

    def write(self, reports: Sequence[Report]) -> None:
        """Write them."""
        for path, text in ((self.csv, rendering.csv_text), (self.html, lambda *given: rendering.html_text(given))):
            if path is not None and reports:
                try:
                    path.write_text(text(*reports), encoding="utf-8")
                except OSError as error:
                    raise Failure(f"{path}: {error.strerror}", EXIT_USAGE) from error


def _tell(report: Report, slo: Slo, plan: Plan, *, files: Files, as_json: bool) -> None:
    files.write([report])
    broken = session.broken(plan, report, percent=slo.percent)
    if as_json:
        show_json(report.as_json())
    else:
        show(rendering.table(report))
        for line in _verdicts(plan, report, slo):
            say(line)
    if session.is_unreached(report):
        raise Failure(f"nobody answers: {', '.join(sorted(report.whole.codes))}", EXIT_UNREACHABLE)
    raise typer.Exit(EXIT_REFUSED if broken else 0)


def _tell_found(found: Found, slo: Slo, plan: Plan, *, files: Files, as_json: bool) -> None:
    reports = [step.report for step in found.steps]
    files.write(reports)
    is_whole = not plan.parts[0].traffic.is_open
    if as_json:
        show_json(session.found_json(found, slo, is_whole=is_whole))
    else:
        for report in reports[-1:]:
            show(rendering.table(found.held.report if found.held else report))
        say(session.found_words(found, slo, is_whole=is_whole))
    if reports and session.is_unreached(reports[-1]):
        raise Failure(f"nobody answers: {', '.join(sorted(reports[-1].whole.codes))}", EXIT_UNREACHABLE)
    raise typer.Exit(0 if found.held else EXIT_REFUSED)


def _verdicts(plan: Plan, report: Report, slo: Slo) -> Iterator[str]:
    classes = report.classes or (report.whole,)
    for part, one in zip(plan.parts, classes, strict=True):
        if part.traffic.slo_ms:
            wanted = replace(slo, ms=part.traffic.slo_ms)
            word = "held" if wanted.is_held(one) else "not held"
            share = wanted.share(one) * 100
            yield f"SLO {wanted} {word}: {one.name}: {share:.2f} % of {one.sent:,} had a right answer within it"


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
