"""`gateway models`: the models of all servers; load, unload, deploy and roll back through the control plane."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.cli import models_plan, version_folder
from gateway.cli.admin_client import (
    EXIT_REFUSED,
    EXIT_USAGE,
    Admin,
    AdminToken,
    AdminUrl,
    Failure,
    Json,
    Reason,
    admin_of,
)
from gateway.cli.show import add, examples, show, show_json, table
from gateway.cli.terminal import say
from gateway.cli.version_folder import FolderRefused, Placement

POLL_S = 0.25
BEGIN_S = 60.0  # the control plane asks every server before it begins; to give up sooner would take the folder away
LOAD_S = 610.0  # the control plane gives a load 600 s
ENDED = ("done", "failed", "rolled_back", "interrupted")

app = typer.Typer(
    no_args_is_help=True,
    help="Models: see what every server has, load and unload them, deploy new versions without losing a request.",
    epilog="Exit codes: 0 done on all servers, 1 refused, failed or not on all servers, 2 usage, 3 no control plane.",
)
app.command("plan")(models_plan.plan)

Repositories = Annotated[
    list[Path] | None,
    typer.Option(
        "--repository",
        help="The model repository; once for each where servers do not share one. Default: as the configuration says.",
    ),
]
Backend = Annotated[str | None, typer.Option(help="Only on this backend.")]


@app.command("list", epilog=examples("gateway models list", "gateway models list --json"))
def list_models(
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Show the models of every server, and the state of each version."""
    found = admin_of(admin_url, admin_token).call("GET", "/models")
    if as_json:
        show_json(found)
        return
    shown = table("model", "backend", "server", "versions")
    for model in found["items"]:
        for replica in model["replicas"]:
            states = "\n".join(f"{one['version']} {one['state']}" for one in replica["versions"])
            add(shown, model["model"], model["backend"], replica["replica"], replica["error"] or states)
    show(shown)
    _tell_unreachable(found)


@app.command(epilog=examples("gateway models stats", "gateway models stats text_embedding"))
def stats(
    model: Annotated[str | None, typer.Argument(help="One model; default: all.")] = None,
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Show what the servers count: requests, batches, and the mean times of a request."""
    path = f"/models/{quote(model, safe='')}" if model else "/models"
    found = admin_of(admin_url, admin_token).call("GET", path)
    if as_json:
        show_json(found)
        return
    headings = ("requests", "failed", "mean\nbatch", "queue\nms", "compute\nms")
    shown = table("model", "server", *headings, right=headings)
    for one in found["items"]:
        for figures in one["figures"]:
            compute_us = sum(figures[f"compute_{part}_us"] for part in ("input", "infer", "output"))
            add(
                shown,
                *(f"{one['model']}:{figures['version']}", figures["replica"] or one["backend"]),
                *(str(figures["requests"]), str(figures["failures"]), f"{figures['mean_batch_size']:g}"),
                *(f"{figures['queue_us'] / 1000:.2f}", f"{compute_us / 1000:.2f}"),
            )
    show(shown)
    _tell_unreachable(found)


@app.command(epilog=examples("gateway models load ocr", "gateway models load ocr --config ocr.json"))
def load(
    model: str,
    config: Annotated[Path | None, typer.Option(help="A configuration (JSON) instead of the model's own.")] = None,
    backend: Backend = None,
    reason: Reason = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Load a model, or load it anew, on every server."""
    try:
        text = None if config is None else config.read_text(encoding="utf-8")
        json.loads("{}" if text is None else text)
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{config}: cannot be read", EXIT_USAGE) from error
    except ValueError as error:  # servers say of a config.pbtxt only that they failed
        raise Failure(f"{config}: is not JSON; `/v2/models/{model}/config` has the model's own", EXIT_USAGE) from error
    body = {"backend": backend, "config": text}
    _control(admin_of(admin_url, admin_token), model, "load", body, reason=reason, as_json=as_json)


@app.command(epilog=examples("gateway models unload ocr"))
def unload(
    model: str,
    dependents: Annotated[bool, typer.Option("--dependents", help="The models of an ensemble too.")] = False,
    backend: Backend = None,
    reason: Reason = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Unload a model on every server; its requests are then refused, or go to the fallback."""
    body = {"backend": backend, "unload_dependents": dependents}
    _control(admin_of(admin_url, admin_token), model, "unload", body, reason=reason, as_json=as_json)


@app.command(
    epilog=examples("gateway models deploy ocr ./build/ocr-7", "gateway models deploy ocr --version 7 --canary 5")
)
def deploy(  # noqa: PLR0917 - Typer declares options as parameters
    model: str,
    version_dir: Annotated[
        Path | None, typer.Argument(help="The files of the new version; none if they are in the repository already.")
    ] = None,
    version: Annotated[str | None, typer.Option(help="Its number; default: the folder's own, or the next one.")] = None,
    canary: Annotated[int, typer.Option(min=1, max=100, help="The first share of the callers, in percent.")] = 10,
    hold_s: Annotated[float, typer.Option(min=0, help="How long each share is held and watched, in seconds.")] = 10.0,
    max_error_ratio: Annotated[float, typer.Option(min=0, max=1, help="More failures than that: roll back.")] = 0.02,
    repository: Repositories = None,
    backend: Backend = None,
    reason: Reason = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Put a new version beside the old one, move the callers to it step by step, retire the old one."""
    if version_dir is None and version is None:
        raise Failure("give the folder of the new version, or --version of one in the repository", EXIT_USAGE)
    admin = admin_of(admin_url, admin_token)
    folders = _repositories(admin, repository, model=model, backend=backend, needed=version_dir is not None)
    placement = None if version_dir is None else _place(version_dir, folders, model=model, version=version)
    number = version if placement is None else placement.version
    body = {
        "version": number,
        "backend": backend,
        "canary": canary,
        "hold_s": hold_s,
        "max_error_ratio": max_error_ratio,
    }
    try:
        begun = admin.call("POST", f"{_path(model)}/deploy", body=body, reason=reason, timeout_s=BEGIN_S)
    except Failure:
        if placement is not None:
            version_folder.remove(placement)
        raise
    _see_through(admin, begun, folders, as_json=as_json)


@app.command(epilog=examples("gateway models rollback ocr"))
def rollback(
    model: str,
    repository: Repositories = None,
    reason: Reason = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Undo the last deploy of a model, whether it is under way, was interrupted or is done."""
    admin = admin_of(admin_url, admin_token)
    folders = _repositories(admin, repository, model=model, backend=None, needed=False)
    last = _last(admin, model)
    if last["status"] == "done":
        version_folder.bring_back(folders, model=model, version=last["old"])
    begun = admin.call("POST", f"{_path(model)}/rollback", reason=reason)
    _see_through(admin, begun, folders, as_json=as_json, is_wanted=True)


@app.command("continue", epilog=examples("gateway models continue ocr"))
def go_on(
    model: str,
    repository: Repositories = None,
    reason: Reason = "",
    as_json: Json = False,
    admin_url: AdminUrl = "",
    admin_token: AdminToken = "",
) -> None:
    """Go on with a deploy that the end of its control plane interrupted."""
    admin = admin_of(admin_url, admin_token)
    folders = _repositories(admin, repository, model=model, backend=None, needed=False)
    begun = admin.call("POST", f"/deploys/{_last(admin, model)['id']}/continue", reason=reason)
    _see_through(admin, begun, folders, as_json=as_json)


@app.command(epilog=examples("gateway models deploys"))
def deploys(as_json: Json = False, admin_url: AdminUrl = "", admin_token: AdminToken = "") -> None:
    """Show the deploys that are known, the newest first."""
    found = admin_of(admin_url, admin_token).call("GET", "/deploys")
    if as_json:
        show_json(found)
        return
    if not found["items"]:
        say("no deploy is known")
        return
    shown = table("deploy", "model", "from", "to", "state", "callers", "reason", right=("from", "to", "callers"))
    for one in found["items"]:
        state = one["status"] if one["status"] in ENDED else f"{one['status']}: {one['step']}"
        add(shown, one["id"], one["model"], one["old"], one["new"], state, f"{one['weight']} %", one["reason"])
    show(shown)


def _last(admin: Admin, model: str) -> Mapping[str, Any]:
    """The last deploy of a model."""
    known: list[Mapping[str, Any]] = admin.call("GET", "/deploys")["items"]
    for one in known:
        if one["model"] == model:
            return one
    raise Failure(f"no deploy of '{model}' is known", EXIT_REFUSED)


def _control(admin: Admin, model: str, action: str, body: Mapping[str, object], *, reason: str, as_json: bool) -> None:
    done = admin.call("POST", f"{_path(model)}/{action}", body=body, reason=reason, timeout_s=LOAD_S)
    if as_json:
        show_json(done)
    for one in () if as_json else done["outcomes"]:
        where = f"{one['backend']} {one['replica']}".strip()
        say(f"{where}: {'done' if one['ok'] else one['error']}", err=not one["ok"])
    if done["applied"]["replicas"] < done["applied"]["of"]:
        raise Failure(f"on only {done['applied']['replicas']} of {done['applied']['of']} servers", EXIT_REFUSED)


def _repositories(
    admin: Admin, given: Sequence[Path] | None, *, model: str, backend: str | None, needed: bool
) -> list[Path]:
    """Where the model's files are: as given, else as the configuration of its backends says."""
    if given:
        return list(given)
    configured = [
        Path(one["repository"])
        for one in admin.call("GET", "/backends")["items"]
        if one["repository"] and backend in (None, one["backend"])
    ]
    found = list(dict.fromkeys(path for path in configured if (path / model).is_dir()))
    if not found and needed:
        where = ", ".join(map(str, configured)) or "the configuration names none"
        raise Failure(f"no repository with the model '{model}' here ({where}): give --repository", EXIT_USAGE)
    return found


def _place(source: Path, repositories: Sequence[Path], *, model: str, version: str | None) -> Placement:
    """Put the folder into every repository."""
    try:
        placement = version_folder.plan(source, repositories, model=model, version=version)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(f"{model}: version {placement.version}", total=placement.total_bytes)
            version_folder.place(placement, lambda size: progress.advance(task, size))
    except FolderRefused as error:
        raise Failure(str(error), EXIT_USAGE) from error
    return placement


def _see_through(
    admin: Admin,
    begun: Mapping[str, Any],
    repositories: Sequence[Path],
    *,
    as_json: bool,
    is_wanted: bool = False,
) -> None:
    """Show a deploy until it ends, and end as it does; `is_wanted` means that going back is what was asked for."""
    try:
        ended = _watch(admin, begun)
    except KeyboardInterrupt:
        raise Failure(
            f"deploy {begun['id']} goes on; `gateway models rollback {begun['model']}` undoes it", EXIT_REFUSED
        ) from None
    if as_json:
        show_json(ended)
    for note in ended["notes"]:
        say(f"note: {note}", err=True)
    is_done = ended["status"] == "done"
    serving, other = (ended["new"], ended["old"]) if is_done else (ended["old"], ended["new"])
    has_gone_back = not is_done or int(serving) < int(other)
    if has_gone_back and not ended["rules"] and ended["status"] in ("done", "failed", "rolled_back"):
        # A server that starts would take the higher number.
        for path in version_folder.set_aside(repositories, model=ended["model"], version=other):
            say(f"version {other} is now {path}", err=True)
    if is_done or (is_wanted and ended["status"] == "rolled_back"):
        if not as_json:
            say(f"{ended['model']}: version {serving} serves, {other} is retired")
        _advise(ended, serving, repositories)
        return
    status = ended["status"].replace("_", " ")
    raise Failure(f"{ended['model']}: deploy {ended['id']}: {status}: {ended['reason']}", EXIT_REFUSED)


def _advise(ended: Mapping[str, Any], serving: str, repositories: Sequence[Path]) -> None:
    before = {*ended["served"], ended["new"]} - {ended["old"], ended["new"]}
    served = sorted({*before, serving}, key=int)
    if not repositories:
        say(f"note: a restart of the server must serve {', '.join(served)}: see its version_policy", err=True)
    for repository in repositories:
        if text := version_folder.advice(repository / ended["model"], served):
            say(f"note: {text}", err=True)


def _watch(admin: Admin, begun: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow a deploy to its end; on a terminal with a bar, else with one line for each change."""
    console = Console(stderr=True)
    before = _requests(admin, begun["model"])
    columns = (_column("{task.description}"), BarColumn(), _column("{task.fields[told]}"), TimeElapsedColumn())
    deploy, last = begun, ""
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(begun["model"], total=100, told="")
        while True:
            line = f"{'undo' if deploy['undo'] else deploy['step']}, {deploy['weight']} % of the callers"
            if line != last and not console.is_terminal:
                say(f"{deploy['model']}: {line}", err=True)
            last = line
            shares = _shares(before, _requests(admin, deploy["model"]), (deploy["old"], deploy["new"]))
            progress.update(task, completed=deploy["weight"], description=f"{deploy['model']}: {line}", told=shares)
            if deploy["status"] in ENDED:
                return deploy
            time.sleep(POLL_S)
            deploy = admin.call("GET", f"/deploys/{begun['id']}")


def _column(shown: str) -> TextColumn:
    return TextColumn(shown, markup=False)


def _requests(admin: Admin, model: str) -> dict[str, int]:
    """How many requests each version has answered, on all servers."""
    counts: dict[str, int] = {}
    for one in admin.call("GET", _path(model))["items"]:
        for figures in one["figures"]:
            counts[figures["version"]] = counts.get(figures["version"], 0) + figures["requests"]
    return counts


def _shares(before: Mapping[str, int], now: Mapping[str, int], versions: Sequence[str]) -> str:
    """The requests that each version has answered meanwhile."""
    since = {version: max(0, now.get(version, 0) - before.get(version, 0)) for version in versions}
    return "  ".join(f"version {version}: {count}" for version, count in since.items())


def _path(model: str) -> str:
    return f"/models/{quote(model, safe='')}"


def _tell_unreachable(found: Mapping[str, Any]) -> None:
    for one in found["unreachable"]:
        say(f"{one['backend']}: {one['reason']}", err=True)
