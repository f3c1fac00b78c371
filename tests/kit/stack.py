"""A running stack, as tests see it: real Redis, real Triton, a real LLM server, gateways, the control plane.

`gateway up` starts one on ports of its own (here), docker-compose.yml another (`compose_stack`).
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

ROOT = Path(__file__).resolve().parents[2]
START_S = 180


class Parts(Protocol):
    """The processes of a stack; each kind of stack can do more with them."""

    def pid(self, part: str) -> int:
        """The process of a part now; another one after it was started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Where everything is."""

    parts: Parts
    data_url: str
    admin_url: str
    ops_urls: Sequence[str]
    llm_url: str
    triton_url: str
    key: str
    admin_token: str
    workers: int
    scraped: Mapping[str, Sequence[str]]
    """The addresses of each job of deploy/prometheus/prometheus.yml."""
    prometheus_url: str | None = None

    def http(self, **options: Any) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {options.pop('key', self.key)}"}
        return httpx.AsyncClient(base_url=self.data_url, headers=headers, timeout=60, trust_env=False, **options)

    def admin(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.admin_token}"}
        return httpx.AsyncClient(base_url=f"{self.admin_url}/admin/v1", headers=headers, timeout=30, trust_env=False)

    async def limited_key(self, requests_a_minute: int) -> str:
        """A new key with this limit, of which nothing is used up."""
        async with self.admin() as admin:
            limits = [{"per": "minute", "requests": requests_a_minute}]
            made = await admin.post("/keys", json={"name": "limited", "tenant": "limited", "limits": limits})
        assert made.status_code == 201, made.text
        return made.json()["key"]

    async def metrics(self) -> list[str]:
        """The page of each gateway."""
        async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
            return [(await http.get(f"{url}/metrics")).text for url in self.ops_urls]

    @contextlib.asynccontextmanager
    async def routed(self, backend: str) -> AsyncIterator[None]:
        """Send every tensor task to `backend` alone while the block runs; the rules are put back after it."""
        async with self.admin() as admin:
            before = (await admin.get("/rules")).json()
            only = [
                {**rule, "split": [{"backend": backend, "model": rule["split"][0]["model"]}], "fallback": []}
                if rule["split"][0]["backend"] in ("triton", "local")
                else rule
                for rule in before["rules"]
            ]
            await self._put(admin, only, before["revision"])
            try:
                yield
            finally:
                now = (await admin.get("/rules")).json()["revision"]
                await self._put(admin, before["rules"], now)

    @staticmethod
    async def _put(admin: httpx.AsyncClient, rules: list[dict[str, Any]], revision: int) -> None:
        answer = await admin.put("/rules", json={"rules": rules}, headers={"if-match": str(revision)})
        assert answer.status_code == 200, answer.text
        applied = answer.json()["applied"]
        assert applied["workers"] == applied["of"], applied

    def cli(self, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run the console script against this stack."""
        environ = {
            **os.environ,
            "GATEWAY_ADMIN_URL": self.admin_url,
            "GATEWAY_ADMIN_TOKEN": self.admin_token,
            "COLUMNS": "200",
        }
        return gateway(*args, env=environ, **options)


def gateway(*args: str, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `gateway ...` to its end."""
    command = [sys.executable, "-m", "gateway", *args]
    options.setdefault("stdin", subprocess.DEVNULL)  # nobody is there to be asked
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False, **options)


def is_running(pid: int) -> bool:
    """Whether the process still runs; one that has ended and waits for its parent to notice does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@dataclass(frozen=True, slots=True)
class UpParts:
    """What `gateway up` started, as `.run/stack.json` tells it."""

    run_dir: Path

    @property
    def told(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "stack.json").read_text())

    def pid(self, part: str) -> int:
        return self.told["pids"][part]


@contextlib.contextmanager
def up(folder: Path) -> Iterator[Stack]:
    """`gateway up` with the shipped configuration and two workers, until `gateway down`, which has to leave nothing."""
    parts = UpParts(folder / "run")
    options = ["--run-dir", str(parts.run_dir), "--ports", "auto", "--workers", "2"]
    started = gateway("up", "--detach", *options, timeout=START_S)
    assert started.returncode == 0, f"gateway up failed:\n{started.stdout}\n{started.stderr}"
    told = parts.told
    try:
        assert told["triton_grpc"], f"no real Triton here, so its tests cannot run:\n{started.stdout}"
        yield _stack(parts, workers=2)
    finally:
        pids = {**told["pids"], **parts.told["pids"]}
        down = gateway("down", "--run-dir", str(parts.run_dir))
    assert down.returncode == 0, down.stdout + down.stderr
    left = {name: pid for name, pid in pids.items() if is_running(pid)}
    assert not left, f"still running after `gateway down`: {left}"


def _stack(parts: UpParts, *, workers: int) -> Stack:
    told = parts.told
    command = Path(f"/proc/{parts.pid('triton')}/cmdline").read_text().split("\0")
    metrics_port = next(word.partition("=")[2] for word in command if word.startswith("--metrics-port="))
    llm_url = told["llm_url"].removesuffix("/v1")
    scraped = {
        "gateway": [told["ops_url"].removeprefix("http://")],
        "triton": [f"127.0.0.1:{metrics_port}"],
        "llm": [llm_url.removeprefix("http://")],
    }
    return Stack(
        parts=parts,
        data_url=told["data_url"],
        admin_url=told["admin_url"],
        ops_urls=[told["ops_url"]],
        llm_url=llm_url,
        triton_url=told["triton_http"],
        key=told["key"],
        admin_token=told["admin_token"],
        workers=workers,
        scraped=scraped,
    )
