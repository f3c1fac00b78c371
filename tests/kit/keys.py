"""A control plane and any number of data planes over one Redis, for what keys do while everything runs."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from redis.asyncio import Redis

from gateway.admin.app import create_admin_app
from gateway.admin.plane import Plane
from gateway.api.auth import KeyRing
from gateway.backends.scripted import ScriptedBackend
from gateway.core.types import Caller
from gateway.ports import Backend
from gateway.stores.redis_key_store import RedisKeyStore
from gateway.stores.redis_keys import RedisKeys
from tests.kit.admin_plane import Asked
from tests.kit.app import Harness, embedding, running
from tests.kit.wait import until_async

TOKEN = "admin-secret"  # noqa: S105 - made up here
EMBED = "/v1/tasks/text-embedding"
TEXT = {"input": {"text": "hello"}}
TASKS = ("text-embedding", "image-classification", "general_llm", "total", "tensor")


def admin_client(redis: Redis, prefix: str) -> httpx.AsyncClient:
    """The control plane of keys; it is told no rules."""
    app = create_admin_app(Plane(tasks=TASKS, keys=RedisKeyStore(redis, prefix)), TOKEN)
    return httpx.AsyncClient(
        transport=Asked(app),
        base_url="http://admin/admin/v1",
        headers={"authorization": f"Bearer {TOKEN}"},
    )


@dataclass
class Worker:
    """A data plane with the keys of a Redis."""

    gw: Harness
    keys: RedisKeys

    async def embed(self, key: str | None = None, **headers: str) -> httpx.Response:
        """One request, with a key where one is given."""
        shown = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(base_url=self.gw.url, timeout=10, trust_env=False) as http:
            return await http.post(EMBED, json=TEXT, headers={**shown, **headers})

    async def becomes(self, status: int, key: str, within_s: float = 1.0) -> None:
        """Ask until a request has this status. Raises `TimeoutError`."""

        async def has_become() -> bool:
            return (await self.embed(key)).status_code == status

        await until_async(has_become, timeout_s=within_s)


@contextlib.asynccontextmanager
async def worker(
    redis: Redis,
    prefix: str,
    *,
    backends: Sequence[Backend] = (),
    callers: Mapping[str, Caller] | None = None,
    **options: Any,
) -> AsyncIterator[Worker]:
    """`callers` are the configuration's, by the digest of their keys."""
    keys = RedisKeys(redis, prefix, ())
    await keys.start()
    ring = KeyRing(callers or {}, keys=keys, signing=keys.signing)
    served = [ScriptedBackend("triton", [embedding()]), *backends]
    try:
        async with running(served, key_ring=ring, **options) as gw:
            yield Worker(gw, keys)
    finally:
        await keys.close()


async def made(admin: httpx.AsyncClient, /, **fields: Any) -> dict[str, Any]:
    """A new key as the control plane tells it."""
    answer = await admin.post("/keys", json={"tenant": "acme", "name": "web", **fields})
    assert answer.status_code == 201, answer.text
    key: dict[str, Any] = answer.json()
    return key
