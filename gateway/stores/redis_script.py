"""What all stores share: a client that fails fast, Lua files that run inside Redis, and word from a channel."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError
from redis.maint_notifications import MaintNotificationsConfig

from gateway.core.errors import RulesUnavailable
from gateway.ports import StoreObserver
from gateway.settings import RedisSettings
from gateway.settings.tls import client_context
from gateway.stores.redis_cluster import ClusterClient
from gateway.stores.redis_sentinel import sentinel_client

UNREACHABLE = (RedisError, OSError)
"""What a Redis that is gone, hung, loading or out of memory raises (`TimeoutError` is an `OSError`)."""

CONNECT_TIMEOUT_S: Final = 1.0
PING_S: Final = 1.0
DEAF_S: Final = 3.0  # a connection that answers no ping for so long is dead
TURNS: Final = 8  # of the loop: an answer that has come takes three at most to be read, and one longer than usual more


def connect(where: RedisSettings | str, *, max_connections: int = 32) -> Redis:
    """A client for the stores, which bound every call themselves: of one server, of sentinels' master, or of a cluster.

    Raises `ValueError` where a password's variable is not set or a certificate cannot be read.

    One immediate retry (a pooled connection may be dead) and never a backoff, which would only sleep inside that
    bound. No socket timeout: the library keeps it with `asyncio.wait_for`, which on Python 3.11 can swallow the
    cancellation that our own bounds and `close` rely on, and which costs a task per call. `max_connections` are to one
    server.
    """
    settings = RedisSettings(url=where) if isinstance(where, str) else where
    place = settings.place
    links: dict[str, Any] = {
        "socket_timeout": None,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        **_tls(settings, is_tls=place.is_tls),
    }
    options = {
        **links,
        "max_connections": max_connections,
        "retry": Retry(NoBackoff(), 1),
        "username": place.username or None,
        "password": place.password or None,
    }
    if place.kind == "cluster":
        return ClusterClient(place.nodes, lambda host, port: Redis(host=host, port=port, **options))
    if place.kind == "sentinel":
        return sentinel_client(place, links, {**options, "db": place.db})
    if place.kind == "unix":
        return Redis(unix_socket_path=place.path, db=place.db, **options)
    host, port = place.nodes[0]
    return Redis(host=host, port=port, db=place.db, **options)


def _tls(settings: RedisSettings, *, is_tls: bool) -> dict[str, Any]:
    """The library's options. Who the server is, is always checked: its certificate, and its name in it."""
    if not is_tls:
        return {}
    client_context(settings.ca_file, settings.cert_file, settings.key_file, within="redis")  # says what is wrong now
    return {
        "ssl": True,
        "ssl_ca_certs": str(settings.ca_file) if settings.ca_file else None,
        "ssl_certfile": str(settings.cert_file) if settings.cert_file else None,
        "ssl_keyfile": str(settings.key_file) if settings.key_file else None,
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
    }


@asynccontextmanager
async def in_time(timeout_s: float) -> AsyncGenerator[None, None]:
    """Raise `TimeoutError` where what is inside has not ended within `timeout_s`, and a few turns of the loop after it.

    In these a loop that was held up reads what has come meanwhile, so that its own delay is not taken for Redis's: an
    overloaded worker would lose its limits just then. A loop that is not held up makes them in no time.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as bound:
        timer: asyncio.Handle

        def late(turns_left: int, again: Any) -> None:
            nonlocal timer
            if turns_left:
                timer = loop.call_soon(again, turns_left - 1, again)
            else:
                bound.reschedule(loop.time())

        # It is given itself: by its own name it would be part of a cycle, left to the garbage collection.
        timer = loop.call_later(timeout_s, late, TURNS, late)
        try:
            yield
        finally:
            timer.cancel()


def nobody(_operation: str, _took_s: float | None) -> None:
    """A `StoreObserver` that does not listen."""


@contextmanager
def timed(observer: StoreObserver, operation: str) -> Generator[None]:
    """Tell `observer` how long what is inside took, or that Redis was out of reach; another error is not told."""
    began_s = time.monotonic()
    try:
        yield
    except UNREACHABLE:
        observer(operation, None)
        raise
    observer(operation, time.monotonic() - began_s)


@asynccontextmanager
async def answering(what: str, timeout_s: float) -> AsyncGenerator[None, None]:
    """For the control plane, which does nothing without Redis: `in_time`, and its failures as `RulesUnavailable`.

    `what` Redis keeps here is said to whoever asked.
    """
    try:
        async with in_time(timeout_s):
            yield
    except UNREACHABLE as error:
        raise RulesUnavailable(f"Redis, which keeps {what}, does not answer") from error


class Lanes:
    """So many operations at a time, each `in_time`; others wait for them, and fail with the first one that fails.

    So none waits for Redis twice, and what a worker's own work delays is not taken for Redis's doing.
    """

    def __init__(self, at_once: int, timeout_s: float) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._timeout_s = timeout_s
        self._failures = 0

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[None, None]:
        """Raises `UNREACHABLE`."""
        failures = self._failures
        async with self._free:
            if self._failures != failures:
                raise RedisConnectionError("it has not answered the one before")
            try:
                async with in_time(self._timeout_s):
                    yield
            except UNREACHABLE:
                self._failures += 1
                raise


async def listen(client: Redis, channel: str, heard: Callable[[str], None]) -> None:
    """Call `heard` with each message on a channel, until the connection is dead or hung; then raise `UNREACHABLE`.

    It is called with an empty text whenever the subscription has begun, also after a reconnection: what was said before
    then was missed.
    """
    loop = asyncio.get_running_loop()
    async with client.pubsub() as pubsub:
        async with asyncio.timeout(DEAF_S):
            await pubsub.subscribe(channel)
        last_s = loop.time()
        while True:
            message = await pubsub.get_message(timeout=PING_S)
            if message is not None:
                last_s = loop.time()
                if message["type"] in ("subscribe", "message"):
                    heard("" if message["type"] == "subscribe" else _text(message["data"]))
            elif loop.time() - last_s > DEAF_S:
                raise RedisConnectionError("the subscription is silent")
            else:
                async with asyncio.timeout(DEAF_S):
                    await pubsub.ping()


def _text(told: bytes | str) -> str:
    return told.decode(errors="replace") if isinstance(told, bytes) else told


@dataclass(frozen=True, slots=True)
class Script:
    """One atomic operation: its source, and the SHA-1 by which Redis knows it."""

    source: str
    sha: str

    async def run(self, client: Redis, keys: list[str], args: Sequence[str | bytes | int]) -> Any:
        """Run it by its SHA-1, and by its source where Redis has forgotten it."""
        try:
            return await client.evalsha(self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await client.eval(self.source, len(keys), *keys, *args)


def load_script(name: str) -> Script:
    """Read `lua/<name>.lua` from the package."""
    source = resources.files("gateway.stores").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
