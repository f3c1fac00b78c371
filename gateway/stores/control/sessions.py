"""The console's log-ins in Redis: `{prefix}session:<SHA-256 of the cookie>`, JSON, until it expires.

Who reads Redis learns no cookie. All control planes over one Redis know every log-in.
"""

import hashlib
import json
import re
import secrets
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from typing import Final

from redis.asyncio import Redis

from gateway.admin_ports import Session
from gateway.stores.redis_script import answering

COOKIE_BYTES: Final = 32  # 256 bits (OWASP's least is 64)
_COOKIE: Final = re.compile(r"[A-Za-z0-9_-]{43}")


class RedisSessions:
    """See `admin_ports.Sessions`. Raises `RulesUnavailable` when Redis does not answer within `timeout_s`."""

    def __init__(self, client: Redis, prefix: str, *, timeout_s: float = 1.0) -> None:
        self._client = client
        self._prefix = prefix
        self._timeout_s = timeout_s

    async def begin(self, session: Session) -> str:
        """See `admin_ports.Sessions`."""
        cookie = secrets.token_urlsafe(COOKIE_BYTES)
        async with self._bounded():
            await self._client.set(self._key(cookie), json.dumps(asdict(session)), exat=session.expires_s)
        return cookie

    async def find(self, cookie: str) -> Session | None:
        """See `admin_ports.Sessions`."""
        if not _COOKIE.fullmatch(cookie):
            return None
        async with self._bounded():
            written = await self._client.get(self._key(cookie))
        try:
            session = None if written is None else Session(**json.loads(written))
        except (ValueError, TypeError):  # of a version to come
            return None
        return session if session is not None and session.expires_s > time.time() else None

    async def end(self, cookie: str) -> None:
        """See `admin_ports.Sessions`."""
        async with self._bounded():
            await self._client.delete(self._key(cookie))

    def _key(self, cookie: str) -> str:
        return f"{self._prefix}session:{hashlib.sha256(cookie.encode()).hexdigest()}"

    def _bounded(self) -> AbstractAsyncContextManager[None]:
        return answering("the log-ins", self._timeout_s)
