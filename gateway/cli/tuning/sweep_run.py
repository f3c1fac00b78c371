"""What `gateway sweep` does with its options: opens the server, walks, shows how far it is, writes what it found."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gateway.cli.admin_client import EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_USAGE, Failure
from gateway.cli.show import show, show_json
from gateway.cli.terminal import say
from gateway.cli.tuning.options import duration_s, shapes_of, slo_of
from gateway.cli.tuning.sweep import Preset
from gateway.tuning.sweep.settings import Axes, SweepError, Unreachable

EXIT_STOPPED: Final = 130
DIGITS: Final = 7  # of a number: ten seconds of delay, and more callers or instances than any machine has
SHORTEST_S: Final = 0.05  # of a long run
LONGEST_S: Final = 3600.0
SMALL: Final = 40  # cells: so few are all measured unless --quick is given, whose runs would be too few to find much

_Result = TypeVar("_Result")


# What each of them means where its options are not given; all else stays as the model has it.
PRESETS: Final[dict[Preset, dict[str, Any]]] = {
    Preset.DELAY_CURVE: {"max_batch_size": (), "delay_us": (0, 500, 2000, 10_000), "count": (), "concurrency": (16,)},
    Preset.MAX_BATCH: {"max_batch_size": None, "delay_us": (), "count": (), "concurrency": (16,)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options as they were given."""

    repository: Path | None
    triton: str
    model: str | None
    shape: Sequence[str]
    max_batch_size: str
    delay_us: str
    preferred: str
    count: str
    concurrency: str
    rate: str
    duration: str
    slo: str
    memory_gb: float
    quick: bool
    brute_force: bool
    preset: Preset | None
    output: Path | None
    resume: bool
    restore: bool
    as_json: bool


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


def run(given: Given) -> None:
    """Sweep, tell, and end the command with its exit code."""
    try:
        _check(given)
        if given.restore:
            _restore(given.triton, given.model or "")
            return
        keeps = _run(_asked(given), as_json=given.as_json)
    except Unreachable as error:
        raise Failure(str(error), EXIT_UNREACHABLE) from error
    except SweepError as error:
        raise Failure(str(error), EXIT_USAGE if str(error).startswith("--") else EXIT_REFUSED) from error
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        raise Failure("stopped; go on with --resume", EXIT_STOPPED) from error
    raise typer.Exit(0 if keeps else EXIT_REFUSED)


def _check(given: Given) -> None:
    if bool(given.repository) == bool(given.triton):
        raise SweepError("--repository or --triton: one of the two says where the model is")
    if given.quick and given.brute_force:
        raise SweepError("--quick and --brute-force: one of the two, or neither")
    if given.triton and not given.model:
        raise SweepError("--model: says which model of that Triton")


def _asked(given: Given) -> Asked:
    slo = slo_of(given.slo, percentiles=("p99",))
    axes = {
        "max_batch_size": _whole_numbers(given.max_batch_size, "--max-batch-size"),
        "delay_us": _whole_numbers(given.delay_us, "--delay-us", least=0),
        "count": _whole_numbers(given.count, "--count"),
        "concurrency": _whole_numbers(given.concurrency, "--concurrency"),
        "rate": _rates(given.rate),
    }
    return Asked(
        repository=given.repository,
        triton=given.triton,
        model=given.model,
        shapes=shapes_of(given.shape),
        axes=_axes(axes, given.preset, _preferred(given.preferred)),
        p99_ms=slo.ms if slo else 0.0,
        memory_gb=given.memory_gb,
        seconds=_seconds(given.duration),
        is_brute_force=True if given.brute_force else False if given.quick else None,
        output=given.output,
        is_resumed=given.resume,
    )


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


def _seconds(text: str) -> float:
    """Of a long run. Raises SweepError."""
    seconds = duration_s(text, "--duration")
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise SweepError(f"--duration {text}: must be from 50ms to 1h")
    return seconds
