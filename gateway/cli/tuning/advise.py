"""`gateway advise`: the one setting to change, what it is expected to gain and by what evidence, and the diff."""

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.admin_client import AdminToken, AdminUrl
from gateway.cli.doctor import Between, ModelServers, OpsUrl
from gateway.cli.serve import DEFAULT_CONFIG, ConfigOption
from gateway.cli.show import examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "gateway advise",
        "gateway advise --for 30s --slo p99=250ms",
        "gateway advise --ops-url http://10.0.0.4:8081 --server http://10.0.0.7:8000 --json",
        "gateway advise --sweep out/",
        "gateway advise --sweep out/ --rate 120 --config-pbtxt models/encoder/config.pbtxt",
    )
)
def advise(  # noqa: PLR0917 - Typer declares options as parameters
    config: ConfigOption = DEFAULT_CONFIG,
    ops_url: OpsUrl = "",
    servers: ModelServers = None,
    duration: Between = "10s",
    slo: Annotated[
        str,
        typer.Option(metavar="50ms|p99=50ms", help="A setting that holds it is right; default: the best p99 is."),
    ] = "",
    sweep: Annotated[
        Path | None, typer.Option("--sweep", metavar="DIR", help="Advise from what `gateway sweep` wrote there.")
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0.0, help="With --sweep: at so many requests/s, by its curve, instead of its own load.")
    ] = 0.0,
    config_pbtxt: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --sweep: the file to make the diff of.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the advice as JSON.")] = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Say which setting to change, what it gains and why, and show the diff; it changes nothing itself.

    Looks twice at a running stack and simulates neighbours of each setting, or reads a sweep.
    Exit codes: 0 nothing to change, 1 something to change, 2 usage, 3 the control plane does not answer, or refuses.
    """
    from gateway.cli.tuning.advise_run import Asked, run

    run(
        Asked(
            config=config,
            ops_url=ops_url,
            servers=tuple(servers or ()),
            between=duration,
            slo=slo,
            sweep=sweep,
            rate=rate,
            config_pbtxt=config_pbtxt,
            as_json=as_json,
            admin_url=admin_url,
            admin_token=admin_token,
        )
    )
