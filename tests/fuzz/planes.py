"""Both planes as they run: `gateway serve` and `gateway admin` over Redis, the local runtime, scripted endpoints."""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.kit.redis import RedisServer
from tests.kit.relayed import script
from tests.kit.serving import ADMIN_TOKEN, KEY, control_plane, descendants, serving
from tests.kit.upstream import HOLD, Script, Seen, Upstream, json_reply

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "triton_models"
MAX_BODY_BYTES = 1_000_000
BODY_TIMEOUT_S = 2.0
TIMEOUT_MS = 5_000
FORESEEN = ("failed to load model", "audit_unwritten")
"""No failures of ours: what was asked for is not there; Redis took over 1 s, and the log has the entry in its stead."""
READY_WITHIN_S = 100  # three models and forty backends, on a machine that does other things too
SECTIONS: dict[str, Any] = {
    "backends": {
        "local": {
            "kind": "local",
            "repository": str(MODELS),
            "models": ["text_embedding", "image_classification", "speech_activity"],
        },
    },
    "tasks": {
        "text-embedding": {"contract": "text-embedding", "aliases": ["minilm"]},
        "image-classification": {
            "contract": "image-classification",
            "labels_file": str(MODELS / "image_classification/labels.txt"),
        },
        "speech-activity": {"contract": "speech-activity"},
        "custom_nlu": {"contract": "text-classification"},
        "tensor": {"contract": "tensor"},
        "general_llm": {"contract": "chat", "timeout_ms": TIMEOUT_MS, "attempt_timeout_ms": TIMEOUT_MS},
    },
    "rules": [
        {"name": "embed", "match": {"task": "text-embedding"}, "split": [{"backend": "local",
        "model": "text_embedding"}]},
        {
            "name": "images",
            "match": {"task": "image-classification"},
            "split": [{"backend": "local", "model": "image_classification"}],
        },
        {
            "name": "speech",
            "match": {"task": "speech-activity"},
            "split": [{"backend": "local", "model": "speech_activity"}],
        },
        {"name": "nlu", "match": {"task": "custom_nlu"}, "split": [{"backend": "llm", "model": "m"}]},
        {"name": "tensors", "match": {"task": "tensor"}, "split": [{"backend": "local", "model": "text_embedding"}]},
        {"name": "chats", "match": {"task": "general_llm"}, "split": [{"backend": "llm", "model": "m"}]},
    ],
}  # fmt: skip


class Endpoint(Upstream):
    """Answers chats as they ask; keeps the headers that came."""

    def __init__(self) -> None:
        super().__init__([HOLD])
        self.headers: set[tuple[str, str]] = set()

    def script_for(self, seen: Seen) -> Any:
        self.headers.update(seen.headers)
        try:
            stream = bool(seen.json().get("stream"))
        except (ValueError, AttributeError):
            stream = False
        return script("hi", stream=stream)


class Hostile(Upstream):
    """Answers probes as it should, so that it is asked, and every other request with its script."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.asked = 0

    def script_for(self, seen: Seen) -> Script:
        if seen.method == "GET":
            return json_reply(200, {"object": "list", "data": []})
        self.asked += 1
        return self.scripts[0]


@dataclass
class Planes:
    """Where they listen, what they are, and the endpoint behind them."""

    url: str
    admin_url: str
    key: str
    admin_token: str
    endpoint: Endpoint
    hostile: Mapping[str, Hostile]
    log: Path
    admin_log: Path
    gateway_pid: int

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def admin_port(self) -> int:
        return int(self.admin_url.rpartition(":")[2])

    def pids(self) -> list[int]:
        """The data plane's processes."""
        return [self.gateway_pid, *descendants(self.gateway_pid)]

    def memory_bytes(self) -> tuple[int, int]:
        """What the data plane's processes hold, and the most that they have held, summed."""
        held = most = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    name, _, rest = line.partition(":")
                    if name in ("VmRSS", "VmHWM"):
                        size = int(rest.split()[0]) * 1024
                        held, most = (held + size, most) if name == "VmRSS" else (held, most + size)
        return held, most

    def failures(self) -> list[str]:
        """Lines of both logs that tell of a failure of the gateway's own."""
        lines = [*self.log.read_text().splitlines(), *self.admin_log.read_text().splitlines()]
        signs = ("Traceback", "the application failed", "admin_failed", "internal_error", '"level":"error"')
        return [line for line in lines if any(s in line for s in signs) and not any(s in line for s in FORESEEN)]


@contextlib.contextmanager
def planes(hostile: Mapping[str, Script] = MappingProxyType({})) -> Iterator[Planes]:
    """Both, until the block ends, with a backend for each script; in a thread, while a synchronous caller attacks them.

    Raises what kept them from starting.
    """
    up: Future[Planes] = Future()
    loop = asyncio.new_event_loop()
    life = loop.create_task(_life(hostile, up))

    def run() -> None:
        try:
            loop.run_until_complete(life)
        except BaseException as error:  # noqa: BLE001 - told by whoever waits
            if not up.done():
                up.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield up.result(2 * READY_WITHIN_S)
    finally:
        loop.call_soon_threadsafe(life.cancel)
        thread.join(60)
        loop.close()


async def _life(hostile: Mapping[str, Script], up: Future[Planes]) -> None:
    """Tell `up` where they are, and keep them until it is cancelled."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as name, RedisServer() as redis:
        async with contextlib.AsyncExitStack() as stack:
            endpoint = await stack.enter_async_context(Endpoint())
            others = {name: await stack.enter_async_context(Hostile(script)) for name, script in hostile.items()}
            sections = _sections(endpoint, others, redis)
            running = await stack.enter_async_context(serving(Path(name), endpoint.base_url, **sections))
            admin = await stack.enter_async_context(control_plane(running.config))
            up.set_result(
                Planes(
                    url=running.url,
                    admin_url=str(admin.base_url).removesuffix("/admin/v1/"),
                    key=KEY,
                    admin_token=ADMIN_TOKEN,
                    endpoint=endpoint,
                    hostile=others,
                    log=running.log,
                    admin_log=running.config.with_suffix(".admin.log"),
                    gateway_pid=running.process.pid,
                )
            )
            await asyncio.Event().wait()


def _sections(endpoint: Upstream, hostile: Mapping[str, Hostile], redis: RedisServer) -> dict[str, Any]:
    """The configuration: each hostile endpoint is a backend with a task of its own, both of its name."""
    chat = SECTIONS["tasks"]["general_llm"]
    backends = {name: {"kind": "openai", "base_url": one.base_url} for name, one in hostile.items()}
    rules = [{"name": name, "match": {"task": name}, "split": [{"backend": name, "model": "m"}]} for name in hostile]
    return {
        "ready_within_s": READY_WITHIN_S,
        "server_more": {"max_body_bytes": MAX_BODY_BYTES, "body_timeout_s": BODY_TIMEOUT_S},
        "redis": {"url": redis.url},
        "keys": [{"id": "test", "tenant": "test", "key_env": "SERVING_KEY", "admin": True}],
        "backends": SECTIONS["backends"] | {"llm": {"kind": "openai", "base_url": endpoint.base_url}} | backends,
        "tasks": SECTIONS["tasks"] | dict.fromkeys(hostile, chat),
        "rules": [*SECTIONS["rules"], *rules],
    }
