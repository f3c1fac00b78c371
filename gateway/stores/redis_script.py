"""A Lua file that runs inside Redis, and a client that is set up to fail fast."""

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

UNREACHABLE = (RedisError, OSError)
"""What a Redis that is gone, hung, loading or out of memory raises (`TimeoutError` is an `OSError`)."""

CONNECT_TIMEOUT_S = 1.0


def connect(url: str, *, max_connections: int = 32) -> Redis:
    """A client for the stores, which bound every call themselves.

    One immediate retry (a pooled connection may be dead) and never a backoff, which would only sleep inside that
    bound. No socket timeout: the library keeps it with `asyncio.wait_for`, which on Python 3.11 can swallow the
    cancellation that our own bounds and `close` rely on, and which costs a task per call.
    """
    return Redis.from_url(
        url,
        max_connections=max_connections,
        socket_timeout=None,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        retry=Retry(NoBackoff(), 1),
    )


@dataclass(frozen=True, slots=True)
class Script:
    """One atomic operation: its source, and the SHA-1 by which Redis knows it."""

    source: str
    sha: str

    async def run(self, client: "Redis", keys: list[str], args: list[str | int]) -> Any:
        """Run it by its SHA-1, and by its source where Redis has forgotten it."""
        try:
            return await client.evalsha(self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await client.eval(self.source, len(keys), *keys, *args)


def load_script(name: str) -> Script:
    """Read `lua/<name>.lua` from the package."""
    source = resources.files("gateway.stores").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
