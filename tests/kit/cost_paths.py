"""The process that `tests.kit.cost` starts: one worker as it is in service, asked one request at a time and counted.

The worker has the main thread; the caller and the LLM server are threads beside it, which are not counted. Everything
is on: key, limits in a real Redis, rules, usage, metrics, access log.
"""

import asyncio
import contextlib
import gc
import json
import os
import queue
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import uvloop
import yaml

from gateway.core import routing
from gateway.core.rules import RuleSet, parse_rules
from gateway.core.types import Caller, InferenceRequest
from gateway.http.server import bind
from gateway.settings import load_settings
from gateway.stores.memory_admissions import MemoryAdmissions
from gateway.stores.redis_admissions import RedisAdmissions
from gateway.stores.redis_script import connect
from gateway.wiring import wall_us
from gateway.worker import work
from local_runtime.repository.model_config import DynamicBatching
from local_runtime.scheduling.batching import Batcher
from local_runtime.scheduling.decisions import Dispatch, QueuedRequest
from tests.kit import identity_model
from tests.kit.cost_meter import Cost, Meter, cost_of
from tests.kit.plans import plan_of
from tests.kit.redis import RedisServer
from tests.kit.upstream import DONE, HOST, completion, delta, event, json_reply, sse_head, usage_chunk
from tests.kit.wanted import FOUR, MANY, wanted

COUNTED: Final = 30  # requests of each path
WARM_UP: Final = 5  # before them, and as many before the count begins
QUIET_S: Final = 0.005  # a worker that has run nothing for so long has ended a request
PATIENCE_S: Final = 60.0
KEY: Final = "counted"
RULES: Final = 200
CHAT: Final = ("/v1/chat/completions", {"model": "chat", "messages": [{"role": "user", "content": "hello"}]})
TENSOR: Final = {"name": "X", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}
TASK: Final = ("/v1/tasks/tensor", {"input": {"model": identity_model.NAME, "inputs": [TENSOR]}})

Asked = tuple[str, Mapping[str, Any]]


def main() -> None:
    """Print what each path costs, as JSON."""
    with RedisServer() as redis, tempfile.TemporaryDirectory() as folder:
        costs = {
            **of_worker(Path(folder), redis.url, configuration, Driver),
            "admission": uvloop.run(of_admission(redis.url)),
            "routing": of_routing(),
            "batcher": of_batcher(),
        }
    print(json.dumps({path: asdict(cost) for path, cost in costs.items()}))


# --- a whole worker ---------------------------------------------------------------------------------------


def of_worker(
    folder: Path, redis_url: str, configure: Callable[[Path, str, str], Path], driver: type["Driver"]
) -> dict[str, Cost]:
    """What `driver` counts of a worker that is configured so, from socket to socket."""
    costs: dict[str, Cost] = {}
    failures: list[str] = []
    with llm() as server, bind(HOST, 0) as listener, unlogged(folder / "log") as log:
        config = configure(folder, redis_url, f"http://{HOST}:{server.server_port}/v1")

        async def run() -> None:
            """Serve until the driver has ended, and with it the pipe that stands for a worker's parent."""
            asked = threading.Thread(target=drive, args=(asyncio.get_running_loop(),))
            asked.start()
            await work(load_settings(config), os.dup(listener.fileno()))
            await asyncio.to_thread(asked.join)

        def drive(loop: asyncio.AbstractEventLoop) -> None:
            try:
                costs.update(driver(loop, listener.getsockname()[1], server).costs())
            except Exception:  # noqa: BLE001 - the main thread tells of it, once the worker has stopped
                failures.append(traceback.format_exc())
            finally:
                parent.close()

        with standard_input() as parent:
            uvloop.run(run())
        sys.settrace(None)
    if failures:
        raise SystemExit(f"{failures[0]}\nThe worker's log:\n{log.read_text()[-4000:]}")
    return costs


def configuration(folder: Path, redis_url: str, llm_url: str) -> Path:
    """The worker's, with a model repository beside it."""
    model = folder / "models" / identity_model.NAME
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(identity_model.CONFIG)
    (model / "1" / "model.py").write_text(identity_model.SOURCE)
    document = {
        "server": {"drain_timeout_s": 1, "shed_after_ms": 0},
        "backends": {
            "llm": {"kind": "openai", "base_url": llm_url},
            "local": {"kind": "local", "repository": str(model.parent)},
        },
        "tasks": {"chat": {"contract": "chat"}, "tensor": {"contract": "tensor"}},
        "rules": [
            {"name": "chat", "match": {"task": "chat"}, "split": [{"backend": "llm", "model": "m"}]},
            {"name": "tensors", "match": {"task": "tensor"}, "split": [{"backend": "local", "model": "*"}]},
        ],
        "limits": [{"per": "minute", "requests": MANY}, {"per": "minute", "tokens": MANY}],
        "keys": [{"id": "counted", "tenant": "counted", "key_env": "COUNTED_KEY"}],
        "redis": {"url": redis_url},
    }
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(document))
    os.environ["COUNTED_KEY"] = KEY
    return path


class Driver:
    """The caller, and the hand of the LLM server: `chat`, `chat_stream`, `chat_event` and `task`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, port: int, server: "LlmServer") -> None:
        self._loop = loop
        self._caller = Client(port)
        self._server = server
        self._meter = Meter(__file__)
        self._thread = os.getpid()  # the main thread's own number

    def costs(self) -> dict[str, Cost]:
        """Of all paths, one after the other."""
        for _ in range(WARM_UP):
            self._whole(CHAT)
            self._streamed(1)
            self._whole(TASK)
        garbage = {
            "chat": self._garbage(lambda: self._whole(CHAT)),
            "chat_stream": self._garbage(lambda: self._streamed(1)),
            "task": self._garbage(lambda: self._whole(TASK)),
        }
        self._loop.call_soon_threadsafe(self._meter.begin)
        costs = {
            "chat": self._usual(lambda: self._whole(CHAT)),
            "chat_stream": self._usual(lambda: self._streamed(1)),
            "chat_event": cost_of(self._streamed(WARM_UP + COUNTED)[WARM_UP:]),
            "task": self._usual(lambda: self._whole(TASK)),
        }
        return {name: replace(cost, garbage=garbage.get(name, 0)) for name, cost in costs.items()}

    def _garbage(self, ask: Callable[[], object]) -> int:
        """Objects that each request leaves in cycles; all threads' are counted, but the others leave none."""
        gc.collect()
        gc.disable()
        for _ in range(COUNTED):
            ask()
        self._reading()  # at rest
        left = gc.collect() // COUNTED
        gc.enable()
        return left

    def _usual(self, ask: Callable[[], object]) -> Cost:
        readings = []
        for _ in range(WARM_UP + COUNTED + 1):
            ask()
            readings.append(self._reading())
        return cost_of(readings[WARM_UP:])

    def _whole(self, asked: Asked) -> None:
        self._caller.send(*asked)
        self._caller.whole()

    def _streamed(self, events: int) -> list[Counter[str]]:
        """Readings after each event: the next one is sent when the worker has done all about it."""
        path, body = CHAT
        readings = []
        self._caller.send(path, {**body, "stream": True})
        for number in range(events):
            word = f"word-{number:04d}"
            self._server.parts.put((b"" if number else sse_head()) + event(delta(word)))
            self._caller.until(word.encode() + b'"')
            readings.append(self._reading())
        self._server.parts.put(event(usage_chunk()) + DONE)
        self._server.parts.put(b"")
        self._caller.until(b"\r\n0\r\n\r\n")
        return readings

    def _reading(self) -> Counter[str]:
        """The counts so far, when nothing is left to do: the worker waits, and has run nothing for a while."""
        until_s, before = time.monotonic() + PATIENCE_S, -1
        while before != (before := self._meter.total) or self._is_running():
            if time.monotonic() > until_s:
                raise TimeoutError("the worker is never at rest")
            time.sleep(QUIET_S)
        return self._meter.reading()

    def _is_running(self) -> bool:
        """Whether the worker's thread has something to run; it may wait for a processor."""
        stat = Path(f"/proc/self/task/{self._thread}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "S"


class Client:
    """One kept connection."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._socket = socket.create_connection((HOST, port), timeout=PATIENCE_S)
        self._held = b""

    def close(self) -> None:
        """Leave."""
        self._socket.close()

    def send(self, path: str, body: Mapping[str, Any], *, key: str = KEY) -> None:
        """In one piece."""
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {HOST}\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        )
        self._socket.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)

    def until(self, end: bytes) -> bytes:
        """What comes up to and with `end`."""
        while end not in self._held:
            part = self._socket.recv(65536)
            if not part:
                raise ConnectionError(f"the worker hung up: {self._held!r}")
            self._held += part
        found, end, self._held = self._held.partition(end)
        return found + end

    def whole(self, status: int = 200) -> None:
        """An answer of this status with a length."""
        head = self.until(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)\r\n", head)
        if length is None or not head.startswith(b"HTTP/1.1 %d " % status):
            raise ConnectionError(f"no such answer: {head!r} {self._held!r}")
        while len(self._held) < int(length[1]):
            self._held += self._socket.recv(65536)
        self._held = self._held[int(length[1]) :]


class LlmServer(ThreadingHTTPServer):
    """Answers chats; what it streams is put into `parts`, the end is an empty one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Chats)
        self.parts: queue.Queue[bytes] = queue.Queue()


class _Chats(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: LlmServer

    def do_GET(self) -> None:
        """It has no metrics and tells of no models."""
        self.wfile.write(b"".join(json_reply(404, {})))

    def do_POST(self) -> None:
        """An answer comes in one write, as its parts do, so that each is read at once."""
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not asked.get("stream"):
            self.wfile.write(b"".join(json_reply(200, completion("hello"))))
            return
        while part := self.server.parts.get():
            self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def llm() -> Iterator[LlmServer]:
    """The server, in threads."""
    with LlmServer() as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server
        finally:
            server.shutdown()
            serving.join()


@contextlib.contextmanager
def standard_input() -> Iterator[Any]:
    """A worker stops where its standard input ends: a file whose closing does so."""
    read, write = os.pipe()
    os.dup2(read, 0)
    os.close(read)
    with os.fdopen(write, "wb") as parent:
        yield parent


@contextlib.contextmanager
def unlogged(path: Path) -> Iterator[Path]:
    """What the process writes to stderr goes to `path`."""
    before = os.dup(2)
    with path.open("wb") as log:
        os.dup2(log.fileno(), 2)
        try:
            yield path
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)


# --- single decisions -------------------------------------------------------------------------------------


async def of_admission(redis_url: str) -> Cost:
    """Limits of all kinds and a ticket of an order, taken and given back in Redis."""
    asked = wanted(FOUR, "order")
    client = connect(redis_url)
    admissions = RedisAdmissions(client, "cost:", MemoryAdmissions(wall_us), timeout_s=PATIENCE_S)
    meter, readings = Meter(__file__), []
    meter.begin()
    for _ in range(WARM_UP + COUNTED + 1):
        admission = await admissions.admit(asked)
        admission.settle(tokens=400, nano_usd=900)  # which goes to Redis with the next one
        readings.append(meter.reading())
    sys.settrace(None)
    await admissions.close()
    await client.aclose()
    if not admission.verdict.allowed or admissions.is_degraded:
        raise SystemExit("Redis did not answer")
    return cost_of(readings[WARM_UP:])


def of_routing() -> Cost:
    """The last of many rules that differ by tenant is found, and the order of its places made."""
    split = [{"backend": "triton", "model": "m", "version": v, "weight": w} for v, w in (("1", 90), ("2", 10))]
    goal = {"split": split, "fallback": [{"backend": "local", "model": "m"}]}
    some = [{"name": f"r{i}", "match": {"task": "t", "tenant": f"acme-{i}"}, **goal} for i in range(RULES)]
    rules = RuleSet(revision=1, rules=parse_rules(some))
    caller = Caller(key_id="k", tenant=f"acme-{RULES - 1}")
    request = InferenceRequest(id="i", task="t", caller=caller, input=None, received_us=0, deadline_us=1)
    state = routing.State(why_not=lambda _: None, loads=lambda _: {"a:8001": 1, "b:8001": 2}, draw=lambda: 0.5)

    def decide() -> None:
        if plan_of(rules, request, state).rule != f"r{RULES - 1}":
            raise SystemExit("another rule was found")

    return _counted(decide)


def of_batcher() -> Cost:
    """One row comes, runs at once on the free instance, and has ended: the policy's part of it."""
    batcher, ids = Batcher(max_batch_size=8, config=DynamicBatching()), iter(range(MANY))

    def one_row() -> None:
        now_us = next(ids)
        batcher.enqueue(QueuedRequest(id=now_us, rows=1, batch_key=None, enqueued_us=now_us))
        decision = batcher.decide(now_us, free=(0,))
        if not isinstance(decision, Dispatch):
            raise SystemExit("the row did not run")
        batcher.finished(decision, now_us=now_us, compute_us=1)

    return _counted(one_row)


def _counted(call: Callable[[], object]) -> Cost:
    meter = Meter(__file__)
    readings: list[Counter[str]] = []
    meter.begin()
    for _ in range(WARM_UP + COUNTED + 1):
        call()
        readings.append(meter.reading())
    sys.settrace(None)
    return cost_of(readings[WARM_UP:])


if __name__ == "__main__":
    main()
