"""The embedded stack for tests: real Redis, real Triton, a real LLM server, two workers, the control plane.

One stack for the whole run, on ports of its own. Fixtures: `stack` (addresses, clients, helpers) and `gateway_http`.
"""

import contextlib
import hashlib
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LIMITED_KEY = "gw-test-limited"
START_S = 180
TLS = ssl.create_default_context()  # made once: a client would load the certificate store each time


@dataclass(frozen=True)
class Stack:
    """A running stack, as `.run/stack.json` tells it."""

    run_dir: Path

    @property
    def told(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "stack.json").read_text())

    @property
    def key(self) -> str:
        return self.told["key"]

    @property
    def data_url(self) -> str:
        return self.told["data_url"]

    def pid(self, part: str) -> int:
        return self.told["pids"][part]

    def http(self, **options: Any) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {options.pop('key', self.key)}"}
        return httpx.AsyncClient(
            base_url=self.data_url, headers=headers, timeout=60, trust_env=False, verify=TLS, **options
        )

    def admin(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.told['admin_token']}"}
        return httpx.AsyncClient(
            base_url=f"{self.told['admin_url']}/admin/v1", headers=headers, timeout=30, trust_env=False
        )

    async def metrics(self) -> str:
        async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
            return (await http.get(f"{self.told['ops_url']}/metrics")).text

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
            "GATEWAY_ADMIN_URL": self.told["admin_url"],
            "GATEWAY_ADMIN_TOKEN": self.told["admin_token"],
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


def config_for_tests(folder: Path) -> Path:
    """`deploy/gateway.yaml` with one more key, whose limit is small."""
    document = yaml.safe_load((ROOT / "deploy" / "gateway.yaml").read_text())
    document["keys"].append(
        {
            "id": "limited",
            "tenant": "limited",
            "key_sha256": hashlib.sha256(LIMITED_KEY.encode()).hexdigest(),
            "limits": [{"per": "minute", "requests": 3}],
        }
    )
    document["prices"] = str(ROOT / "deploy" / "prices.yaml")  # it is told relative to the file
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    run_dir = folder / "run"
    options = ["--run-dir", str(run_dir), "--ports", "auto", "--workers", "2"]
    config = config_for_tests(folder)
    environ = {**os.environ, "GATEWAY_MODEL_REPOSITORY": str(ROOT / "triton_models")}
    up = gateway("up", "--detach", *options, "--config", str(config), timeout=START_S, env=environ)
    assert up.returncode == 0, f"gateway up failed:\n{up.stdout}\n{up.stderr}"
    running = Stack(run_dir)
    assert running.told["triton_grpc"], f"no real Triton here, so its tests cannot run:\n{up.stdout}"
    pids = dict(running.told["pids"])
    yield running
    pids |= running.told["pids"]
    down = gateway("down", "--run-dir", str(run_dir))
    assert down.returncode == 0, down.stdout + down.stderr
    left = {name: pid for name, pid in pids.items() if is_running(pid)}
    assert not left, f"still running after `gateway down`: {left}"


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with stack.http() as client:
        yield client
