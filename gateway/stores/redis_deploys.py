"""Deploys and rollouts, kept in Redis so that a control plane that starts again knows of those of its predecessor.

Layout, all under one prefix:
- `{prefix}deploys`, `{prefix}rollouts`: a hash of the documents (JSON) by id;
- `{prefix}deploying:{model}`, `{prefix}rolling:{rule}`: whose the model or the rule is; its owner renews it, and it
  expires 10 s after its last word.
"""

import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis

from gateway.ports import JsonObject
from gateway.stores.redis_script import answering, load_script

CLAIM_TTL_MS = 10_000
KEPT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is kept: the key of the documents, and the beginning of those of claims."""

    documents: str
    claims: str


DEPLOYS: Final = Kind(documents="deploys", claims="deploying")
ROLLOUTS: Final = Kind(documents="rollouts", claims="rolling")


class RedisDeployStore:
    """See `admin_ports.DeployStore`. Raises `RulesUnavailable` when Redis does not answer within `timeout_s`."""

    def __init__(self, client: Redis, prefix: str, timeout_s: float = 1.0, *, kind: Kind = DEPLOYS) -> None:
        self._client = client
        self._prefix = prefix
        self._kind = kind
        self._timeout_s = timeout_s
        self._claim = load_script("claim")
        self._release = load_script("release")

    async def save(self, document: JsonObject) -> None:
        """Keep it; of more than a hundred the oldest are forgotten, but none that is still `running`."""
        async with self._bounded():
            await self._client.hset(self._key, document["id"], json.dumps(document))
            if await self._client.hlen(self._key) > KEPT:
                old = [one["id"] for one in (await self._all())[KEPT:] if one["status"] != "running"]
                if old:
                    await self._client.hdel(self._key, *old)

    async def load(self, deploy_id: str) -> JsonObject | None:
        """The one with this id."""
        async with self._bounded():
            text = await self._client.hget(self._key, deploy_id)
        return None if text is None else json.loads(text)

    async def recent(self) -> Sequence[JsonObject]:
        """The newest first."""
        async with self._bounded():
            return await self._all()

    async def claim(self, model: str, owner: str) -> bool:
        """Take it, or keep it for another 10 s."""
        async with self._bounded():
            return bool(await self._claim.run(self._client, [self._claimed(model)], [owner, CLAIM_TTL_MS]))

    async def owner(self, model: str) -> str:
        """Who has it; empty for nobody."""
        async with self._bounded():
            owner = await self._client.get(self._claimed(model))
        return owner.decode() if isinstance(owner, bytes) else owner or ""

    async def release(self, model: str, owner: str) -> None:
        """Give it up."""
        async with self._bounded():
            await self._release.run(self._client, [self._claimed(model)], [owner])

    @property
    def _key(self) -> str:
        return f"{self._prefix}{self._kind.documents}"

    def _claimed(self, model: str) -> str:
        return f"{self._prefix}{self._kind.claims}:{model}"

    async def _all(self) -> list[dict[str, Any]]:
        documents = [json.loads(text) for text in (await self._client.hgetall(self._key)).values()]
        return sorted(documents, key=lambda one: one["started_ms"], reverse=True)

    def _bounded(self) -> AbstractAsyncContextManager[None]:
        return answering(f"{self._kind.documents}", self._timeout_s)
