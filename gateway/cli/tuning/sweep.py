"""`gateway sweep`: which batching of a model serves a load best, found by measuring it."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.show import examples

app = typer.Typer()


class Preset(StrEnum):
    """Curves that everybody should have seen once."""

    DELAY_CURVE = "delay-curve"
    MAX_BATCH = "max-batch"


@app.command(
    epilog=examples(
        "gateway sweep --repository triton_models --model text_encoder --shape INPUT__0:32 --shape INPUT__1:32",
        "gateway sweep --triton localhost:8001 --model text_encoder --shape INPUT__0:32 --shape INPUT__1:32 "
        "--concurrency 4,16,64 --slo p99=250ms",
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
    duration: Annotated[str, typer.Option(metavar="TIME", help="Of a long run; short ones last a third.")] = "3s",
    slo: Annotated[
        str, typer.Option(metavar="50ms|p99=50ms", help="Answers within it are good; p99 has to keep it.")
    ] = "",
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
    from gateway.cli.tuning.sweep_run import Given, run  # here: what measures is only for who sweeps

    run(
        Given(
            repository=repository,
            triton=triton,
            model=model,
            shape=tuple(shape or ()),
            max_batch_size=max_batch_size,
            delay_us=delay_us,
            preferred=preferred,
            count=count,
            concurrency=concurrency,
            rate=rate,
            duration=duration,
            slo=slo,
            memory_gb=memory_gb,
            quick=quick,
            brute_force=brute_force,
            preset=preset,
            output=output,
            resume=resume,
            restore=restore,
            as_json=as_json,
        )
    )
