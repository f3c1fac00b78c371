"""`gateway sweep`: which batching of a model serves a load best, found by measuring it."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gateway.cli.admin_client import EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_USAGE, Failure, say
from gateway.cli.show import examples, show, show_json
from gateway.tuning.sweep.settings import Axes, SweepError, Unreachable

EXIT_STOPPED: Final = 130
DIGITS: Final = 7  # of a number: ten seconds of delay, and more callers or instances than any machine has
SMALL: Final = 40  # cells: so few are all measured unless --quick is given, whose runs would be too few to find much

_Result = TypeVar("_Result")

app = typer.Typer()


class Preset(StrEnum):
    """Curves that everybody should have seen once."""

    DELAY_CURVE = "delay-curve"
    MAX_BATCH = "max-batch"


# What each of them means where its options are not given; all else stays as the model has it.
PRESETS: Final[dict[Preset, dict[str, Any]]] = {
    Preset.DELAY_CURVE: {"max_batch_size": (), "delay_us": (0, 500, 2000, 10_000), "count": (), "concurrency": (16,)},
    Preset.MAX_BATCH: {"max_batch_size": None, "delay_us": (), "count": (), "concurrency": (16,)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line, read."""

    repository: Path | None
    triton: str
    model: str | None
    shapes: dict[str, tuple[int, ...]]
    axes: Axes
    p99_ms: float
    memory_gb: float
    seconds: float
    is_brute_force: bool | None
    output: Path | None
    is_resumed: bool


@app.command(
    epilog=examples(
        "gateway sweep --repository triton_models --model text_encoder --shape INPUT__0:32 --shape INPUT__1:32",
        "gateway sweep --triton localhost:8001 --model text_encoder --shape INPUT__0:32 --shape INPUT__1:32 "
        "--concurrency 4,16,64 --p99-ms 250",
        "gateway sweep --repository triton_models --model text_encoder --preset delay-curve",
        "gateway sweep --triton localhost:8001 --model text_encoder --restore",
    )
)
def sweep(  # noqa: PLR0917 - Typer declares options as parameters
    repository: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Measure in this process, by the local runtime over this folder.")
    ] = None,
    triton: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Measure a running Triton (gRPC), in explicit mode.")
    ] = "",
    model: Annotated[str | None, typer.Option(help="Which model; of a folder with one model, that one.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT:D,D", help="An input's dimensions without the batch; free ones are 1. Repeatable."),
    ] = None,
    max_batch_size: Annotated[str, typer.Option(metavar="N,N..M", help="Default: 1, 2, 4 ... the model's own.")] = "",
    delay_us: Annotated[
        str, typer.Option(metavar="US,US", help="max_queue_delay_microseconds. Default: 0,500,2000,10000.")
    ] = "",
    preferred: Annotated[
        str, typer.Option(metavar="N,N+N", help="preferred_batch_size: none, one, or several joined by +.")
    ] = "",
    count: Annotated[
        str, typer.Option(metavar="N,N", help="instance_group.count. Default: 1, 2, the model's own.")
    ] = "",
    concurrency: Annotated[str, typer.Option(metavar="N,N", help="Callers that wait for answers. Default: 16.")] = "",
    rate: Annotated[
        str, typer.Option(metavar="N,N", help="Requests per second instead, whatever the answers do.")
    ] = "",
    seconds: Annotated[
        float, typer.Option(min=0.05, max=3600, help="Length of a long run; short ones last a third.")
    ] = 3.0,
    p99_ms: Annotated[
        float, typer.Option(min=0, max=3_600_000, help="The SLO: answers within it are good; p99 has to keep it.")
    ] = 0.0,
    memory_gb: Annotated[
        float, typer.Option(min=0, max=1_000_000, help="What the server's process may take, in GiB.")
    ] = 0.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Search: under a quarter of the runs. [default over 40]")
    ] = False,
    brute_force: Annotated[
        bool, typer.Option("--brute-force", help="Measure every setting for the whole time.")
    ] = False,
    preset: Annotated[Preset | None, typer.Option(help="A well-known curve; other options change it.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where all goes. Default: build/sweep/MODEL.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the sweep that is in the folder.")] = False,
    restore: Annotated[
        bool, typer.Option("--restore", help="Only put back what a killed sweep has left on that Triton.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print sweep.json instead of the table.")] = False,
) -> None:
    """Measure a model's batching settings under a load, choose the best, and write its config.pbtxt.

    Into the folder go sweep.json, curve.json (for `gateway simulate`), report.html, plot.png and config.pbtxt. Triton
    serves the model as before at the end, also after Ctrl-C.

    Exit codes: 0 done, 1 it could not be measured or no setting keeps the bounds, 2 usage, 3 no Triton
    answers, 130 stopped.
    """
    try:
        _check(repository, triton, model, is_both=quick and brute_force)
        if restore:
            _restore(triton, model or "")
            return
        given = {
            "max_batch_size": _whole_numbers(max_batch_size, "--max-batch-size"),
            "delay_us": _whole_numbers(delay_us, "--delay-us", least=0),
            "count": _whole_numbers(count, "--count"),
            "concurrency": _whole_numbers(concurrency, "--concurrency"),
            "rate": _rates(rate),
        }
        asked = Asked(
            repository=repository,
            triton=triton,
            model=model,
            shapes=dict(_shape(text) for text in shape or ()),
            axes=_axes(given, preset, _preferred(preferred)),
            p99_ms=p99_ms,
            memory_gb=memory_gb,
            seconds=seconds,
            is_brute_force=True if brute_force else False if quick else None,
            output=output,
            is_resumed=resume,
        )
        keeps = _run(asked, as_json=as_json)
    except Unreachable as error:
        raise Failure(str(error), EXIT_UNREACHABLE) from error
    except SweepError as error:
        raise Failure(str(error), EXIT_USAGE if str(error).startswith("--") else EXIT_REFUSED) from error
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        raise Failure("stopped; go on with --resume", EXIT_STOPPED) from error
    raise typer.Exit(0 if keeps else EXIT_REFUSED)


def _check(repository: Path | None, triton: str, model: str | None, *, is_both: bool) -> None:
    if bool(repository) == bool(triton):
        raise SweepError("--repository or --triton: one of the two says where the model is")
    if is_both:
        raise SweepError("--quick and --brute-force: one of the two, or neither")
    if triton and not model:
        raise SweepError("--model: says which model of that Triton")


def _run(asked: Asked, *, as_json: bool) -> bool:
    """Whether a setting was found that keeps the bounds. Raises SweepError."""
    from gateway.tuning.sweep import outcome as told

    told.need_libraries()
    outcome, folder = _until_stopped(lambda: _measure(asked))
    if as_json:
        show_json(outcome.as_json())
    else:
        show(told.table(outcome))
        for line in told.reasons(outcome):
            say(line)
    more = ", curve.json" if (folder / "curve.json").is_file() else ""
    say(f"wrote {folder}: sweep.json, config.pbtxt, report.html, plot.png{more}", err=True)
    return bool(outcome.chosen.seen().keeps(outcome.goal))


def _until_stopped(make: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    """Run it to its end. The first Ctrl-C or SIGTERM cancels it; what puts things back is left to finish."""
    import uvloop

    async def run() -> _Result:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(make())

        def stop() -> None:
            if not task.cancelling():
                say("stopping; a moment, until all is as it was found", err=True)
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        return await task

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


async def _measure(asked: Asked) -> tuple[Any, Path]:
    """The outcome, and the folder that all of it is in."""
    from gateway.core.memory_plan import GIB
    from gateway.tuning.sweep import curve, outcome, record
    from gateway.tuning.sweep.search import Goal
    from gateway.tuning.sweep.settings import space
    from gateway.tuning.sweep.sweep import Plan
    from gateway.tuning.sweep.sweep import sweep as walk

    async with _server(asked) as server:
        cells = space(server.message, asked.axes)
        if asked.memory_gb and server.memory_bytes() is None:
            raise SweepError(f"--memory-gb: {server.place} is not on this machine, so what it takes cannot be seen")
        plan = Plan(
            cells=cells,
            goal=Goal(p99_ms=asked.p99_ms, memory_bytes=round(asked.memory_gb * GIB)),
            seconds=asked.seconds,
            is_brute_force=len(cells) <= SMALL if asked.is_brute_force is None else asked.is_brute_force,
        )
        folder = asked.output or Path("build/sweep") / server.message.name
        what = plan.identity(server, asked.shapes)
        with record.opened(folder, what, is_resumed=asked.is_resumed) as runs, _Bar(plan, len(runs.runs)) as bar:
            await server.begin()
            await walk(server, plan, runs, on_step=bar.step, on_run=bar.run)
            made = outcome.Outcome(
                model=server.message.name,
                place=server.place,
                goal=plan.goal,
                cells=len(cells),
                runs=runs.runs,
                message=server.written,
            )
            settings = {cell.setting for cell in cells}
            base = made.chosen.cell.setting
            bar.curve()
            measured = None
            try:
                measured = await curve.measure(
                    server,
                    sizes={max(1, one.max_batch_size) for one in settings},
                    counts={one.count for one in settings},
                    base=base,
                    on_step=bar.words,
                )
            except SweepError as error:  # what was found is no worse for it
                say(f"no curve.json: {error}", err=True)
            outcome.write(made, folder, curve=measured)
    return made, folder


@contextlib.asynccontextmanager
async def _server(asked: Asked) -> AsyncIterator[Any]:
    from gateway.tuning.sweep import local, triton

    if asked.repository is not None:
        async with local.opened(asked.repository, asked.model, asked.shapes) as server:
            yield server
    else:
        async with triton.opened(asked.triton, asked.model or "", asked.shapes) as other:
            yield other


class _Bar:
    """How far it is and how long it will take, on stderr, where somebody sees it; and the first result at once."""

    def __init__(self, plan: Any, done: int) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._plan = plan
        self._done = done
        self._bar = self._progress.add_task("loading", total=plan.runs, completed=done)

    def __enter__(self) -> Self:
        self._progress.start()
        self._progress.console.print(f"at most {self._plan.runs} runs of {len(self._plan.cells)}", highlight=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, step: Any) -> None:
        """A run begins."""
        self._progress.update(self._bar, description=f"{step.cell.setting}, {step.cell.load} ({step.why})")

    def run(self, run: Any) -> None:
        """A run has ended; the first is told in full, since it is what there is now."""
        from gateway.tuning.sweep.outcome import words

        if not self._done:
            self._progress.console.print(
                f"as found, {run.cell.setting}: {words(run, self._plan.goal)}", highlight=False
            )
        self._done += 1
        self._progress.advance(self._bar)

    def curve(self) -> None:
        """The runs are over; what follows is for simulations."""
        self._progress.update(self._bar, total=None, description="batches one by one")

    def words(self, step: str) -> None:
        """What is measured of the curve now."""
        self._progress.update(self._bar, description=f"curve: {step}")


def _restore(address: str, model: str) -> None:
    from gateway.tuning.sweep import triton

    if not address:
        raise SweepError("--restore: is for --triton; the local runtime leaves nothing behind")

    async def put_back() -> bool:
        async with triton.connected(address, model) as server:
            return await server.put_back()

    was_left = asyncio.run(put_back())
    say(f"{model}: served as it was found" if was_left else f"{model}: no sweep has left anything")


def _axes(given: dict[str, Any], preset: Preset | None, preferred: tuple[tuple[int, ...], ...]) -> Axes:
    """The options, with a preset's where they are not given."""
    usual = dict(PRESETS[preset]) if preset is not None else {}
    if given["rate"] and given["concurrency"]:
        raise SweepError("--rate and --concurrency: one of the two says how much is asked")
    if given["rate"]:
        usual.pop("concurrency", None)
    chosen = {name: value for name, value in given.items() if value}
    return Axes(**{**usual, **chosen}, preferred=preferred)


def _whole_numbers(text: str, option: str, *, least: int = 1) -> tuple[int, ...]:
    """`1,2,4..64`: a range goes on by doubling. Raises SweepError."""
    found: list[int] = []
    for part in filter(None, (one.strip() for one in text.split(","))):
        first, dots, last = part.partition("..")
        numbers = [first, last] if dots else [first]
        if not all(one.isascii() and one.isdecimal() and len(one) <= DIGITS and int(one) >= least for one in numbers):
            raise SweepError(f"{option} {text}: write whole numbers of {least} to 9999999, as 1,2,4 or 1..64")
        found.append(int(first))
        while dots and found[-1] < int(last):
            found.append(min(int(last), max(1, found[-1] * 2)))
    return tuple(dict.fromkeys(found))


def _rates(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(one) for one in text.split(",") if one.strip())
    except ValueError as error:
        raise SweepError(f"--rate {text}: write numbers, as 50,100") from error
    if not all(0 < one < float("inf") for one in found):
        raise SweepError(f"--rate {text}: must be above 0")
    return found


def _preferred(text: str) -> tuple[tuple[int, ...], ...]:
    """`none,8,4+8`."""
    if not text:
        return ((),)
    return tuple(
        () if one.strip() == "none" else tuple(sorted(_whole_numbers(one.replace("+", ","), "--preferred")))
        for one in text.split(",")
    )


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, dims = text.rpartition(":")
    parts = [one for one in dims.split(",") if one]
    if not name or not all(one.isascii() and one.isdecimal() and int(one) for one in parts):
        raise SweepError(f"--shape {text}: write INPUT:D,D")
    return name, tuple(int(one) for one in parts)
