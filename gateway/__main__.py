"""The console script `gateway`."""

from typing import Annotated

import typer

from gateway import __version__
from gateway.cli import (
    audit,
    backends,
    doctor,
    explain,
    keys,
    models,
    overview,
    requests,
    rollouts,
    serve,
    shadows,
    stack,
    switches,
    usage,
)
from gateway.cli.rules import commands as rules
from gateway.cli.tuning import advise, load, plan, simulate, sweep

app = typer.Typer(
    help="One REST API in front of NVIDIA Triton, an in-process PyTorch runtime and LLM endpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)
for commands in (
    stack.app,
    serve.app,
    overview.app,
    doctor.app,
    explain.app,
    backends.workers_app,
    usage.app,
    load.app,
    sweep.app,
    simulate.app,
    plan.app,
    advise.app,
):
    app.registered_commands += commands.registered_commands
app.add_typer(rules.app, name="rules")
app.add_typer(switches.app, name="switches")
app.add_typer(rollouts.app, name="rollouts")
app.add_typer(shadows.app, name="shadows")
app.add_typer(backends.app, name="backends")
app.add_typer(requests.app, name="requests")
app.add_typer(audit.app, name="audit")
app.add_typer(models.app, name="models")
app.add_typer(keys.app, name="keys")


def _tell(is_asked: bool) -> None:  # noqa: FBT001 - typer's signature
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


_Version = Annotated[bool, typer.Option("--version", callback=_tell, is_eager=True, help="Print the version and end.")]


@app.callback()
def options(version: _Version = False) -> None:  # noqa: FBT002 - the same
    """Take the options that stand before a command."""


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
