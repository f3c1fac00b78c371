"""The console script `gateway`."""

import typer

from gateway.cli import keys, models, rules, serve, stack, usage

app = typer.Typer(
    help="One REST API in front of NVIDIA Triton, an in-process PyTorch runtime and LLM endpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)
for commands in (stack.app, serve.app, usage.app):
    app.registered_commands += commands.registered_commands
app.add_typer(rules.app, name="rules")
app.add_typer(models.app, name="models")
app.add_typer(keys.app, name="keys")


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
