"""`gateway serve`: one parent that holds the socket and watches its workers, and one process for each worker.

The parent also answers the operations listener (`/metrics` over all workers, `/healthz/*`). With several workers
it starts the local runtime once, as a process of its own, so that batches are never split between workers.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.http.asgi import Asgi
from gateway.http.server import bind, serve_app
from gateway.settings import EXIT_CONFIG, LOCAL_SOCKET_ENV, METRICS_DIR_ENV, ConfigError, LocalSettings, Settings
from gateway.stopping import stop_on_signals
from gateway.telemetry.logs import configure_logging
from gateway.telemetry.page import Page

RESTART_PAUSE_S = 0.5
MAX_RESTART_PAUSE_S = 8.0
KILL_AFTER_S = 5.0  # beyond the drain time, before a worker is killed
RUNTIME_START_S = 120.0  # loading large models from a slow disk takes long; more than this is a fault
READINESS_S = 1.0  # until a worker has said whether it is ready
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not bound: any address stands for loopback

_log = logging.getLogger(__name__)


async def serve(config: Path, settings: Settings) -> int:
    """Run workers and the operations listener until a signal; the exit status is the process's."""
    configure_logging()
    stop, ended = stop_on_signals(), asyncio.Event()
    server = settings.server
    with (
        bind(server.host, server.port) as listener,
        bind(server.ops_host, server.ops_port) as ops_listener,
        tempfile.TemporaryDirectory(prefix="gateway-") as folder,
    ):
        metrics = Page(Path(folder))
        # Torch's threads must not spin while they wait: they would take the cores from everything else.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, METRICS_DIR_ENV: folder}
        # From the first moment to the last: a worker that drains is still scraped.
        page = operations(metrics, listener.getsockname(), stop)
        ops = asyncio.create_task(serve_app(Asgi(page), [ops_listener], ended, drain_s=1))
        try:
            async with _shared_runtime(settings, Path(folder), environment, stop) as shared:
                words = (str(config), str(listener.fileno()), str(server.workers))
                worker = Child(
                    name="worker",
                    command=(sys.executable, "-m", "gateway.worker", *words),
                    environment=environment | shared,
                    fds=(listener.fileno(),),
                    metrics=metrics,
                )
                address = {
                    "address": f"{server.host}:{server.port}",
                    "operations": f"{server.ops_host}:{server.ops_port}",
                }
                _log.info("starting workers", extra={**address, "workers": server.workers})
                drain_s = server.drain_timeout_s + KILL_AFTER_S
                running = [worker.run(stop, drain_s=drain_s) for _ in range(server.workers)]
                statuses = await asyncio.gather(*running, _close_on(stop, listener))
        finally:
            ended.set()
            await ops
    return max(statuses)


async def _close_on(stop: asyncio.Event, listener: socket.socket) -> int:
    """No new connection may wait in our own backlog for workers that have stopped accepting."""
    await stop.wait()
    listener.close()
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process of ours, started again when it dies. `metrics`: the page that has its own, if it has any."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    metrics: Page | None = None
    fds: tuple[int, ...] = ()

    async def run(self, stop: asyncio.Event, *, drain_s: float) -> int:
        """Keep one process alive until `stop`; a configuration that cannot be served stops everything."""
        pause_s = RESTART_PAUSE_S
        while not stop.is_set():
            began_s = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *self.command, env=dict(self.environment), pass_fds=self.fds, stdin=asyncio.subprocess.PIPE
            )
            is_stopped = await _ended_or(stop, process)
            if is_stopped:
                await _end(process, drain_s=drain_s)
            await self._add_up(process.pid)
            if is_stopped:
                return 0
            if process.returncode == EXIT_CONFIG:
                stop.set()
                return EXIT_CONFIG
            told = {"process_name": self.name, "pid": process.pid, "status": process.returncode}
            _log.error("process died; starting another", extra=told)
            # One that cannot live is not tried faster and faster.
            is_young = time.monotonic() - began_s < MAX_RESTART_PAUSE_S
            pause_s = min(pause_s * 2, MAX_RESTART_PAUSE_S) if is_young else RESTART_PAUSE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await stop.wait()
        return 0

    async def _add_up(self, pid: int) -> None:
        if self.metrics is None:
            return
        try:
            await asyncio.to_thread(self.metrics.ended, pid)
        except OSError as error:
            _log.warning("metrics of a process that has ended cannot be added up", extra={"reason": str(error)})


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
) -> AsyncGenerator[dict[str, str], None]:
    """The local runtime as one process for several workers, loaded; nothing for one, or without a local backend.

    It ends after the workers, so that what they still have in flight is answered.
    """
    local = next((b for b in settings.backends.values() if isinstance(b, LocalSettings) and b.enabled), None)
    if local is None or settings.server.workers == 1:
        yield {}
        return
    path = folder / "local.sock"
    models = (part for name in local.models or ("*",) for part in ("--load-model", name))
    command = (
        *(sys.executable, "-m", "local_runtime", "serve", "--repository", str(local.repository)),
        *("--model-control-mode", "explicit", *models),  # as in one worker's own: admin keys load and unload on /v2
        *("--http", "none", "--grpc", f"unix:{path}", "--until-stdin-closes"),
    )
    child = Child(name="local runtime", command=command, environment=environment)
    stop_runtime = asyncio.Event()
    running = asyncio.create_task(child.run(stop_runtime, drain_s=KILL_AFTER_S))
    try:
        await _loaded(path, running, stop)
        yield {LOCAL_SOCKET_ENV: f"unix:{path}"}
    finally:
        stop_runtime.set()
        await running


async def _loaded(path: Path, running: asyncio.Task[int], stop: asyncio.Event) -> None:
    """Wait for the runtime's socket, which it opens when its models are loaded."""
    try:
        async with asyncio.timeout(RUNTIME_START_S):
            while not (path.exists() or stop.is_set()):  # noqa: ASYNC240 - one stat of a local path, nothing to await
                if running.done():
                    raise ConfigError("the local runtime cannot serve this repository; its reason is above")
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise ConfigError(f"the local runtime was not ready within {RUNTIME_START_S:g} s") from None


def operations(metrics: Page, address: tuple[str, int], stop: asyncio.Event) -> Starlette:
    """The operations listener's paths. `address` is where the data plane listens."""

    async def page_of_metrics(request: Request) -> Response:
        page, kind = await asyncio.to_thread(metrics.read, request.headers.get("accept", ""))
        return Response(page, headers={"content-type": kind, "vary": "accept"})

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(_: Request) -> Response:
        if stop.is_set():
            return JSONResponse({"status": "draining"}, status_code=503)
        try:
            status, body = await _readiness(*address[:2])
        except (OSError, TimeoutError, ValueError):
            return JSONResponse({"status": "not ready"}, status_code=503)
        return Response(body, status_code=status, media_type="application/json")

    return Starlette(
        routes=[
            Route("/metrics", page_of_metrics),
            Route("/healthz/live", live),
            Route("/healthz/ready", ready),
        ]
    )


async def _readiness(host: str, port: int) -> tuple[int, bytes]:
    """What a worker says of itself, and its status. Raises OSError, TimeoutError, and ValueError where nobody answers.

    By hand: the parent needs no HTTP client else, and one would take a third of its start and of its memory.
    """
    async with asyncio.timeout(READINESS_S):
        reader, writer = await asyncio.open_connection(_LOOPBACK.get(host, host), port)
        try:
            writer.write(b"GET /healthz/ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
    _, status, *_ = head.split(maxsplit=2)
    return int(status), body
