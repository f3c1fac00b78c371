"""Processes that are measured or measure: each pinned to its cores, ready before it is used, ended with the block."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from tests.bench.suite.bench import Bench, Failed
from tests.kit.redis import RedisServer
from tests.kit.serving import children, free_port
from tests.kit.upstream import completion

HOST = "127.0.0.1"
KEY = "bench"
START_S = 90.0
STOP_S = 20.0
ASK_S = 5.0
LAST_LINES = 12
ROOT = Path(__file__).resolve().parents[3]
OTHER_RULES = 19  # that a request is held against before its own
TICKS = os.sysconf("SC_CLK_TCK")
ANSWER_BYTES = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One request that is sent again and again. `pid`: the process whose processor time it is told with."""

    name: str
    url: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running gateway. `start_s`: from its command until it took requests."""

    url: str
    pid: int
    log: Path
    start_s: float


@contextlib.asynccontextmanager
async def process(
    command: Sequence[str],
    *,
    cores: Iterable[int],
    log: Path,
    ready: Callable[[], Awaitable[bool]],
    environ: Mapping[str, str] | None = None,
    pause_s: float = 0.1,
) -> AsyncIterator[int]:
    """A process on these cores from the moment on that `ready()` is true; its pid. Raises `Failed`.

    It gets a group of its own: an interrupt from the keyboard is for us, who end it.
    """
    pinned = ("taskset", "-c", ",".join(map(str, cores)), *command)
    with log.open("ab") as out:
        child = await asyncio.create_subprocess_exec(
            *pinned,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **(environ or {})},
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + START_S
        while not await ready():
            if child.returncode is not None or time.monotonic() > until:
                raise Failed(f"{Path(command[0]).name} did not start:\n{end_of(log)}")
            await asyncio.sleep(pause_s)
        yield child.pid
    finally:
        await _end(child)


async def _end(child: asyncio.subprocess.Process) -> None:
    """As a person would stop it, then for good, with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            await child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()


def end_of(log: Path) -> str:
    """What it said last."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])


async def is_ok(url: str) -> bool:
    """Whether a GET is answered by 200. Asked over a raw socket, every few milliseconds while a start is timed."""
    at = urlsplit(url)
    asked = f"GET {at.path or '/'} HTTP/1.1\r\nhost: {at.netloc}\r\nconnection: close\r\n\r\n"
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(ASK_S):
            reader, writer = await asyncio.open_connection(at.hostname, at.port)
            try:
                writer.write(asked.encode())
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    return False


async def answers(target: Target) -> bool:
    """Whether the request that will be measured is answered by 200."""
    with contextlib.suppress(httpx.HTTPError):
        async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
            answer = await http.post(target.url, content=target.body, headers=dict(target.headers))
            return answer.status_code == httpx.codes.OK
    return False


# --- the gateway -----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def gateway(
    bench: Bench,
    *,
    backends: Mapping[str, Any],
    tasks: Mapping[str, Any],
    rule: Mapping[str, Any],
    workers: int = 1,
    cores: Sequence[int] = (),
    pause_s: float = 0.1,
    also: Mapping[str, Any] = MappingProxyType({}),
) -> AsyncIterator[Served]:
    """`gateway serve` with all that it does on: key, limits and usage in Redis, rules, prices, metrics, access log.

    `rule` is the last of 20. On the row's core where `cores` names no others. `also`: fields of sections, and sections.
    """
    with RedisServer() as redis:  # on the core of this process
        port = free_port()
        config = _config(
            bench.folder, port, redis.url, backends=backends, tasks=tasks, rule=rule, workers=workers, also=also
        )
        url, log = f"http://{HOST}:{port}", config.with_suffix(".log")
        command = (sys.executable, "-m", "gateway", "serve", "--config", str(config))
        began = time.perf_counter()
        async with process(
            command,
            cores=cores or (bench.core,),
            log=log,
            ready=lambda: is_ok(f"{url}/healthz/ready"),
            environ={"BENCH_KEY": KEY, "GATEWAY_ADMIN_TOKEN": "bench-admin"},
            pause_s=pause_s,
        ) as pid:
            yield Served(url=url, pid=pid, log=log, start_s=time.perf_counter() - began)


def _config(
    folder: Path,
    port: int,
    redis: str,
    *,
    backends: Any,
    tasks: Any,
    rule: Mapping[str, Any],
    workers: int,
    also: Mapping[str, Any],
) -> Path:
    others = [{**rule, "name": f"other-{n}", "match": {"tenant": f"tenant-{n}"}} for n in range(OTHER_RULES)]
    document: dict[str, Any] = {
        "server": {"port": port, "ops_port": free_port(), "admin_port": free_port(), "workers": workers},
        "redis": {"url": redis, "prefix": "bench:"},
        "backends": backends,
        "tasks": tasks,
        "rules": [*others, rule],
        "limits": [{"per": "minute", "requests": 10**9}, {"per": "minute", "tokens": 10**9}],
        "keys": [{"id": "bench", "tenant": "bench", "key_env": "BENCH_KEY"}],
        "prices": "prices.yaml",
    }
    for section, fields in also.items():
        known = document.get(section)
        document[section] = {**known, **fields} if isinstance(known, dict) else fields
    (folder / "prices.yaml").write_text("prices:\n  m: {input: 1, output: 2}\n")
    path = folder / f"gateway-{port}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


CHAT = {"general_llm": {"contract": "chat", "timeout_ms": 120_000, "attempt_timeout_ms": 60_000}}
CHAT_RULE = {"name": "chat", "split": [{"backend": "llm", "model": "m"}]}


def chat_gateway(bench: Bench, upstream: str, **options: Any) -> contextlib.AbstractAsyncContextManager[Served]:
    """One whose chats go to the server at `upstream`."""
    backends = {"llm": {"kind": "openai", "base_url": f"{upstream}/v1"}}
    return gateway(bench, backends=backends, tasks=CHAT, rule=CHAT_RULE, **options)


# --- the upstream ----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def nginx(bench: Bench) -> AsyncIterator[str]:
    """nginx on the load's core; it answers everything with one chat completion of 300 bytes. Raises `Failed`."""
    port, folder = free_port(), bench.folder / "nginx"
    folder.mkdir(exist_ok=True)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"  {kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"daemon off;\nworker_processes 1;\npid {folder}/pid;\nerror_log {folder}/error.log;\n"
        "events { worker_connections 8192; }\n"
        f"http {{\n{temporary}  access_log off;\n  keepalive_requests 1000000000;\n  keepalive_timeout 600s;\n"
        f"  server {{\n    listen {HOST}:{port};\n    location / {{\n      default_type application/json;\n"
        f"      return 200 '{chat_answer()}';\n    }}\n  }}\n}}\n"
    )
    url = f"http://{HOST}:{port}"
    command = ("nginx", "-e", f"{folder}/error.log", "-c", str(folder / "nginx.conf"))
    log = folder / "output.log"
    async with process(command, cores=(bench.load_core,), log=log, ready=functools.partial(is_ok, url)):
        yield url


def chat_answer() -> str:
    """A completion of exactly `ANSWER_BYTES`."""
    empty = len(json.dumps(completion("")))
    return json.dumps(completion("x" * (ANSWER_BYTES - empty)))


# --- what processes take ---------------------------------------------------------------------------------


def family(pid: int) -> list[int]:
    """A process and all that come from it."""
    return [pid, *(one for child in children(pid) for one in family(child))]


def cpu_s(pids: Iterable[int]) -> float:
    """Processor time of these so far, in seconds; of those that live."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def resident_kib(pids: Iterable[int]) -> float:
    """Resident memory of these, in KiB. Pages that several share count for each."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1])
    return float(total)


def worker_of(pid: int) -> int:
    """The one worker of a gateway. Raises `Failed` where it has none, or several."""
    workers = [child for child, command in children(pid).items() if "gateway.worker" in command]
    if len(workers) != 1:
        raise Failed(f"the gateway has {len(workers)} workers")
    return workers[0]
