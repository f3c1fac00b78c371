"""The process that `tests.kit.cost` starts for refusals: a worker as it is in service, asked for what it has to refuse.

Each kind of refusal is counted from socket to socket, its record for the access log and the metrics with it.
"""

import asyncio
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import yaml

from gateway import wiring
from gateway.api.shedding import Shedding
from gateway.core.switches import Scope, Switch
from gateway.stores.control.rule_store import RedisRuleStore
from gateway.stores.redis_script import connect
from tests.kit.cost_meter import Cost
from tests.kit.cost_paths import KEY, PATIENCE_S, WARM_UP, Client, Driver, of_worker
from tests.kit.redis import RedisServer
from tests.kit.serving import free_port
from tests.kit.upstream import HOST, delta, event, sse_head
from tests.kit.wanted import MANY

LIMITED_KEY: Final = "limited"
LARGEST: Final = 4096
PATH: Final = "/v1/chat/completions"
PREFIX: Final = "cost:"
SWITCH_MS: Final = 600_000


class Heart(Shedding):
    """The worker's, within reach."""

    of_worker: Shedding

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Heart.of_worker = self

    @classmethod
    def is_late(cls, *, late: bool) -> None:
        """Whether all that comes is shed; it does not beat."""
        cls.of_worker.is_behind, cls.of_worker._busy_until_us = late, math.inf if late else 0.0


def main() -> None:
    """Print what each refusal costs, as JSON."""
    wiring.Shedding = Heart  # type: ignore[misc]  # the worker's own, made where the worker is
    with RedisServer() as redis, tempfile.TemporaryDirectory() as folder:
        costs = of_worker(Path(folder), redis.url, configuration, Refused)
    print(json.dumps({path: asdict(cost) for path, cost in costs.items()}))


def configuration(folder: Path, redis_url: str, llm_url: str) -> Path:
    """A worker with a full server, one that is free, one that is gone, a blocked task and a used-up key."""
    servers = {
        "full": {"base_url": llm_url, "max_in_flight": 1, "max_queue_size": 0},
        "free": {"base_url": llm_url},
        "gone": {"base_url": f"http://{HOST}:{free_port()}/v1"},
        "blocked": {"base_url": llm_url},
    }
    document = {
        "server": {"drain_timeout_s": 1, "max_body_bytes": LARGEST, "shed_after_ms": 0},
        "backends": {name: {"kind": "openai", **server} for name, server in servers.items()},
        "tasks": {name: {"contract": "chat", "timeout_ms": 600_000} for name in servers},
        "rules": [
            {"name": name, "match": {"task": name}, "split": [{"backend": name, "model": "m"}]} for name in servers
        ],
        "limits": [{"per": "minute", "requests": MANY}, {"per": "minute", "tokens": MANY}],
        "keys": [
            {"id": "counted", "tenant": "counted", "key_env": "COUNTED_KEY"},
            {
                "id": "limited",
                "tenant": "limited",
                "key_env": "LIMITED_KEY",
                "limits": [{"per": "day", "requests": 1}, {"per": "minute", "tokens": MANY}],
            },
        ],
        "redis": {"url": redis_url, "prefix": PREFIX},
    }
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(document))
    os.environ |= {"COUNTED_KEY": KEY, "LIMITED_KEY": LIMITED_KEY}
    asyncio.run(block(redis_url))
    return path


async def block(redis_url: str) -> None:
    """The switch of an operator, as the control plane sets it."""
    now_ms = time.time_ns() // 1_000_000
    switch = Switch(
        id="s",
        action="block",
        scope=Scope(kind="task", name="blocked"),
        reason="counted",
        owner="counted",
        created_ms=now_ms,
        expires_ms=now_ms + SWITCH_MS,
    )
    client = connect(redis_url)
    await RedisRuleStore(client, PREFIX, timeout_s=PATIENCE_S).add_switch(switch)
    await client.aclose()


class Refused(Driver):
    """The caller of what is refused."""

    def costs(self) -> dict[str, Cost]:
        """Of each kind, one after the other."""
        other = self._fill()
        kinds: Mapping[str, Callable[[], None]] = {
            "refused_key": lambda: self._refused(401, key="unknown"),
            "refused_size": lambda: self._refused(413, content="x" * LARGEST),
            "refused_limit": lambda: self._refused(429, key=LIMITED_KEY, model="free"),
            "refused_queue": lambda: self._refused(429, model="full"),
            "refused_switch": lambda: self._refused(503, model="blocked"),
            "refused_health": lambda: self._refused(503, model="gone"),
        }
        for ask in kinds.values():
            for _ in range(WARM_UP):
                ask()
        kinds = {**kinds, "refused_shed": self._shed}
        garbage = {name: self._garbage(ask) for name, ask in kinds.items()}
        self._loop.call_soon_threadsafe(self._meter.begin)
        costs = {name: replace(self._usual(ask), garbage=garbage[name]) for name, ask in kinds.items()}
        self._server.parts.put(b"")
        other.close()
        return costs

    def _fill(self) -> Client:
        """Take the one place of the full server, and all that the limited key may have; whose place it is."""
        self._ask(key=LIMITED_KEY, model="full", stream=True)
        self._server.parts.put(sse_head() + event(delta("word")))
        self._caller.until(b'"word"')
        busy, self._caller = self._caller, Client(self._caller.port)
        return busy

    def _refused(self, status: int, **asked: Any) -> None:
        self._ask(**asked)
        self._caller.whole(status)

    def _shed(self) -> None:
        Heart.is_late(late=True)
        self._refused(429)
        Heart.is_late(late=False)

    def _ask(self, *, key: str = KEY, model: str = "full", content: str = "hello", stream: bool = False) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": content}], "stream": stream}
        self._caller.send(PATH, body, key=key)


if __name__ == "__main__":
    main()
