"""`gateway up` and `gateway down`, without their command lines: every refusal is one line, a `StackError`."""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from gateway.stack import leftovers, parts, state, welcome
from gateway.stack.display import Display
from gateway.stack.parts import Part, Plan
from gateway.stack.ports import HOST, BadPortError, Ports, default_ports, free_ports, taken
from gateway.stack.process import PartFailedError, last_lines
from gateway.stack.state import AlreadyRunningError, RunDir
from gateway.stack.supervisor import SUPERVISOR, Stops, Supervisor, signals

ROOT = Path(__file__).resolve().parents[2]
NO_CHECKOUT = (
    "The embedded stack needs the project's checkout, with its models and `make setup`; this is the installed package. "
    "Start `gateway serve` and `gateway admin` with --config FILE, or `make up` in a checkout."
)
LEFTOVER_GRACE_S = 8.0
DOWN_WITHIN_S = 60.0
_POLL_S = 0.1


class StackError(Exception):
    """Why the stack cannot start or stop: one line for a person, then details (the end of a log)."""

    def __init__(self, line: str, details: Iterable[str] = ()) -> None:
        super().__init__(line)
        self.details = tuple(details)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `gateway up` was asked for."""

    run: RunDir
    config: Path
    auto_ports: bool = False
    workers: int = 1
    without: frozenset[str] = frozenset()
    environ: Mapping[str, str] = field(repr=False)


def up(options: Options, console: Console, *, tell: bool) -> None:
    """Run the stack in this process until a signal ends it. `tell` prints the key and the calls to try."""
    if not is_checkout(ROOT):
        raise StackError(NO_CHECKOUT)
    run = options.run
    run.create()
    try:
        with state.lock(run):
            sweep(run, console)
            _run(_plan(options), console, tell=tell)
    except AlreadyRunningError:
        raise StackError(_already(run)) from None
    except BadPortError as error:
        raise StackError(str(error)) from None


def is_checkout(root: Path) -> bool:
    """Whether the project's own folders are in `root`, rather than other installed packages."""
    return (root / "triton_models").is_dir()


def sweep(run: RunDir, console: Console) -> int:
    """End what a killed supervisor of this run directory left; says how many processes that were."""
    left = state.read_pids(run)
    count = leftovers.end(left, grace_s=LEFTOVER_GRACE_S) if left is not None else 0
    if count:
        console.print(f"Ended {count} processes that an earlier run had left behind.")
    run.stack.unlink(missing_ok=True)
    run.pids.unlink(missing_ok=True)
    return count


def _already(run: RunDir) -> str:
    return f"A stack already runs here ({run.path}): stop it with {welcome.how_to_stop(run)} first."


def _plan(options: Options) -> Plan:
    config = options.config if options.config.exists() else ROOT / options.config
    if not config.is_file():
        raise StackError(f"There is no configuration file {options.config}: name one with --config.")
    path = options.run.path.resolve()
    return Plan(
        root=ROOT,
        run=RunDir(path),
        run_id=secrets.token_hex(6),
        config=config.resolve(),
        ports=free_ports() if options.auto_ports else default_ports(options.environ),
        environ=options.environ,
        key=state.secret(path / "dev-key", "gw-dev-"),
        admin_token=state.secret(path / "admin-token", "gw-admin-"),
        workers=options.workers,
        without=options.without,
    )


def _run(plan: Plan, console: Console, *, tell: bool) -> None:
    found = parts.find(plan)
    fatal = [one.reason for one in found.missing if one.fatal]
    if fatal:
        raise StackError(fatal[0], fatal[1:])
    for one in found.missing:
        console.print(one.reason, soft_wrap=True)
    check_ports(found.parts)
    addresses = stack_addresses(plan, found)

    def on_ready() -> None:
        if tell:
            console.print("The stack is ready. Ctrl-C stops it.")
            for line in welcome.lines(addresses, plan.run):
                console.print(line, soft_wrap=True, markup=False, highlight=False)

    supervisor = Supervisor(
        parts=found.parts,
        run=plan.run,
        run_id=plan.run_id,
        addresses=addresses,
        display=Display(found.parts, console),
        on_ready=on_ready,
    )
    try:
        asyncio.run(_supervise(supervisor))
    except PartFailedError as failed:
        log = plan.run.log(failed.part.name)
        details = (f"The end of {log}:", *(f"  {line}" for line in last_lines(log)))
        raise StackError(f"{failed}.", details) from None


async def _supervise(supervisor: Supervisor) -> None:
    stops = Stops()
    with signals(stops):
        await supervisor.run(stops)


def check_ports(wanted: Iterable[Part]) -> None:
    """Raise the line for the first port that somebody else listens on."""
    hit = taken((part.title, port) for part in wanted for port in part.ports)
    if hit is not None:
        title, port = hit
        raise StackError(
            f"Port {port} ({title}) is in use by another program: stop that program, "
            'or let the stack pick free ports with `make up ARGS="--ports auto"`.'
        )


def stack_addresses(plan: Plan, found: parts.Found) -> dict[str, Any]:
    """The content of `stack.json`, without the pids."""
    ports: Ports = plan.ports
    has_triton = found.has("triton")
    return {
        "data_url": f"http://{HOST}:{ports.data}",
        "admin_url": f"http://{HOST}:{ports.admin}",
        "ops_url": f"http://{HOST}:{ports.ops}",
        "key": plan.key,
        "admin_token": plan.admin_token,
        "triton_grpc": parts.triton_address(ports) if has_triton else None,
        "triton_http": f"http://{HOST}:{ports.triton_http}" if has_triton else None,
        "redis_url": parts.redis_url(ports),
        "llm_url": parts.llm_url(ports) if found.has("llm") else None,
    }


def up_detached(run: RunDir, command: list[str], console: Console) -> None:
    """Start `command` (a supervisor) in the background and return once its stack is ready.

    Its output goes to `logs/supervisor.log` and is shown here meanwhile. Ctrl-C here stops it again.
    """
    if not is_checkout(ROOT):
        raise StackError(NO_CHECKOUT)
    run.create()
    if state.is_running(run):
        raise StackError(_already(run))
    log = run.log(SUPERVISOR)
    with log.open("wb") as output:
        child = subprocess.Popen(  # noqa: S603 - this program itself
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    with log.open(encoding="utf-8", errors="replace") as shown:
        try:
            while (stack := _stack_of(run, child.pid)) is None:
                ended = child.poll() is not None
                console.print(shown.read(), end="", soft_wrap=True, markup=False, highlight=False)
                if ended:
                    raise StackError(f"The stack did not start; its log is {log}.")
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            child.terminate()
            child.wait()
            raise
        console.print(shown.read(), end="", soft_wrap=True, markup=False, highlight=False)
    console.print("The stack is ready.")
    for line in welcome.lines(stack, run):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(f"It runs in the background: {welcome.how_to_stop(run)} stops it.")


def _stack_of(run: RunDir, supervisor: int) -> dict[str, Any] | None:
    stack = state.read_json(run.stack)
    return stack if stack is not None and stack.get("pids", {}).get(SUPERVISOR) == supervisor else None


def down(run: RunDir, console: Console) -> None:
    """Stop the stack of this run directory and wait until all of it is gone."""
    if not (run.path / "lock").exists():
        console.print("Nothing runs here.")
        return
    ran = state.is_running(run)
    if ran:
        _stop_supervisor(run)
    with state.lock(run):
        swept = sweep(run, console)
    if ran:
        console.print("The stack is stopped.")
    elif not swept:
        console.print("Nothing runs here.")


def _stop_supervisor(run: RunDir) -> None:
    """Ask, ask again (a second signal ends the parts at once), then end it; the parts are swept after."""
    left = state.read_pids(run)
    one = left.processes.get(SUPERVISOR) if left is not None else None

    def is_gone() -> bool:
        # It lets go of the run directory a moment before its process ends.
        return not state.is_running(run) and (one is None or leftovers.identity(one.pid) != one)

    for number, wait_s in ((signal.SIGTERM, DOWN_WITHIN_S), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        if one is not None and leftovers.identity(one.pid) == one:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, number)
        if _wait_for(is_gone, wait_s if one is not None else 5.0):
            return
    raise StackError(f"The supervisor of {run.path} does not stop: see {run.log(SUPERVISOR)}.")


def _wait_for(condition: Callable[[], bool], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def supervisor_command(options: Options) -> list[str]:
    """The command that runs the same stack in the foreground of another process."""
    command = [sys.executable, "-m", "gateway", "up", "--background"]
    command += ["--run-dir", str(options.run.path), "--config", str(options.config)]
    command += ["--ports", "auto" if options.auto_ports else "default", "--workers", str(options.workers)]
    for name in sorted(options.without):
        command += ["--without", name]
    return command
