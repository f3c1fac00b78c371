"""`gateway doctor`: what is wrong with how a stack is set up, why, and what to write instead."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress

from gateway.cli.admin_client import (
    EXIT_REFUSED,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    AdminToken,
    AdminUrl,
    Failure,
    Refusal,
    admin_of,
    stack_told,
)
from gateway.cli.doctor_looks import Looker, Places
from gateway.cli.serve import DEFAULT_CONFIG, ConfigOption
from gateway.cli.show import examples, seconds_of, show_json
from gateway.cli.terminal import say
from gateway.core.doctor import examine
from gateway.core.doctor.facts import Facts
from gateway.core.doctor.findings import Finding
from gateway.settings import ConfigError, Settings, load_settings

STEPS: Final = 10  # of the bar, in a second

app = typer.Typer()

# What `gateway advise` has to be told, too.
OpsUrl = Annotated[
    str, typer.Option(envvar="GATEWAY_OPS_URL", help="The gateway's operations listener; default: as `up` left it.")
]
ModelServers = Annotated[
    list[str] | None,
    typer.Option(
        "--server",
        metavar="[BACKEND=]URL",
        help="HTTP of Triton or the local runtime, of this backend or of all; may be repeated.",
    ),
]
Between = Annotated[str, typer.Option("--for", metavar="TIME", help="Between the two looks: 10s, 1m.")]


@app.command(
    epilog=examples(
        "gateway doctor",
        "gateway doctor --for 30s --slo p99=250ms",
        "gateway doctor --ops-url http://10.0.0.4:8081 --server http://10.0.0.7:8000 "
        "--metrics-url http://10.0.0.7:8002 --json",
    )
)
def doctor(  # noqa: PLR0917 - Typer declares options as parameters
    config: ConfigOption = DEFAULT_CONFIG,
    ops_url: OpsUrl = "",
    servers: ModelServers = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metrics-url", metavar="URL", help="Triton's metrics page, for GPU memory; may be repeated."),
    ] = None,
    duration: Between = "10s",
    slo: Annotated[
        str, typer.Option(metavar="250ms|p99=250ms", help="What p99 is to be; default: each task's attempt_timeout_ms.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Look at the stack twice, and tell each symptom with its cause, its numbers and what to write instead.

    Exit codes: 0 nothing is wrong, 1 findings, 2 usage, 3 the control plane does not answer, or refuses.
    """
    from gateway.cli.tuning.options import slo_of

    wanted = slo_of(slo, percentiles=("p99",))
    span_s = seconds_of(duration, "--for")
    if not 1 <= span_s <= 3600:  # noqa: PLR2004 - what `/overview` keeps
        raise Failure("--for: between 1s and 1h", EXIT_USAGE)
    admin = admin_of(admin_url, admin_token)
    places = _places(admin.url, ops_url=ops_url, servers=servers or (), metrics=metrics or ())
    facts = _seen(
        Looker(admin, settings_of(config), places), span_s=span_s, target_p99_ms=wanted.ms if wanted else None
    )
    found = examine(facts)
    if as_json:
        told = {"window_s": round(facts.window_s, 3), "findings": [asdict(one) for one in found]}
        show_json({**told, "unseen": list(facts.unseen)})
    else:
        _tell(found, facts)
    raise typer.Exit(EXIT_REFUSED if found else 0)


def _places(admin_url: str, *, ops_url: str, servers: Sequence[str], metrics: Sequence[str]) -> Places:
    """What is not given is as `gateway up` left it, if it left this control plane: another stack's is not ours."""
    told = stack_told()
    stack = told if told.get("admin_url") == admin_url else {}
    found = [str(stack["triton_http"])] if stack.get("triton_http") else ()
    return Places(ops_url=ops_url or str(stack.get("ops_url", "")), servers=servers or found, metrics=metrics)


def _seen(looker: Looker, *, span_s: int, target_p99_ms: float | None) -> Facts:
    """Two looks, and what they say together."""
    try:
        before = looker.look(span_s)
        wait(span_s)
        return looker.facts(before, looker.look(span_s), target_p99_ms=target_p99_ms)
    except Refusal as refusal:
        # Status 1 means findings here, and nothing else.
        code = EXIT_UNREACHABLE if refusal.exit_code == EXIT_REFUSED else refusal.exit_code
        raise Failure(refusal.line, code) from refusal


def settings_of(path: Path) -> Settings:
    """The configuration in that file. Raises `Failure`."""
    try:
        return load_settings(path)
    except ConfigError as error:
        raise Failure(str(error), EXIT_USAGE) from error


def wait(span_s: int) -> None:
    """The time between the looks, with a bar on stderr where somebody sees it."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("looking", total=span_s * STEPS)
        for _ in range(span_s * STEPS):
            time.sleep(1 / STEPS)
            progress.advance(bar)


def _tell(found: Sequence[Finding], facts: Facts) -> None:
    for one in found:
        say(f"{one.severity}: {one.symptom}: {one.subject}")
        say(f"  seen:   {one.seen}")
        say(f"  cause:  {one.cause}")
        say(f"  change: {one.change}")
        if one.lines:
            say(f"  write{f' in {one.where}' if one.where else ''}:")
        for line in one.lines:
            say(f"    {line}")
    for line in facts.unseen:
        say(f"not seen: {line}")
    models = len(facts.setups)
    of = f"{models} configuration{'' if models == 1 else 's'}, {len(facts.traffic)} under load, {facts.window_s:.0f} s"
    say(f"{len(found)} finding{'' if len(found) == 1 else 's'}" + f" ({of})")
