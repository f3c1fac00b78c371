"""`gateway up` and `gateway down`: the embedded stack on one machine."""

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from gateway.stack import launch
from gateway.stack.state import RunDir

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)

_INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


class PortChoice(Enum):
    """Which ports the stack listens on."""

    DEFAULT = "default"
    AUTO = "auto"


class Optional(Enum):
    """The parts that can be left out."""

    TRITON = "triton"
    LLM = "llm"


RunDirOption = Annotated[
    Path, typer.Option("--run-dir", metavar="DIR", help="Where keys, logs and the state of the stack lie.")
]


@app.command()
def up(
    run_dir: RunDirOption = Path(".run"),
    config: Annotated[Path, typer.Option(metavar="FILE", help="The gateway's configuration.")] = Path(
        "deploy/gateway.yaml"
    ),
    ports: Annotated[
        PortChoice, typer.Option(help="The documented ports, or free ones that the system picks.")
    ] = PortChoice.DEFAULT,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Worker processes of the data plane.")] = 1,
    without: Annotated[
        list[Optional] | None, typer.Option(help="Leave a part out; may be given more than once.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when it is ready.")] = False,
    background: Annotated[bool, typer.Option("--background", hidden=True)] = False,
) -> None:
    """Start the whole stack: Redis, Triton, an LLM server, the data plane and the control plane.

    Waits until all of it is ready, then prints its addresses, a development key and three calls to try.
    Ctrl-C stops everything. What dies meanwhile is started again. DIR/stack.json tells programs where it is.

    Try:

        gateway up

        gateway up --detach && gateway down

        gateway up --ports auto --run-dir /tmp/second --without triton
    """
    options = launch.Options(
        run=RunDir(run_dir),
        config=config,
        auto_ports=ports is PortChoice.AUTO,
        workers=workers,
        without=frozenset(part.value for part in without or ()),
        environ=dict(os.environ),
    )
    console = Console()
    try:
        if detach:
            launch.up_detached(options.run, launch.supervisor_command(options), console)
        else:
            launch.up(options, console, tell=not background)
    except (launch.StackError, OSError) as error:
        _fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None


@app.command()
def down(run_dir: RunDirOption = Path(".run")) -> None:
    """Stop the stack that runs here, and end what a killed one left behind.

    Try:

        gateway down

        gateway down --run-dir /tmp/second
    """
    try:
        launch.down(RunDir(run_dir), Console())
    except (launch.StackError, OSError) as error:
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    """One line, and the end of a log where that is why; never a traceback."""
    console = Console(stderr=True)
    console.print(str(error), style="bold red", soft_wrap=True, markup=False, highlight=False)
    for line in getattr(error, "details", ()):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    raise typer.Exit(1) from None
