"""`gateway plan`: how many replicas, with which batching, hold an SLO at a rate, and what they cost."""

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.show import examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "gateway plan --slo p99=100ms --rate 50000 --model text_encoder --curve curve.json --usd-per-hour 1.2",
        "gateway plan --slo 50ms --rate 2000 --curve curve.json --arrivals bursty --survive 1 --headroom 0",
        "gateway plan --world world.yaml --max-batch-size 8,16,32 --delay-us 0,500 --output planned.yaml",
    )
)
def plan(  # noqa: PLR0917 - Typer declares options as parameters
    slo: Annotated[str, typer.Option(metavar="SLO", help="p99=100ms: so many are answered in time.")] = "",
    rate: Annotated[float, typer.Option(min=0, metavar="N", help="Requests per second.")] = 0.0,
    curve: Annotated[Path | None, typer.Option(metavar="FILE", help="curve.json of a sweep of the model.")] = None,
    config_pbtxt: Annotated[Path | None, typer.Option(metavar="FILE", help="The model's, for the rest.")] = None,
    model: Annotated[str, typer.Option(metavar="NAME", help="Default: the curve's name; the world's only one.")] = "",
    usd_per_hour: Annotated[float | None, typer.Option(min=0, metavar="USD", help="Of one replica.")] = None,
    arrivals: Annotated[str, typer.Option(metavar="poisson|constant|bursty", help="How requests come.")] = "poisson",
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="That each request brings.")] = 1,
    world: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A world of `gateway simulate`, instead of the above.")
    ] = None,
    backend: Annotated[str, typer.Option(metavar="NAME", help="Of the world: whose replicas are planned.")] = "",
    max_batch_size: Annotated[str, typer.Option(metavar="N,...", help="Default: 1,4,8,16,32 as far as measured.")] = "",
    delay_us: Annotated[str, typer.Option(metavar="N,...", help="max_queue_delay_microseconds.")] = "0,500,2000",
    count: Annotated[
        str, typer.Option(metavar="N,...", help="Of instance_group; default: 1, and what the curve's slowdown has.")
    ] = "",
    headroom: Annotated[
        float, typer.Option(min=0, max=100, metavar="SHARE", help="So much more traffic must be held.")
    ] = 0.2,
    survive: Annotated[int, typer.Option(min=0, max=1000, metavar="N", help="The SLO holds with N replicas dead.")] = 0,
    max_replicas: Annotated[
        int, typer.Option(min=1, max=100_000, metavar="N", help="Look no further than so many.")
    ] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="The first of three: each must hold.")] = 0,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The world that was checked, for `simulate`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Find the fewest replicas, and their batching, that hold an SLO, by simulation of the gateway's own code.

    Exit codes: 0 a plan, 1 no setting within the bounds holds the SLO, 2 usage.
    """
    from gateway.cli.tuning.plan_run import Asked, run  # here: the simulator is only for who plans

    run(
        Asked(
            slo=slo,
            rate=rate,
            curve=curve,
            config_pbtxt=config_pbtxt,
            model=model,
            usd_per_hour=usd_per_hour,
            arrivals=arrivals,
            rows=rows,
            world=world,
            backend=backend,
            max_batch_size=max_batch_size,
            delay_us=delay_us,
            count=count,
            headroom=headroom,
            survive=survive,
            max_replicas=max_replicas,
            seed=seed,
            output=output,
            as_json=as_json,
        )
    )
