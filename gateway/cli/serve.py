"""`gateway serve`, `admin`, `check` and `schema`: the processes and their configuration."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gateway.cli.terminal import say
from gateway.settings import EXIT_CONFIG, ConfigError, LLMSettings, Settings, load_settings

app = typer.Typer()

ConfigOption = Annotated[
    Path, typer.Option("--config", metavar="FILE", envvar="GATEWAY_CONFIG", help="The gateway's configuration.")
]
DEFAULT_CONFIG = Path("deploy/gateway.yaml")


@app.command()
def serve(
    config: ConfigOption = DEFAULT_CONFIG,
    workers: Annotated[int | None, typer.Option(min=1, max=64, metavar="N", help="Worker processes.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Instead of server.port.")] = None,
) -> None:
    """Run the data plane: the REST API, and /metrics on the operations port.

    Try:

        gateway serve --config deploy/gateway.yaml --workers 2
    """
    settings = _settings(config, workers=workers, port=port)
    # Imported here and below: only the processes that serve pay for their servers and clients.
    from gateway.serve import serve as run

    try:
        status = asyncio.run(run(config, settings))
    except ConfigError as error:
        _refuse(error)
    raise typer.Exit(status)


@app.command()
def admin(config: ConfigOption = DEFAULT_CONFIG) -> None:
    """Run the control plane (/admin/v1).

    Try:

        GATEWAY_ADMIN_TOKEN=... gateway admin --config deploy/gateway.yaml
    """
    settings = _settings(config)
    from gateway.control import admin as run

    try:
        asyncio.run(run(settings))
    except ConfigError as error:
        _refuse(error)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(metavar="FILE|REPOSITORY")] = DEFAULT_CONFIG,
    strict: Annotated[bool, typer.Option("--strict", help="Of a repository: warnings are faults.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Of a repository: findings as JSON.")] = False,
) -> None:
    """Check a configuration or a model repository: every fault with its line, or that all is well and what is off.

    Try:

        gateway check deploy/gateway.yaml

        gateway check triton_models --strict
    """
    if config.is_dir():
        from gateway.cli.check_models import check_repository

        raise typer.Exit(check_repository(config, strict=strict, as_json=as_json))
    settings = _settings(config)
    from gateway.wiring import check as check_tasks

    try:
        check_tasks(settings)
    except ConfigError as error:
        _refuse(error)
    say(f"{config}: good ({len(settings.backends)} backends, {len(settings.tasks)} tasks, {len(settings.rules)} rules)")
    for name, backend in settings.backends.items():
        if not backend.enabled:
            say(f"off: {name} (not enabled)")
        elif isinstance(backend, LLMSettings) and backend.api_key_env and not backend.api_key():
            say(f"off: {name} ({backend.api_key_env} is not set)")
    if clear := settings.in_the_clear():
        say(f"in the clear, to other hosts: {', '.join(clear)} (docs/tls.md)")
    for key in settings.keys:
        if key.digest() is None:
            say(f"off: key {key.id} ({key.key_env} is not set)")


@app.command()
def schema() -> None:
    """Print the configuration's JSON Schema.

    Try:

        gateway schema > gateway.schema.json
    """
    typer.echo(json.dumps(Settings.model_json_schema(), indent=2))


def _settings(config: Path, *, workers: int | None = None, port: int | None = None) -> Settings:
    if config == DEFAULT_CONFIG and not config.exists():
        _refuse(
            ConfigError(f"{config} is not here (it comes with the project's checkout): name a configuration of yours.")
        )
    try:
        settings = load_settings(config)
    except ConfigError as error:
        _refuse(error)
    return settings.with_server(**{k: v for k, v in (("workers", workers), ("port", port)) if v is not None})


def _refuse(error: ConfigError) -> NoReturn:
    say(str(error), err=True)
    raise typer.Exit(EXIT_CONFIG)
