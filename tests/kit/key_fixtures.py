"""`admin` (the control plane's client) and `one` (a data plane) over one Redis. Use them with

pytest_plugins = ["tests.kit.redis", "tests.kit.key_fixtures"]
"""

from collections.abc import AsyncIterator

import httpx
import pytest
from redis.asyncio import Redis

from tests.kit.keys import Worker, admin_client, worker


@pytest.fixture
async def admin(redis_client: Redis, redis_prefix: str) -> AsyncIterator[httpx.AsyncClient]:
    async with admin_client(redis_client, redis_prefix) as client:
        yield client


@pytest.fixture
async def one(redis_client: Redis, redis_prefix: str) -> AsyncIterator[Worker]:
    async with worker(redis_client, redis_prefix) as one:
        yield one
