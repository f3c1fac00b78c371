"""`gateway serve` as a process over a configuration of the test's own, without the rest of the stack."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from gateway.http.server import bind

KEY = "gw-test-serving"
ADMIN_TOKEN = "gw-test-admin-of-more-than-32-characters"  # noqa: S105 - made up here; no failures lock it out
READY_WITHIN_S = 30
RULE = {"name": "chat", "split": [{"backend": "llm", "model": "m"}]}


@dataclass
class Serving:
    """A running data plane."""

    process: asyncio.subprocess.Process
    url: str
    ops_url: str
    log: Path
    config: Path

    async def ask(self, **options: Any) -> httpx.Response:
        body = {"model": "general_llm", "messages": [{"role": "user", "content": "hi"}]}
        async with self.http() as http:
            return await http.post("/v1/chat/completions", json={**body, **options})

    def http(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {KEY}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30, trust_env=False)

    async def is_ready(self) -> int:
        """The status of the operations listener's readiness; 0 where nobody answers."""
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(trust_env=False, timeout=5) as http:
                return (await http.get(f"{self.ops_url}/healthz/ready")).status_code
        return 0


def free_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


def config(folder: Path, upstream: str, **sections: Any) -> tuple[Path, int, int]:
    """A configuration with one chat task; its file, its port and its operations port."""
    port, ops_port = free_port(), free_port()
    drain_s = sections.pop("drain_timeout_s", 10)
    document = {
        "server": {
            "port": port,
            "ops_port": ops_port,
            "admin_port": free_port(),
            "drain_timeout_s": drain_s,
            **sections.pop("server_more", {}),
        },
        "backends": {"llm": {"kind": "openai", "base_url": upstream}},
        "tasks": {"general_llm": {"contract": "chat"}},
        "rules": [RULE],
        "keys": [{"id": "test", "tenant": "test", "key_env": "SERVING_KEY"}],
        **sections,
    }
    path = folder / "serving.yaml"
    path.write_text(yaml.safe_dump(document))
    return path, port, ops_port


async def start(path: Path, *options: str, command: str = "serve") -> tuple[asyncio.subprocess.Process, Path]:
    """Start `gateway serve`, or another command; its log lies beside the configuration."""
    log = path.with_suffix(f".{command}.log")
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", command, "--config", str(path), *options),
            stderr=out,
            stdout=out,
            env={**os.environ, "SERVING_KEY": KEY, "GATEWAY_ADMIN_TOKEN": ADMIN_TOKEN},
        )
    return process, log


@contextlib.asynccontextmanager
async def serving(folder: Path, upstream: str, *options: str, **sections: Any) -> AsyncIterator[Serving]:
    """A data plane that is ready; ended with the block."""
    ready_within_s = sections.pop("ready_within_s", READY_WITHIN_S)
    async with serving_at(*config(folder, upstream, **sections), *options, ready_within_s=ready_within_s) as running:
        yield running


@contextlib.asynccontextmanager
async def serving_at(
    path: Path, port: int, ops_port: int, *options: str, ready_within_s: float = READY_WITHIN_S
) -> AsyncIterator[Serving]:
    """The same over a configuration that is written already, with these ports."""
    process, log = await start(path, *options)
    running = Serving(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{ops_port}", log, path)
    try:
        async with asyncio.timeout(ready_within_s):
            while await running.is_ready() != 200:
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.05)
        yield running
    finally:
        await _end(process)


@contextlib.asynccontextmanager
async def control_plane(path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """`gateway admin` over the same configuration, and a client of its `/admin/v1`; ended with the block."""
    process, log = await start(path, command="admin")
    port = yaml.safe_load(path.read_text())["server"]["admin_port"]  # noqa: ASYNC240 - a small local file
    url, headers = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {ADMIN_TOKEN}"}
    try:
        async with httpx.AsyncClient(base_url=f"{url}/admin/v1", headers=headers, trust_env=False, timeout=60) as http:
            async with asyncio.timeout(30):
                while not await _is_ready(http, url):
                    assert process.returncode is None, log.read_text()
                    await asyncio.sleep(0.05)
            yield http
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    async with asyncio.timeout(20):
        await process.wait()


async def _is_ready(http: httpx.AsyncClient, url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await http.get(f"{url}/healthz/ready")).status_code == 200
    return False


def children(pid: int) -> dict[int, str]:
    """The direct children of a process, with their command lines."""
    return _with_commands(_by_parent().get(pid, ()))


def descendants(pid: int) -> dict[int, str]:
    """All processes below a process, with their command lines."""
    by_parent, found = _by_parent(), [pid]
    for one in found:
        found += by_parent.get(one, ())
    return _with_commands(found[1:])


def _by_parent() -> dict[int, list[int]]:
    """All living processes, by their parents."""
    found: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if state != "Z":
                found.setdefault(int(parent), []).append(int(stat.parent.name))
    return found


def _with_commands(pids: Iterable[int]) -> dict[int, str]:
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return found
