"""All parts, started: Redis on disk, two Tritons, an LLM server, a gateway of two workers, a control plane.

Between them stand switches: gateway -> Redis, control plane -> Redis, gateway -> each Triton, gateway -> LLM server,
clients -> gateway.
"""

import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.chaos import parts
from tests.chaos.answers import DOUBLED
from tests.chaos.checker import TIMEOUT_S, WORKERS
from tests.chaos.history import Limit
from tests.chaos.parts import OwnProcess, Part, RedisProcess, TritonProcess, Workers
from tests.kit.redis import RedisServer
from tests.kit.serving import Serving, serving
from tests.kit.tcp_switch import HOST, TcpSwitch
from tests.kit.tritons import Triton, tritons
from tests.parity.client_models import TOTAL

PREFIX: Final = "chaos:"
ON_DISK: Final = ("--appendonly", "yes", "--appendfsync", "everysec")
LIMITS: Final = {
    "requests": Limit(kind="requests", amount=3, per_s=1.0, burst=5),
    "tokens": Limit(kind="tokens", amount=2400, per_s=60.0, burst=400),
    "concurrent": Limit(kind="places", amount=2),
}
_DOCUMENTS: Final[dict[str, list[dict[str, Any]]]] = {
    "open": [],
    "requests": [{"requests": 3, "per": "second", "burst": 5}],
    "tokens": [{"tokens": 2400, "per": "minute", "burst": 400}],
    "concurrent": [{"concurrent": 2}],
}


@dataclass(slots=True)
class World:
    """What runs. `parts` are what faults are made to."""

    parts: dict[str, Part]
    gateway: Serving
    workers: Workers
    control: OwnProcess
    redis: RedisServer
    front: TcpSwitch
    execution_log: Path
    admin_port: int

    @property
    def straight_port(self) -> int:
        """The data plane without a switch before it."""
        return int(self.gateway.url.rpartition(":")[2])

    def processes(self) -> dict[str, int]:
        """The gateway's own, by what they are."""
        workers = {f"worker {pid}": pid for pid in self.workers.pids()}
        return {"parent": self.gateway.process.pid, "control plane": self.control.pid, **workers}


@contextlib.asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    """Everything up and ready; all of it is ended with the block."""
    async with contextlib.AsyncExitStack() as stack:
        redis = stack.enter_context(RedisServer(*ON_DISK))
        models = [("doubled", *DOUBLED), ("total", *TOTAL)]
        servers = stack.enter_context(_tritons(folder, models))
        llm = parts.llm(folder / "executions.log")
        stack.push_async_callback(llm.stop)
        await llm.start()
        to_redis, control_to_redis, to_llm = [
            await stack.enter_async_context(TcpSwitch(port)) for port in (redis.port, redis.port, llm.port)
        ]
        to_tritons = [
            await stack.enter_async_context(TcpSwitch(int(one.server.grpc.rpartition(":")[2]))) for one in servers
        ]
        url = ",".join(f"{HOST}:{switch.port}" for switch in to_tritons)
        sections = _sections(to_redis.port, url, f"http://{HOST}:{to_llm.port}/v1")
        gateway = await stack.enter_async_context(serving(folder, "", "--workers", str(WORKERS), **sections))
        workers = Workers(gateway, WORKERS)
        await workers.start()
        config = yaml.safe_load(gateway.config.read_text())
        admin_port = config["server"]["admin_port"]
        control = parts.control(_control_config(folder, config, control_to_redis.port), admin_port)
        stack.push_async_callback(control.stop)
        await control.start()
        front = await stack.enter_async_context(TcpSwitch(int(gateway.url.rpartition(":")[2])))
        yield World(
            parts={
                "redis": Part(RedisProcess(redis), (to_redis, control_to_redis), (to_redis, control_to_redis)),
                **{
                    f"triton-{number}": Part(TritonProcess(one), (switch,), (switch,))
                    for number, (one, switch) in enumerate(zip(servers, to_tritons, strict=True))
                },
                "llm": Part(llm, (to_llm,), (to_llm,)),
                "worker": Part(workers, (front,)),
                "control": Part(control, (control_to_redis,)),
            },
            gateway=gateway,
            workers=workers,
            control=control,
            redis=redis,
            front=front,
            execution_log=folder / "executions.log",
            admin_port=admin_port,
        )


def _tritons(folder: Path, models: list[tuple[str, str, str]]) -> contextlib.AbstractContextManager[list[Triton]]:
    return tritons(folder, 2, iter(models))


def _sections(redis_port: int, tritons_url: str, llm_url: str) -> dict[str, Any]:
    """The configuration, without what `serving` says by itself."""
    timeout_ms = int(TIMEOUT_S * 1000)
    chats = {name: {"contract": "chat", "timeout_ms": timeout_ms} for name in ("plain", "serial", "release")}
    split = [{"backend": "llm", "model": "m"}]
    to_triton = [{"backend": "triton", "model": "*"}]
    ordered = [
        {"name": mode, "match": {"task": mode}, "split": split, "ordering": {"mode": mode}}
        for mode in ("serial", "release")
    ]
    return {
        "redis": {"url": f"redis://{HOST}:{redis_port}/0", "prefix": PREFIX},
        "backends": {"llm": {"kind": "openai", "base_url": llm_url}, "triton": {"kind": "triton", "url": tritons_url}},
        "tasks": {**chats, "tensor": {"contract": "tensor", "timeout_ms": timeout_ms, "attempt_timeout_ms": 2000}},
        "rules": [
            {"name": "tensors", "match": {"task": "tensor"}, "split": to_triton},
            *ordered,
            {"name": "chat", "match": {"task": "plain"}, "split": split},
        ],
        "keys": [
            {"id": name, "tenant": name, "key_sha256": hashlib.sha256(name.encode()).hexdigest(), "limits": limits}
            for name, limits in _DOCUMENTS.items()
        ],
    }


def _control_config(folder: Path, config: dict[str, Any], redis_port: int) -> Path:
    """The same with another way to Redis, so that the control plane can lose it alone."""
    path = folder / "control.yaml"
    path.write_text(yaml.safe_dump({**config, "redis": {**config["redis"], "url": f"redis://{HOST}:{redis_port}/0"}}))
    return path
