"""LLM gateways of others before one upstream, each as its makers say that it is started, on the row's core."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import yaml

from tests.bench.suite.bench import Bench
from tests.bench.suite.peers import installed, missing
from tests.bench.suite.servers import HOST, KEY, Target, answers, process
from tests.kit.serving import free_port

PATH: Final = "/v1/chat/completions"
JSON: Final = {"content-type": "application/json"}
BEARER: Final = {**JSON, "authorization": f"Bearer {KEY}"}
LITELLM_KEY: Final = "sk-bench"  # its keys must begin so


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a peer is started. `command`: for its environment, the upstream, its port, and the row's folder."""

    peer: str
    command: Callable[[Path, str, int, Path], Sequence[str]]
    headers: Callable[[str], Mapping[str, str]] = lambda _: BEARER
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _sglang(*more: str) -> Callable[[Path, str, int, Path], Sequence[str]]:
    def command(own: Path, upstream: str, port: int, _: Path) -> Sequence[str]:
        listens = ("--host", HOST, "--port", str(port), "--prometheus-port", str(free_port()))
        start = (str(own / "bin" / "python"), "-m", "sglang_router.launch_router")
        return (*start, "--worker-urls", upstream, "--policy", "round_robin", *listens, *more)

    return command


def _vllm(own: Path, upstream: str, port: int, _: Path) -> Sequence[str]:
    listens = ("--host", HOST, "--port", str(port), "--prometheus-port", str(free_port()))
    return (str(own / "bin" / "vllm-router"), "--worker-urls", upstream, "--policy", "round_robin", *listens)


def _portkey(own: Path, _: str, port: int, __: Path) -> Sequence[str]:
    script = own / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    return ("node", str(script), f"--port={port}", "--headless")


def _litellm(own: Path, upstream: str, port: int, folder: Path) -> Sequence[str]:
    endpoint = {"model": "openai/m", "api_base": f"{upstream}/v1", "api_key": "none"}
    config = folder / "litellm.yaml"
    document = {
        "model_list": [{"model_name": "general_llm", "litellm_params": endpoint}],
        "general_settings": {"master_key": LITELLM_KEY},
    }
    config.write_text(yaml.safe_dump(document))
    listens = ("--host", HOST, "--port", str(port), "--num_workers", "1")
    return (str(own / "bin" / "litellm"), "--config", str(config), *listens)


ROUTERS: Final = {
    "sglang-router": Router(peer="sglang-router", command=_sglang()),
    "sglang-router, quiet": Router(peer="sglang-router", command=_sglang("--log-level", "warn")),
    "vllm-router": Router(peer="vllm-router", command=_vllm),
    "portkey": Router(
        peer="portkey",
        command=_portkey,
        headers=lambda upstream: {
            **BEARER,
            "x-portkey-provider": "openai",
            "x-portkey-custom-host": f"{upstream}/v1",
        },
    ),
    "litellm": Router(
        peer="litellm",
        command=_litellm,
        headers=lambda _: {**JSON, "authorization": f"Bearer {LITELLM_KEY}"},
        environ={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
    ),
}


@contextlib.asynccontextmanager
async def router(bench: Bench, name: str, upstream: str, body: bytes) -> AsyncIterator[Target | None]:
    """This peer, with `body` as its request; None, and a note, where it is not installed. Raises `Failed`."""
    of = ROUTERS[name]
    own = installed(bench.peers, of.peer)
    if own is None:
        bench.note(missing(of.peer))
        yield None
        return
    port = free_port()
    target = Target(name=name, url=f"http://{HOST}:{port}{PATH}", body=body, headers=of.headers(upstream))
    async with process(
        of.command(own, upstream, port, bench.folder),
        cores=(bench.core,),
        log=bench.folder / f"{name}-{port}.log",
        ready=lambda: answers(target),
        environ=of.environ,
    ) as pid:
        yield dataclasses.replace(target, pid=pid)
