"""Five times as much as there is room for: what is answered, how soon, what a refusal costs, how soon it is over.

Three bottlenecks: an LLM server with few places, a model of the local runtime, and the gateway's own core. Traffic
comes whatever the answers do: 15 % interactive and 85 % batch, of four tenants by turns.
"""

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from gateway.tuning.load.http_wire import HttpPool
from tests.bench.suite import offered
from tests.bench.suite.bench import Bench, Failed, Figures, Measure, Row
from tests.bench.suite.goals import Goal
from tests.bench.suite.load import wrk
from tests.bench.suite.offered import Sort
from tests.bench.suite.routers import BEARER, PATH
from tests.bench.suite.servers import (
    CHAT,
    CHAT_RULE,
    HOST,
    KEY,
    Served,
    Target,
    chat_gateway,
    cpu_s,
    gateway,
    is_ok,
    nginx,
    process,
    resident_kib,
    worker_of,
)
from tests.kit import cost
from tests.kit.serving import free_port

SLOTS, RUNTIME, CPU = "LLM with 8 places", "local runtime", "gateway's core"
PLACES, TAKES_MS = 8, 80
MODEL_MS = 20
QUEUE = 16
TENANTS = 4
INTERACTIVE = 0.15  # at five times the capacity three quarters of it: what is to be held can be held
CONNECTIONS = 1000
IN_FLIGHT = 8
REFUSED_S = 1.0
SAMPLE_S = 0.2
LARGEST = 256 * 1024
ROUNDS = 2
SHED_MS = 100
MOST_LATE_MS = 20
SERVED = "served chat"
HELLO = {"model": "general_llm", "messages": [{"role": "user", "content": "hello"}]}
LONG = {"model": "general_llm", "messages": [{"role": "user", "content": "word " * 40}] * 120}  # dear for the gateway
MODEL = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for one in requests:
            time.sleep(%s)
            answers.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(one, "X").as_numpy())]
                )
            )
        return answers
""" % (MODEL_MS / 1000)
CONFIG = """
name: "slow"
backend: "python"
max_batch_size: 0
input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }
instance_group { count: 2 }
"""
TENSOR = {"name": "X", "datatype": "FP32", "shape": [4], "data": [1.0, 2.0, 3.0, 4.0]}
TASK_PATH = "/v1/tasks/tensor"
TASK = {"input": {"model": "slow", "inputs": [TENSOR]}}


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


ALSO: Final[Mapping[str, Any]] = {
    "server": {"max_body_bytes": LARGEST},
    "keys": [
        {"id": "bench", "tenant": "bench", "key_env": "BENCH_KEY"},
        *({"id": f"t{n}", "tenant": f"t{n}", "key_sha256": _digest(f"t{n}")} for n in range(TENANTS)),
        {"id": "few", "tenant": "few", "key_sha256": _digest("few"), "limits": [{"per": "day", "requests": 1}]},
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """A gateway, the request that it is asked, and how many a second it can answer; 0: to be found out."""

    served: Served
    path: str
    body: Mapping[str, Any]
    capacity: float = 0.0


async def measure(bench: Bench) -> None:
    """The three bottlenecks in turns, each from half the capacity to five times and back; then refusals by kind."""
    async with AsyncExitStack() as stack:
        slots, runtime, core = [
            await stack.enter_async_context(one) for one in (_slots(bench), _runtime(bench), _core(bench))
        ]
        subjects: dict[str, Measure] = {
            SLOTS: lambda: _offered(bench, slots),
            RUNTIME: lambda: _offered(bench, runtime),
            CPU: lambda: _own_core(bench, core),
        }
        await bench.in_turns(subjects, warms_up=False, rounds=1 if bench.is_quick else min(bench.rounds, ROUNDS))
        at = core.served
        refusals = {
            SERVED: lambda: _each(at, 200),
            "refused: key": lambda: _each(at, 401, key="nobody"),
            "refused: size": lambda: _each(at, 413, content="x" * LARGEST),
            "refused: limit": lambda: _each(at, 429, key="few"),
        }
        await bench.in_turns(refusals, warms_up=False, rounds=1 if bench.is_quick else bench.rounds)
    counted = await asyncio.to_thread(cost.measured)
    for name, one in counted.items():
        if name.startswith("refused_"):
            told = {"instructions": one.instructions, "of a chat": one.instructions / counted["chat"].instructions}
            bench.record(f"counted: {name.removeprefix('refused_')}", 0, told)


@asynccontextmanager
async def _slots(bench: Bench) -> AsyncIterator[_Subject]:
    """Few places, each taken for a fixed time."""
    port = free_port()
    url, log = f"http://{HOST}:{port}", bench.folder / "slots.log"
    command = (sys.executable, "-m", "tests.bench.suite.slots", str(port), str(TAKES_MS))
    llm = {"kind": "openai", "base_url": f"{url}/v1", "max_in_flight": PLACES, "max_queue_size": QUEUE}
    async with (
        process(command, cores=(bench.load_core,), log=log, ready=lambda: is_ok(url)),
        gateway(bench, backends={"llm": llm}, tasks=CHAT, rule=CHAT_RULE, also=ALSO) as served,
    ):
        yield _Subject(served=served, path=PATH, body=HELLO, capacity=PLACES / TAKES_MS * 1000)


@asynccontextmanager
async def _runtime(bench: Bench) -> AsyncIterator[_Subject]:
    """A model that takes a fixed time, in the worker's own process."""
    folder = bench.folder / "models" / "slow"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(MODEL)
    local = {"kind": "local", "repository": str(folder.parent), "max_in_flight": 2, "max_queue_size": QUEUE}
    rule = {"name": "tensors", "split": [{"backend": "local", "model": "*"}]}
    tasks = {"tensor": {"contract": "tensor"}}
    async with gateway(bench, backends={"local": local}, tasks=tasks, rule=rule, also=ALSO) as served:
        yield _Subject(served=served, path=TASK_PATH, body=TASK, capacity=2 / MODEL_MS * 1000)


@asynccontextmanager
async def _core(bench: Bench) -> AsyncIterator[_Subject]:
    """An upstream that takes no time, and requests that take the gateway long."""
    also = {**ALSO, "server": {"max_body_bytes": LARGEST, "shed_after_ms": SHED_MS}}
    async with nginx(bench) as upstream, chat_gateway(bench, upstream, also=also) as served:
        yield _Subject(served=served, path=PATH, body=LONG)


async def _own_core(bench: Bench, subject: _Subject) -> Figures:
    """What the gateway can do is found out before, in a closed loop."""
    served = subject.served
    body = json.dumps(subject.body).encode()
    target = Target(name="core", url=f"{served.url}{PATH}", body=body, headers=BEARER, pid=served.pid)
    capacity = (await wrk(bench, target, IN_FLIGHT))["rps"]
    return await _offered(bench, _Subject(served=served, path=subject.path, body=subject.body, capacity=capacity))


async def _offered(bench: Bench, subject: _Subject) -> Figures:
    at, worker = urlsplit(subject.served.url), worker_of(subject.served.pid)
    sorts = {
        name: Sort(
            share=share,
            requests=[_request(subject.path, subject.body, key=f"t{n}", priority=name) for n in range(TENANTS)],
        )
        for name, share in (("interactive", INTERACTIVE), ("batch", 1 - INTERACTIVE))
    }
    before, highest = resident_kib([worker]), 0.0
    sending = asyncio.create_task(offered.offer(HOST, at.port or 0, subject.capacity, sorts, connections=CONNECTIONS))
    while not sending.done():
        await asyncio.wait({sending}, timeout=SAMPLE_S)
        highest = max(highest, resident_kib([worker]))
    found = await sending
    if (late_ms := offered.sent_late_ms(found)) > MOST_LATE_MS:
        bench.note(
            f"The load was the limit, or had no processor in time: half of the burst's requests left {late_ms:.0f} ms "
            "late or more. Latencies have that in them, and less was offered than is said."
        )
    return {
        **offered.figures(found, subject.capacity),
        "sent late ms 5x": late_ms,
        "capacity/s": subject.capacity,
        "MiB grown": (highest - before) / 1024,
    }


def _request(path: str, body: Mapping[str, Any], *, key: str, priority: str = "interactive") -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {HOST}\r\nauthorization: Bearer {key}\r\nx-priority: {priority}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def _each(served: Served, status: int, *, key: str = KEY, content: str = "hello") -> Figures:
    """The worker's processor time for one such answer, of a few at once. Raises `Failed` for another answer."""
    body = {**HELLO, "messages": [{"role": "user", "content": content}]}
    request = _request(PATH, body, key=key)
    worker, pool = worker_of(served.pid), HttpPool(HOST, urlsplit(served.url).port or 0, limit=IN_FLIGHT)
    await pool.exchange(request)  # what uses a limit up
    done, until, before_s = 0, time.monotonic() + REFUSED_S, cpu_s([worker])

    async def caller() -> None:
        nonlocal done
        while time.monotonic() < until:
            answer = await pool.exchange(request)
            if answer.status != status:
                raise Failed(f"answered {answer.status} instead of {status}")
            done += 1

    await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
    await pool.close()
    return {"cpu us": (cpu_s([worker]) - before_s) / done * 1e6}


def _goals() -> tuple[Goal, ...]:
    found: list[Goal] = []
    for subject in (SLOTS, RUNTIME, CPU):
        found += (
            Goal(figure="goodput of peak", at="least", bound=0.9, subject=subject),
            Goal(figure="p99 of before", at="most", bound=1.5, subject=subject),
            Goal(figure="p99 of alone", at="most", bound=1.5, subject=subject),
            Goal(figure="recovery s", at="most", bound=5, subject=subject),
            Goal(figure="neither answered nor refused", at="most", bound=0, subject=subject),
        )
    found += (
        Goal(figure="cpu us", at="most", bound=0.05, subject=f"refused: {kind}", against=SERVED)
        for kind in ("key", "size", "limit")
    )
    found.append(Goal(figure="of a chat", at="most", bound=0.05, subject="counted: shed"))
    return tuple(found)


ROW = Row(name="overload", title="five times the capacity", goals=_goals(), measure=measure)
