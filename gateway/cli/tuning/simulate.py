"""`gateway simulate`: what would come of traffic on servers that need not be there."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from gateway.cli.admin_client import EXIT_REFUSED, EXIT_USAGE, Failure
from gateway.cli.show import examples, show, show_json
from gateway.cli.terminal import say
from gateway.cli.tuning.progress import Lines

if TYPE_CHECKING:
    from gateway.tuning.simulation.world import World

app = typer.Typer()


@app.command(
    epilog=examples(
        "gateway simulate deploy/worlds/replicas.yaml",
        "gateway simulate deploy/worlds/replicas.yaml --slo p99=100ms",
        "gateway simulate deploy/worlds/replicas.yaml --set backends.triton.replicas=4 --set traffic.0.rate=900",
        "gateway simulate deploy/worlds/replicas.yaml --set models.embed.max_batch_size=16 --seed 2 --html report.html",
    )
)
def simulate(
    world: Annotated[Path, typer.Argument(metavar="WORLD.yaml", help="What is simulated (docs/simulate.md).")],
    seed: Annotated[int, typer.Option(help="Of chance: same world, same seed, same report.")] = 0,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="One field of the world; may be repeated."),
    ] = None,
    slo: Annotated[
        str, typer.Option(metavar="50ms|p99=50ms", help="Of classes that have no slo_ms; the percentile is for all.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as CSV.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="And as a page.")] = None,
) -> None:
    """Run the gateway's own code and the runtime's own schedulers on a simulated clock, over measured times.

    Exit codes: 0 simulated (an SLO held), 1 an SLO was not held, 2 usage, or a world that cannot be.
    """
    from gateway.cli.tuning.files import Files
    from gateway.cli.tuning.options import slo_of
    from gateway.tuning import rendering
    from gateway.tuning.simulation.run import simulate as simulated
    from gateway.tuning.simulation.world import WorldError
    from gateway.tuning.slo import PERCENT, verdicts

    files = Files(csv=csv, html=html)
    files.check()
    wanted = slo_of(slo)
    try:
        made = _world(world, changes or (), slo_ms=wanted.ms if wanted else 0.0)
    except WorldError as error:
        raise Failure(str(error), EXIT_USAGE) from error
    logging.getLogger("gateway").addHandler(logging.NullHandler())  # breakers that open are what was asked for
    with _shown(made, is_quiet=as_json) as on_progress:
        report = simulated(made, seed=seed, on_progress=on_progress)
    judged = verdicts(report, percent=wanted.percent if wanted else PERCENT)
    try:
        if as_json:
            show_json(report.as_json())
        else:
            show(rendering.table(report))
            for one in judged:
                say(str(one))
    finally:  # as with `load`: a full disk costs the file alone
        files.write([report])
    raise typer.Exit(0 if all(one.is_held for one in judged) else EXIT_REFUSED)


def _world(path: Path, changes: Sequence[str], *, slo_ms: float) -> "World":
    from gateway.settings.yaml_text import YamlFault, read_yaml
    from gateway.tuning.simulation.world import (
        WorldError,
        changed,
        load_document,
        parse_world,
    )

    document: dict[str, Any] = load_document(path)
    for one in changes:
        field, is_there, value = one.partition("=")
        if not is_there or not field:
            raise WorldError(f"--set {one}: must be FIELD=VALUE, such as backends.triton.replicas=4")
        try:
            document = changed(document, field, read_yaml(value))
        except YamlFault as error:
            raise WorldError(f"--set {field}: the value is {error}") from error
    world = parse_world(document, folder=path.parent)
    traffic = [
        one if one.traffic.slo_ms else replace(one, traffic=replace(one.traffic, slo_ms=slo_ms))
        for one in world.traffic
    ]
    return replace(world, traffic=tuple(traffic))


@contextmanager
def _shown(world: "World", *, is_quiet: bool) -> Iterator[Callable[[float], object] | None]:
    """How far the simulated time is, on stderr: a bar where somebody sees it, else lines."""
    console = Console(stderr=True)
    if is_quiet:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("simulated", total=world.duration_s)
        lines = Lines()

        def on_progress(at_s: float) -> None:
            shown_s = min(at_s, world.duration_s)
            words = f"{shown_s:.1f} of {world.duration_s:g} s"
            progress.update(bar, completed=shown_s, description=words)
            if not console.is_terminal:
                lines.tell(f"simulated: {words}")

        yield on_progress
