"""A Redis Cluster and a master that sentinels watch, out of real servers on free loopback ports.

with RedisCluster() as cluster:      # three masters, and a replica of the first
    connect(cluster.url)
    cluster.masters[0].stop()        # the replica takes over within two seconds or so

with RedisSentinels() as watched:    # a master, a replica, three sentinels
    connect(watched.url)
    watched.master.stop()
"""

import contextlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import SystemRandom
from typing import Any, Self

import pytest
import redis

from tests.kit.redis import HOST, READY_WITHIN_S, RedisServer

SLOTS = 16384
BUS = 10_000  # a cluster's nodes talk among themselves on the port that is so much higher
DOWN_AFTER_MS = 500
MASTER = "gateway-master"


class RedisCluster:
    """Three masters with a third of the slots each; the first has a replica. Nodes count as failed after 0.5 s."""

    def __init__(self, *options: str) -> None:
        settings = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(DOWN_AFTER_MS))
        settings += ("--cluster-config-file", "nodes.conf", "--cluster-replica-validity-factor", "0")
        settings += ("--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0", *options)
        self._nodes = [RedisServer(*settings, port=_free_port_with_bus()) for _ in range(4)]
        self.masters, self.replica = self._nodes[:3], self._nodes[3]

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'{HOST}:{node.port}' for node in self.masters)}"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            for node in self._nodes:
                undo.callback(node.__exit__)
                node.begin()
            for node in self._nodes:
                node.wait()
            self._join()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.__exit__()

    def _join(self) -> None:
        third = SLOTS // 3 + 1
        for i, node in enumerate(self._nodes):
            say(node, "CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            if node is not self.replica:
                say(node, "CLUSTER", "ADDSLOTS", *range(i * third, min((i + 1) * third, SLOTS)))
            if i:
                say(node, "CLUSTER", "MEET", HOST, self._nodes[0].port)
        _until(lambda: all(self._knows(node, "cluster_known_nodes:4") for node in self._nodes))
        first = say(self.masters[0], "CLUSTER", "MYID").decode()
        _until(lambda: _has(lambda: say(self.replica, "CLUSTER", "REPLICATE", first)))
        _until(lambda: all(self._knows(node, "cluster_state:ok") for node in self._nodes))
        _until(lambda: b"master_link_status:up" in say(self.replica, "INFO", "replication"))
        _until(lambda: all(len(say(node, "CLUSTER", "SLOTS")[0]) == 4 for node in self.masters[:1]))

    def _knows(self, node: RedisServer, word: str) -> bool:
        return word.encode() in say(node, "CLUSTER", "INFO")


class RedisSentinels:
    """A master with a replica, watched by three sentinels, two of which must agree that it is gone (after 0.5 s)."""

    def __init__(self) -> None:
        self.master = RedisServer("--repl-diskless-sync-delay", "0")
        self.replica = RedisServer("--replicaof", HOST, str(self.master.port), "--repl-diskless-sync-delay", "0")
        self._folder = tempfile.TemporaryDirectory(prefix="redis-sentinel-")
        self.sentinels: list[RedisServer] = []

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'{HOST}:{one.port}' for one in self.sentinels)}/{MASTER}"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self.__exit__)
            self.master.start()
            self.replica.start()
            _until(lambda: b"master_link_status:up" in say(self.replica, "INFO", "replication"))
            self.sentinels = [_Sentinel(Path(self._folder.name) / f"{i}.conf", self.master.port) for i in range(3)]
            for sentinel in self.sentinels:
                sentinel.begin()
            for sentinel in self.sentinels:
                sentinel.wait()
            _until(lambda: all(self._sees_all(sentinel) for sentinel in self.sentinels))
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for server in (*self.sentinels, self.replica, self.master):
            server.__exit__()
        self._folder.cleanup()

    def _sees_all(self, sentinel: RedisServer) -> bool:
        told = say(sentinel, "SENTINEL", "MASTER", MASTER)
        state = dict(zip(told[::2], told[1::2], strict=True)) if isinstance(told, list) else told
        return (state[b"num-slaves"], state[b"num-other-sentinels"]) == (b"1", b"2")


class _Sentinel(RedisServer):
    """It writes its own configuration file, so each has one."""

    def __init__(self, file: Path, master_port: int) -> None:
        file.write_text(
            f"sentinel monitor {MASTER} {HOST} {master_port} 2\n"
            f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {MASTER} 3000\n"
        )
        super().__init__("--sentinel")
        self._file = file

    def arguments(self) -> list[str]:
        return [str(self._file), *super().arguments()]


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


def say(server: RedisServer, *words: str | int) -> Any:
    """One command, and its answer as it came."""
    with redis.Redis(host=HOST, port=server.port, socket_timeout=2, protocol=2) as client:
        client.response_callbacks.clear()
        return client.execute_command(*words)


def _has(step: Callable[[], object]) -> bool:
    """Whether Redis took it."""
    try:
        step()
    except redis.ResponseError:
        return False
    return True


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + READY_WITHIN_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError("these servers did not find together")
        time.sleep(0.02)


def _free_port_with_bus() -> int:
    """A port that is free, and free above for the cluster's bus; the usual free ones lie too high for that."""
    while True:
        port = SystemRandom().randrange(12_000, 22_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind((HOST, port))
            other.bind((HOST, port + BUS))
            return port
