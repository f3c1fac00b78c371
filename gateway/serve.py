"""`gateway serve`: one parent that holds the socket and watches its workers, and one process for each worker.

The parent also answers the operations listener (`/metrics` over all workers, `/healthz/*`). With several workers
it starts the local runtime once, as a process of its own, so that batches are never split between workers.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest, multiprocess
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.settings import LOCAL_SOCKET_ENV, METRICS_DIR_ENV, ConfigError, LocalSettings, Settings
from gateway.telemetry.logs import configure_logging
from gateway.wiring import control_plane, data_plane

EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: starting again would not help
RESTART_PAUSE_S = 0.5
KILL_AFTER_S = 5.0  # beyond the drain time, before a worker is killed
RUNTIME_START_S = 120.0  # loading large models from a slow disk takes long; more than this is a fault
BACKLOG = 2048

_log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn, stopped by an event of ours instead of by signals of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Uvicorn would raise the signal again at its end, before we have let go of what we hold."""
        yield


async def serve_app(
    app: FastAPI | Starlette, sockets: list[socket.socket], stop: asyncio.Event, *, drain_s: float
) -> None:
    """Serve until `stop`, then finish what is in flight for at most `drain_s`."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        timeout_keep_alive=75,  # longer than the 60 s of common load balancers, so that they close first
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = Server(config)
    serving = asyncio.create_task(server.serve(sockets=sockets))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        stopping.cancel()
        await serving


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigError` with one clear line."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG, family=_family(host))
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


# --- a worker -----------------------------------------------------------------------------------


async def work(settings: Settings, listener_fd: int) -> None:
    """Serve the data plane on the parent's socket until a signal, or until the parent is gone."""
    configure_logging()
    stop = stop_on_signals()
    # The parent holds the other end of our standard input: its end means that the parent died.
    asyncio.get_running_loop().add_reader(0, stop.set)
    listener = socket.socket(fileno=listener_fd)
    async with data_plane(settings, CollectorRegistry()) as app:
        await serve_app(app, [listener], stop, drain_s=settings.server.drain_timeout_s)


async def admin(settings: Settings) -> None:
    """Serve the control plane until a signal."""
    configure_logging()
    stop = stop_on_signals()
    async with control_plane(settings) as app:
        listener = bind(settings.server.admin_host, settings.server.admin_port)
        address = f"{settings.server.admin_host}:{settings.server.admin_port}"
        _log.info("serving the control plane", extra={"address": address})
        await serve_app(app, [listener], stop, drain_s=settings.server.drain_timeout_s)


# --- the parent ---------------------------------------------------------------------------------


async def serve(config: Path, settings: Settings) -> int:
    """Run workers and the operations listener until a signal; the exit status is the process's."""
    configure_logging()
    stop = stop_on_signals()
    server = settings.server
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(bind(server.host, server.port))
        ops_listener = bind(server.ops_host, server.ops_port)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-")))
        # Torch's threads must not spin while they wait: they would take the cores from everything else.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, METRICS_DIR_ENV: str(folder)}
        if server.workers > 1:
            environment |= await stack.enter_async_context(_shared_runtime(settings, folder, environment, stop))
        command = (sys.executable, "-m", "gateway", "worker", "--config", str(config), "--fd", str(listener.fileno()))
        workers = [
            Child(name="worker", command=command, environment=environment, fds=(listener.fileno(),), metrics=folder)
            for _ in range(server.workers)
        ]
        _log.info(
            "serving",
            extra={
                "address": f"{server.host}:{server.port}",
                "operations": f"{server.ops_host}:{server.ops_port}",
                "workers": server.workers,
            },
        )
        ops = serve_app(operations(settings, folder), [ops_listener], stop, drain_s=1)
        drain_s = server.drain_timeout_s + KILL_AFTER_S
        serving = asyncio.create_task(ops)
        statuses = await asyncio.gather(*(worker.run(stop, drain_s=drain_s) for worker in workers))
        await serving
    return max(statuses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process of ours, started again when it dies. `metrics`: where it writes the metrics that are summed."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    metrics: Path
    fds: tuple[int, ...] = ()

    async def run(self, stop: asyncio.Event, *, drain_s: float) -> int:
        """Keep one process alive until `stop`; a configuration that cannot be served stops everything."""
        while True:
            process = await asyncio.create_subprocess_exec(
                *self.command, env=dict(self.environment), pass_fds=self.fds, stdin=asyncio.subprocess.PIPE
            )
            is_stopped = await _ended_or(stop, process)
            if is_stopped:
                await _end(process, drain_s=drain_s)
            multiprocess.mark_process_dead(process.pid, str(self.metrics))  # type: ignore[no-untyped-call]  # untyped
            if is_stopped:
                return 0
            if process.returncode == EXIT_CONFIG:
                stop.set()
                return EXIT_CONFIG
            _log.error(
                "process died; starting another",
                extra={"process_name": self.name, "pid": process.pid, "status": process.returncode},
            )
            await asyncio.sleep(RESTART_PAUSE_S)


async def _ended_or(stop: asyncio.Event, process: asyncio.subprocess.Process) -> bool:
    """Wait for either; whether it was `stop`."""
    waits = {asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())}
    _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in pending:
        wait.cancel()
    return stop.is_set()


async def _end(process: asyncio.subprocess.Process, *, drain_s: float) -> None:
    """SIGTERM, time to drain, then SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(drain_s):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def _shared_runtime(
    settings: Settings, folder: Path, environment: Mapping[str, str], stop: asyncio.Event
) -> AsyncGenerator[Mapping[str, str], None]:
    """The local runtime as one process for all workers, loaded; nothing where no local backend is configured.

    It ends after the workers, so that what they still have in flight is answered.
    """
    local = next((b for b in settings.backends.values() if isinstance(b, LocalSettings) and b.enabled), None)
    if local is None:
        yield {}
        return
    path = folder / "local.sock"
    models = [part for name in local.models or () for part in ("--model", name)]
    command = ("-m", "local_runtime", "serve", "--repository", str(local.repository), "--grpc", f"unix:{path}", *models)
    child = Child(name="local runtime", command=(sys.executable, *command), environment=environment, metrics=folder)
    stop_runtime = asyncio.Event()
    running = asyncio.create_task(child.run(stop_runtime, drain_s=KILL_AFTER_S))
    try:
        async with asyncio.timeout(RUNTIME_START_S):
            while not (path.exists() or stop.is_set() or running.done()):  # noqa: ASYNC110 - another process's doing
                await asyncio.sleep(0.05)
        yield {LOCAL_SOCKET_ENV: f"unix:{path}"}
    except TimeoutError:
        raise ConfigError(f"the local runtime was not ready within {RUNTIME_START_S:g} s") from None
    finally:
        stop_runtime.set()
        await running


def operations(settings: Settings, metrics: Path) -> Starlette:
    """The operations listener's paths."""

    async def metrics_page(_: Request) -> Response:
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry, str(metrics))  # type: ignore[no-untyped-call]  # untyped there
        page = await asyncio.to_thread(generate_latest, registry)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(_: Request) -> Response:
        host = "127.0.0.1" if settings.server.host in ("0.0.0.0", "") else settings.server.host  # noqa: S104 - read only
        try:
            async with httpx.AsyncClient(timeout=1.0, trust_env=False) as client:
                answer = await client.get(f"http://{host}:{settings.server.port}/healthz/ready")
        except httpx.HTTPError:
            return JSONResponse({"status": "not ready"}, status_code=503)
        return Response(answer.content, status_code=answer.status_code, media_type="application/json")

    return Starlette(
        routes=[
            Route("/metrics", metrics_page),
            Route("/healthz/live", live),
            Route("/healthz/ready", ready),
        ]
    )
