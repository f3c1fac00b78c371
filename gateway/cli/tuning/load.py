"""`gateway load`: offer traffic to a gateway or a model server, and tell what came of it."""

from pathlib import Path
from typing import Annotated, Final

import typer

from gateway.cli.show import examples

_WHAT: Final = "What is asked"
_HOW_MUCH: Final = "How much"
_OUTPUT: Final = "What is told"

app = typer.Typer()


@app.command(
    epilog=examples(
        "gateway load",
        "gateway load --rate 200 --slo p99=100ms --html report.html",
        "gateway load --task image-classification --image cat.jpg --concurrency 16",
        "gateway load --tensor text_encoder --rate 10..500 --rows 4",
        "gateway load --tensor text_encoder --triton 127.0.0.1:18001",
        'gateway load --chat "Say hello." --concurrency 4',
        "gateway load --find --rate 50 --slo p99=100ms",
        "gateway load --traffic mixed.yaml --duration 1m",
    )
)
def load(  # noqa: PLR0917 - Typer declares options as parameters
    url: Annotated[str, typer.Option(help="Of the gateway, or a model server; default: as `up` left it.")] = "",
    triton: Annotated[str, typer.Option(metavar="HOST:PORT", help="Ask Triton straight instead (with --tensor).")] = "",
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
        str, typer.Option(metavar="MODEL", help="A model by its tensors, on /v2 or --triton.", rich_help_panel=_WHAT)
    ] = "",
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT:D,D", help="Of a made-up tensor, without the batch.", rich_help_panel=_WHAT),
    ] = None,
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
    from gateway.cli.tuning.load_plan import Given
    from gateway.cli.tuning.load_run import offer

    given = Given(
        url=url,
        triton=triton,
        key=key,
        task=task,
        input=body,
        image=image,
        tensor=tensor,
        shape=tuple(shape or ()),
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
    offer(given, csv=csv, html=html, as_json=as_json, yes=yes)
