"""What `gateway plan` does with its options: reads the world, searches with the simulator, says what it found."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.cli.admin_client import EXIT_REFUSED, EXIT_USAGE, Failure
from gateway.cli.show import show_json
from gateway.cli.tuning.options import slo_of
from gateway.cli.tuning.plan_words import plan_document, show_plan, so_many
from gateway.cli.tuning.progress import Lines
from gateway.tuning.planning import PERCENTILES, Found, Setting, search, settings_of
from gateway.tuning.planning_worlds import SimulatedProbe, Situation, document_of, situation_of
from gateway.tuning.report import Report
from gateway.tuning.simulation.run import simulate
from gateway.tuning.simulation.world import World, WorldError, load_document
from gateway.tuning.slo import Slo

SIZES: Final = (1, 4, 8, 16, 32)
SEEDS: Final = 3
_BACKEND: Final = "servers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command's options, as they are in its help."""

    slo: str
    rate: float
    curve: Path | None
    config_pbtxt: Path | None
    model: str
    usd_per_hour: float | None
    arrivals: str
    rows: int
    world: Path | None
    backend: str
    max_batch_size: str
    delay_us: str
    count: str
    headroom: float
    survive: int
    max_replicas: int
    seed: int
    output: Path | None
    as_json: bool


def run(asked: Asked) -> None:
    """Plan, and say so; every end but a plan is the command's: `Failure`, or an exit with 1."""
    situation = _situation(asked)
    settings = _settings(situation, asked)
    seeds = tuple(range(asked.seed, asked.seed + SEEDS))
    logging.getLogger("gateway").addHandler(logging.NullHandler())  # breakers that open are what is planned for
    try:
        found = _search(situation, settings, seeds, asked.max_replicas)
    except WorldError as error:  # a setting that the model's configuration does not allow
        raise Failure(str(error), EXIT_USAGE) from error
    if asked.as_json:
        show_json(plan_document(found, situation, headroom=asked.headroom, seeds=seeds))
    else:
        show_plan(found, situation, headroom=asked.headroom, seeds=seeds)
    if found.chosen is None:
        raise typer.Exit(EXIT_REFUSED)
    if asked.output is not None:
        _write(asked.output, document_of(situation, found.chosen.setting, found.chosen.replicas, whole=True))


def _situation(asked: Asked) -> Situation:
    slo, world = slo_of(asked.slo, percentiles=PERCENTILES), asked.world
    if world is None:
        document = _document(slo, asked)
    elif asked.rate or asked.curve or asked.config_pbtxt:
        raise Failure("--world: says what --rate, --curve and --config-pbtxt say: give those, or the world", EXIT_USAGE)
    else:
        document = _loaded(world)
    try:
        return situation_of(
            _priced(document, asked.backend, asked.usd_per_hour),
            folder=world.parent if world else Path(),
            model=asked.model if world else "",  # else the document's only one has this name
            backend=asked.backend,
            slo=slo,
            headroom=asked.headroom,
            survive=asked.survive,
        )
    except WorldError as error:
        raise Failure(str(error), EXIT_USAGE) from error


def _document(slo: Slo | None, asked: Asked) -> dict[str, Any]:
    """The world of one model on one backend."""
    if slo is None or not asked.rate or asked.curve is None:
        raise Failure("give --slo, --rate and --curve, or --world", EXIT_USAGE)
    name = asked.model or str(_loaded(asked.curve).get("model") or "model")
    entry = {"curve": str(asked.curve)} | ({"config": str(asked.config_pbtxt)} if asked.config_pbtxt else {})
    return {
        "title": f"{asked.rate:g} requests/s of {name}, {slo}",
        "models": {name: entry | {"max_batch_size": max(SIZES[-1], asked.rows)}},
        "backends": {_BACKEND: {}},
        "traffic": [{"slo_ms": slo.ms, "rate": asked.rate, "arrivals": asked.arrivals, "rows": asked.rows}],
    }


def _loaded(path: Path) -> dict[str, Any]:
    try:
        return load_document(path)  # a curve is JSON, and JSON is YAML
    except WorldError as error:
        raise Failure(str(error), EXIT_USAGE) from error


def _priced(document: dict[str, Any], backend: str, usd_per_hour: float | None) -> dict[str, Any]:
    """With the price of a replica where one is given; what is wrong with the world is found when it is read."""
    backends = document.get("backends")
    name = backend or next(iter(backends), "") if isinstance(backends, dict) else ""
    if usd_per_hour is None or not isinstance(backends, dict) or name not in backends:
        return document
    return {**document, "backends": {**backends, name: {**(backends[name] or {}), "usd_per_hour": usd_per_hour}}}


def _settings(situation: Situation, asked: Asked) -> Sequence[Setting]:
    measured = max(situation.curve.compute_us)
    found = settings_of(
        situation.curve,
        sizes=_numbers(asked.max_batch_size, "--max-batch-size", least=1)
        or [one for one in SIZES if one <= measured]
        or [measured],
        delays_us=_numbers(asked.delay_us, "--delay-us", least=0),
        counts=_numbers(asked.count, "--count", least=1) or {1, *situation.curve.slowdown},
        rows=situation.rows,
    )
    if not found:
        raise Failure(f"--max-batch-size: a request brings {max(situation.rows)} rows: none is so large", EXIT_USAGE)
    return found


def _numbers(text: str, option: str, *, least: int) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if any(not word.isdecimal() or not least <= int(word) <= 10**7 for word in words):
        raise Failure(f"{option} {text}: write whole numbers from {least} on, as 1,4,8", EXIT_USAGE)
    return [int(word) for word in words]


def _search(situation: Situation, settings: Sequence[Setting], seeds: Sequence[int], most: int) -> Found:
    with _shown() as tell:
        runs = 0

        def told(world: World, seed: int) -> Report:
            nonlocal runs
            replicas = world.backends[situation.backend].replicas

            def on_progress(at_s: float) -> None:
                part = min(1.0, at_s / world.duration_s)
                tell(f"{_counted(runs)} made; now {so_many(replicas)}, {part:.0%} of {world.duration_s:,.4g} s")

            report = simulate(world, seed=seed, on_progress=on_progress)
            runs += 1
            tell(f"{_counted(runs)} made; the last: {so_many(replicas)}, {report.whole.sent:,} requests")
            return report

        candidates = [situation.candidate(one) for one in settings]
        return search(candidates, SimulatedProbe(situation, told), seeds=seeds, most_replicas=most)


def _counted(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs:,} runs"


@contextmanager
def _shown() -> Iterator[Callable[[str], None]]:
    """What it does, on stderr: a bar where somebody sees it, else lines. How many runs there will be nobody knows."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("simulating", total=None)
        lines = Lines()

        def tell(words: str) -> None:
            progress.update(bar, description=words)
            if not console.is_terminal:
                lines.tell(words)

        yield tell


def _write(path: Path, document: Mapping[str, Any]) -> None:
    try:
        path.write_text(yaml.safe_dump(dict(document), sort_keys=False, width=110))
    except OSError as error:
        raise Failure(f"--output {path}: {error.strerror}", EXIT_USAGE) from error
