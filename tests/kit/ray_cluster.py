"""A Ray cluster of two nodes on this machine, each with an address of its own, that runs `deploy/ray/serve.yaml`.

Every node has one CPU and a replica takes one, so two replicas are on two nodes. Nothing but the ports, the CPUs and
the pace of the autoscaler is changed in the file.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.kit.serving import descendants, free_port
from tests.kit.wait import until

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "ray" / "serve.yaml"
BIN = Path(sys.executable).parent
# Not 127.0.0.1, in whose place Ray puts the machine's outward address.
NODES = ("127.0.0.2", "127.0.0.3")
REPLICA = "ray::ServeReplica:local_runtime:LocalRuntime"
AGENTS = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
ATTEMPTS = 3
RUNS = "Ray runtime started"
START_S = 120


@dataclass
class RayCluster:
    """A running cluster; `grpc` are the ports of the two nodes' proxies, the head's first."""

    folder: Path
    environ: Mapping[str, str]
    grpc: tuple[int, int]
    nodes: list[asyncio.subprocess.Process] = field(default_factory=list)
    started: list[asyncio.subprocess.Process] = field(default_factory=list)

    def replicas(self) -> list[list[int]]:
        """By node, the processes of the application's replicas there."""
        return [[pid for pid, line in descendants(node.pid).items() if line.startswith(REPLICA)] for node in self.nodes]

    @property
    def log(self) -> str:
        """What the commands have written, the end of it."""
        return "\n".join(file.read_text(errors="replace")[-4000:] for file in sorted(self.folder.glob("*.log")))

    async def start(self, name: str, *command: str, **environ: str) -> asyncio.subprocess.Process:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(str(BIN / command[0]), *command[1:]), stdout=log, stderr=log, env={**self.environ, **environ}
            )
        self.started.append(process)
        return process


@contextlib.asynccontextmanager
async def ray_cluster(*, repository: Path, models: str, autoscaling: Mapping[str, Any]) -> AsyncIterator[RayCluster]:
    """Both nodes and the application, deployed but maybe not running yet; all ended with the block.

    `autoscaling` is laid over the file's `autoscaling_config`.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # short: sockets lie deep in it
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # of 5 s, which a busy machine may need and more
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        "LOCAL_RUNTIME_REPOSITORY": str(repository),
        "LOCAL_RUNTIME_MODELS": models,
    }
    cluster = RayCluster(folder, environ, (free_port(), free_port()))
    gcs = f"{NODES[0]}:{free_port()}"
    try:
        head = ("--head", "--port", gcs.rpartition(":")[2], "--include-dashboard=false", "--temp-dir", str(folder))
        await _node(cluster, *head, "--ray-client-server-port", str(free_port()), "--disable-usage-stats")
        ports = {"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(free_port())}
        ports["RAY_SERVE_WORKER_PROXY_GRPC_PORT"] = str(cluster.grpc[1])  # two nodes of one machine need two ports
        file = folder / "serve.yaml"
        file.write_text(yaml.safe_dump(_config(cluster.grpc[0], autoscaling)))
        async with asyncio.TaskGroup() as group:
            group.create_task(_deploy(cluster, gcs, file))
            group.create_task(_node(cluster, "--address", gcs, **ports))
        yield cluster
    finally:
        await asyncio.gather(*(_end(process) for process in cluster.started))
        shutil.rmtree(folder)


async def _node(cluster: RayCluster, *options: str, **environ: str) -> None:
    """Start the next node. Ray itself gives up after 30 s, which a busy machine may need: then it is started again."""
    number = len(cluster.nodes)
    log = cluster.folder / f"node{number}.log"
    for _ in range(ATTEMPTS):
        process = await cluster.start(
            log.stem,
            *("ray", "start", *options, "--node-ip-address", NODES[number], "--num-cpus=1", "--block"),
            *("--object-store-memory=100000000", "--min-worker-port=0", "--max-worker-port=0"),
            *(f"--{agent}-port={free_port()}" for agent in AGENTS),  # Ray's defaults are for one node a machine
            **environ,
        )
        await until(lambda: process.returncode is not None or RUNS in log.read_text(), timeout_s=START_S)  # noqa: B023 - awaited here
        if process.returncode is None:
            cluster.nodes.append(process)
            return
    raise AssertionError(cluster.log)


async def _deploy(cluster: RayCluster, gcs: str, file: Path) -> None:
    process = await cluster.start("serve", "serve", "run", "--address", gcs, "--non-blocking", str(file))
    assert await process.wait() == 0, cluster.log


async def _end(process: asyncio.subprocess.Process) -> None:
    """End it with all that is below it, at once: Ray's own way takes a minute, and here nothing has to be kept."""
    if process.returncode is not None:
        return
    below = descendants(process.pid)
    process.kill()
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await process.wait()
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), timeout_s=20)


def _config(grpc_port: int, autoscaling: Mapping[str, Any]) -> dict[str, Any]:
    config = yaml.safe_load(FILE.read_text())
    config["http_options"]["port"] = free_port()
    config["grpc_options"]["port"] = grpc_port
    (deployment,) = config["applications"][0]["deployments"]
    deployment["ray_actor_options"]["num_cpus"] = 1
    deployment["autoscaling_config"].update(autoscaling)
    return config
