"""The console's world: two real Tritons, real Redis, two workers, the control plane, and a Chromium."""

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from playwright.async_api import Browser

from tests.kit.browser import Console, chromium, looking
from tests.kit.redis import RedisServer
from tests.kit.serving import Serving, control_plane, serving
from tests.kit.tritons import Triton, tritons
from tests.kit.wait import until

VIEWER, OPERATOR = (f"gw-test-{role}-{'x' * 32}" for role in ("viewer", "operator"))
TENANTS = ("tenant-0", "tenant-1")
FAST = {"backend": "triton", "model": "echo", "version": "1"}
SPARE = {"backend": "triton", "model": "spare"}
MATCH = {"task": "tensor", "model": "echo"}
NO_KEY = "GATEWAY_TEST_KEY_THAT_IS_NOT_SET"
OFF = {
    "hosted": {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "api_key_env": NO_KEY},
    "shut": {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "enabled": False},
}
RULES = [
    {"name": "fast", "match": MATCH, "split": [{**FAST, "weight": 1}]},
    {"name": "spare", "match": MATCH, "split": [SPARE]},
    {
        "name": "weighed",
        "match": {"task": "tensor", "model": "weighed"},
        "split": [{**FAST, "weight": 90}, {**SPARE, "weight": 10}],
    },
    {
        "name": "talk",
        "match": {"task": "talk"},
        "split": [{"backend": "hosted", "model": "big"}, {"backend": "shut", "model": "small"}],
        "strategy": "ordered",
    },
    {"name": "others", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]},
]
CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 8
input [ {{ name: "X" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "VERSION" data_type: TYPE_INT32 dims: [ 1 ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
version_policy: {{ all {{ }} }}
"""
# Answers its own version after X milliseconds; a file `slow` beside it, at any time, makes it slower.
MODEL = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])
        self.slow = os.path.join(args["model_repository"], args["model_version"], "slow")

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            time.sleep(x.max() / 1000 + (0.4 if os.path.exists(self.slow) else 0.0))
            version = np.full((len(x), 1), self.version, np.int32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("VERSION", version)]))
        return answers
"""


def infer(wait_ms: int = 0) -> dict[str, Any]:
    return {"inputs": [{"name": "X", "shape": [1, 1], "datatype": "INT32", "data": [wait_ms]}]}


@dataclass
class Client:
    """Callers who never stop: `seen` has the moment, the status and the rule of each answer."""

    url: str
    seen: list[tuple[float, int, str]] = field(default_factory=list)

    async def loop(self, tenant: str, stop: asyncio.Event) -> None:
        headers = {"authorization": f"Bearer {tenant}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30, trust_env=False) as http:
            while not stop.is_set():
                answer = await http.post("/v2/models/echo/infer", json=infer())
                self.seen.append((time.time(), answer.status_code, answer.headers.get("x-gateway-rule", "")))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), 0.03)

    @contextlib.asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        loops = [asyncio.create_task(self.loop(tenant, stop)) for tenant in TENANTS]
        try:
            await until(lambda: len(self.seen) > 10, timeout_s=20)
            yield
        finally:
            stop.set()
            await asyncio.gather(*loops)

    def last_rules(self, count: int = 10) -> set[str]:
        return {rule for _, _, rule in self.seen[-count:]}

    async def until_only(self, rule: str) -> float:
        """Wait until all go by this rule; when the last came that did not."""
        await until(lambda: len(self.seen) > 10 and self.last_rules() == {rule}, timeout_s=10)
        return max((at for at, _, one in self.seen if one != rule), default=0.0)


@dataclass
class Whole:
    """Everything together."""

    serving: Serving
    admin: httpx.AsyncClient
    redis: RedisServer
    servers: list[Triton]
    browser: Browser

    @property
    def url(self) -> str:
        return str(self.admin.base_url).partition("/admin")[0]

    def looking(self, **options: Any) -> contextlib.AbstractAsyncContextManager[Console]:
        return looking(self.browser, self.url, **options)

    async def reset(self) -> None:
        """The rules as at first, and no switches."""
        for one in (await self.admin.get("/switches")).json()["items"]:
            assert (await self.admin.delete(f"/switches/{one['id']}")).status_code == 200
        revision = (await self.admin.get("/rules")).json()["revision"]
        put = await self.admin.put("/rules", json={"rules": RULES}, headers={"if-match": str(revision)})
        assert put.status_code == 200, put.text


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[list[Triton]]:
    """Two, with the models echo (in two versions), spare and hold."""

    def models() -> Iterator[tuple[str, str, str]]:
        yield from ((name, CONFIG.format(name=name), MODEL) for name in ("echo", "spare", "hold"))
        for one in folder.glob("*/repository/echo"):
            (one / "2").mkdir()
            (one / "2" / "model.py").write_text(MODEL)

    with tritons(folder, 2, models()) as started:
        yield started


@contextlib.asynccontextmanager
async def whole_console(folder: Path) -> AsyncIterator[Whole]:
    """All of it, ended with the block."""
    with servers(folder) as tritons_, RedisServer() as redis:
        sections = {
            "backends": {"triton": {"kind": "triton", "url": ",".join(one.server.grpc for one in tritons_)}, **OFF},
            "tasks": {
                "tensor": {"contract": "tensor", "timeout_ms": 60_000, "attempt_timeout_ms": 30_000},
                "talk": {"contract": "chat"},
            },
            "rules": RULES,
            "keys": [{"id": name, "tenant": name, "key_sha256": _hash(name)} for name in TENANTS],
            "admin": {
                "keys": [
                    {"id": role, "role": role, "key_sha256": _hash(secret)}
                    for role, secret in (("viewer", VIEWER), ("operator", OPERATOR))
                ]
            },
            "redis": {"url": redis.url, "prefix": f"test:{uuid.uuid4().hex[:8]}:"},
        }
        async with (
            serving(folder, "", "--workers", "2", **sections) as data_plane,
            control_plane(data_plane.config) as admin,
            chromium() as browser,
        ):
            yield Whole(data_plane, admin, redis, tritons_, browser)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
