"""The console script `gateway`."""

import functools
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any, Final

import typer
import typer.main
from typer.core import TyperGroup

from gateway import __version__

COMMANDS: Final = {
    "up": "gateway.cli.stack:app",
    "down": "gateway.cli.stack:app",
    "serve": "gateway.cli.serve:app",
    "admin": "gateway.cli.serve:app",
    "check": "gateway.cli.serve:app",
    "schema": "gateway.cli.serve:app",
    "overview": "gateway.cli.overview:app",
    "whoami": "gateway.cli.overview:app",
    "doctor": "gateway.cli.doctor:app",
    "explain": "gateway.cli.explain:app",
    "workers": "gateway.cli.backends:workers_app",
    "usage": "gateway.cli.usage:app",
    "load": "gateway.cli.tuning.load:app",
    "sweep": "gateway.cli.tuning.sweep:app",
    "simulate": "gateway.cli.tuning.simulate:app",
    "plan": "gateway.cli.tuning.plan:app",
    "advise": "gateway.cli.tuning.advise:app",
}
GROUPS: Final = {
    "rules": "gateway.cli.rules.commands:app",
    "switches": "gateway.cli.switches:app",
    "rollouts": "gateway.cli.rollouts:app",
    "shadows": "gateway.cli.shadows:app",
    "backends": "gateway.cli.backends:app",
    "requests": "gateway.cli.requests:app",
    "audit": "gateway.cli.audit:app",
    "models": "gateway.cli.models:app",
    "keys": "gateway.cli.keys:app",
}
"""Where each is: a module, and the application of Typer's that has the command, or is the group."""


class Commands(Mapping[str, Any]):
    """All of them. Each is imported when it is asked for: together they take longer than the start of a server."""

    def __getitem__(self, name: str) -> Any:
        if name in COMMANDS:
            return _group(COMMANDS[name]).commands[name]
        group = _group(GROUPS[name])
        group.name = name
        return group

    def __iter__(self) -> Iterator[str]:
        return iter((*COMMANDS, *GROUPS))

    def __len__(self) -> int:
        return len(COMMANDS) + len(GROUPS)


@functools.cache
def _group(place: str) -> TyperGroup:
    module, _, name = place.partition(":")
    return typer.main.get_group(getattr(import_module(module), name))


class _Gateway(TyperGroup):
    """The command line's first word."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = Commands()  # type: ignore[assignment]  # nothing is added to them


app = typer.Typer(
    cls=_Gateway,
    help="One REST API in front of NVIDIA Triton, an in-process PyTorch runtime and LLM endpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)


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
