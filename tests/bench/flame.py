"""`python -m tests.bench.flame`: where a request's microseconds go, step by step of the walk, and a flame graph.

One worker (key, limits in Redis, rules, usage, metrics and access log on) relays chats, whole or streamed, to a canned
upstream; py-spy (`pip install py-spy`) looks at its stacks. A sample counts for the deepest function of the gateway in
it: what a library does counts for who asked it. Microseconds are the worker's processor time, so that a busy machine
stretches them less than it stretches a clock's; the shares are comparable between machines, the microseconds are not.

The graph is written to `build/flame-whole.svg` or `build/flame-stream.svg`, the samples beside it.
"""

import asyncio
import contextlib
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from gateway.backends.llm.http_client import HttpClient
from tests.bench.suite.servers import cpu_s
from tests.kit.redis import RedisServer
from tests.kit.serving import KEY, children, serving
from tests.kit.upstream import DONE, completion, delta, event, json_reply, sse_head, usage_chunk

ROOT: Final = Path(__file__).resolve().parents[2]
RATE: Final = 400  # samples per second
MANY: Final = 10**9
MAX_ANSWER: Final = 1 << 20
EVENTS: Final = 100  # of each stream
ASK: Final = '{"model":"general_llm","messages":[{"role":"user","content":"hello"}]%s}'
LIMITS: Final = [{"per": "minute", "requests": MANY}, {"per": "minute", "tokens": MANY}]
SERVER: Final = "HTTP to the caller: sockets, parser"
LOOP: Final = "the event loop: sockets, timers, tasks"
STEPS: Final[Sequence[tuple[str, str]]] = (  # the first that fits; paths below the checkout
    ("gateway/http/", SERVER),
    ("gateway/api/auth.py", "door: the key"),
    ("gateway/stores/redis_keys.py", "door: the key"),
    ("gateway/core/keys.py", "door: the key"),
    ("gateway/api/", "door: headers, body, answer"),
    ("gateway/tasks/", "door: what is asked, by the contract"),
    ("gateway/recall.py", "1 recall"),
    ("gateway/core/rate_limit.py", "2 admit"),
    ("gateway/core/admissions.py", "2 admit"),
    ("gateway/stores/redis_admissions.py", "2 admit"),
    ("gateway/stores/redis_steps.py", "2 admit"),
    ("gateway/stores/redis_link.py", "2 admit"),
    ("gateway/stores/redis_script.py", "2 admit"),
    ("gateway/estimates.py", "tokens, estimated and counted"),
    ("gateway/core/tokens.py", "tokens, estimated and counted"),
    ("gateway/core/routing.py", "3 route"),
    ("gateway/core/rules/", "3 route"),
    ("gateway/core/replicas.py", "3 route"),
    ("gateway/core/strategies.py", "3 route"),
    ("gateway/core/switches.py", "3 route"),
    ("gateway/stores/redis_rules.py", "3 route"),
    ("gateway/backends/", "4 dispatch: the upstream, its HTTP and its codec"),
    ("gateway/core/sse.py", "4 dispatch: the upstream, its HTTP and its codec"),
    ("gateway/attempt.py", "4 dispatch: the attempt, gate and breaker"),
    ("gateway/gate.py", "4 dispatch: the attempt, gate and breaker"),
    ("gateway/core/", "4 dispatch: the attempt, gate and breaker"),
    ("gateway/telemetry/", "5 settle: metrics, access log"),
    ("gateway/core/watching/", "5 settle: records and usage for Redis"),
    ("gateway/stores/", "5 settle: records and usage for Redis"),
    ("gateway/cli/", LOOP),
    ("gateway/worker.py", LOOP),
    ("gateway/", "the walk itself"),
)


def main(
    stream: Annotated[bool, typer.Option(help=f"Streams of {EVENTS} events, in the place of whole answers.")] = False,
    seconds: Annotated[int, typer.Option(min=1, help="How long it is looked at, twice.")] = 10,
    in_flight: Annotated[int, typer.Option(min=1)] = 32,
    py_spy: Annotated[str, typer.Option(envvar="PY_SPY", help="The program.")] = "py-spy",
) -> None:
    """Measure; half a minute."""
    if shutil.which(py_spy) is None:
        raise SystemExit("there is no py-spy: pip install py-spy, or name it with --py-spy")
    (ROOT / "build").mkdir(exist_ok=True)
    Console().print(asyncio.run(measured(py_spy, seconds, in_flight, is_stream=stream)))


async def measured(py_spy: str, seconds: int, in_flight: int, *, is_stream: bool) -> Table:
    """The table; the graph on the way."""
    name = ROOT / "build" / ("flame-stream" if is_stream else "flame-whole")
    with RedisServer() as redis, tempfile.TemporaryDirectory() as folder:
        sections = {"limits": LIMITS, "redis": {"url": redis.url}}
        async with canned() as upstream, serving(Path(folder), upstream, **sections) as served:
            (pid,) = children(served.process.pid)
            load = Load(f"{served.url}/v1", is_stream=is_stream)
            async with load.running(in_flight):
                await asyncio.sleep(2)  # until connections and caches are there
                await sampled(py_spy, pid, seconds, name.with_suffix(".svg"), "flamegraph")
                before, spent_s = load.done, cpu_s([pid])
                await sampled(py_spy, pid, seconds, name.with_suffix(".raw"), "raw")
                done, spent_s = load.done - before, cpu_s([pid]) - spent_s
    return table(name.with_suffix(".raw").read_text(), spent_s / done * 1e6, EVENTS if is_stream else 0)


def table(samples: str, cost_us: float, events: int) -> Table:
    """What each step has of a request that costs the worker `cost_us`; of one event, where there are some."""
    steps: Counter[str] = Counter()
    for line in samples.splitlines():
        stack, _, count = line.rpartition(" ")
        steps[step_of(stack.split(";"))] += int(count)
    each = cost_us / (events or 1)
    unit = f"us of an event (streams of {events})" if events else "us of a request"
    shown = Table("step", unit, "share", title=f"{each:.1f} {unit}, {steps.total():,} samples")
    for step, count in steps.most_common():
        shown.add_row(step, f"{each * count / steps.total():.1f}", f"{count / steps.total():.1%}")
    return shown


def step_of(stack: Sequence[str]) -> str:
    """The step of a stack, outermost function first: that of its deepest function of the gateway, or of its server."""
    for frame in reversed(stack):
        if "/uvicorn/" in frame:
            return SERVER
        found = re.search(r"\((?:.*/)?(gateway/[\w/]+\.py)", frame)
        if found is not None and "/site-packages/" not in frame:
            return next(step for prefix, step in STEPS if found[1].startswith(prefix))
    return LOOP


async def sampled(py_spy: str, pid: int, seconds: int, to: Path, form: str) -> None:
    """Have py-spy look at a process, without stopping it each time."""
    options = ("--pid", str(pid), "--duration", str(seconds), "--rate", str(RATE), "--nonblocking", "--full-filenames")
    process = await asyncio.create_subprocess_exec(
        *(py_spy, "record", *options, "--format", form, "--output", str(to)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"py-spy failed:\n{said.decode()}")


class Load:
    """A closed loop; `done` counts the answers."""

    def __init__(self, base_url: str, *, is_stream: bool) -> None:
        headers: Mapping[str, str] = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        self._client = HttpClient(base_url, headers=headers)
        self._body = (ASK % (',"stream":true' if is_stream else "")).encode()
        self.done = 0

    @contextlib.asynccontextmanager
    async def running(self, in_flight: int) -> AsyncIterator[None]:
        """As long as the block; an answer that is none ends it."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask()) for _ in range(in_flight)]
                yield
                for task in tasks:
                    task.cancel()
        finally:
            await self._client.close()

    async def _ask(self) -> None:
        while True:
            async with self._client.exchange(
                "POST", "/chat/completions", body=self._body, timeout_us=30_000_000
            ) as answer:
                if answer.status != 200:
                    raise SystemExit(f"the answer was {answer.status}")
                await answer.read_all(MAX_ANSWER)
            self.done += 1


@contextlib.asynccontextmanager
async def canned() -> AsyncIterator[str]:
    """An upstream with one answer; as a stream its events come one by one, as fast as they can."""
    whole = b"".join(json_reply(200, completion("hello")))
    word, end = event(delta("word ")), event(usage_chunk()) + DONE

    class Canned(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            if b'"stream":true' not in data:  # requests here come in one piece, one at a time for each connection
                self.transport.write(whole)
                return
            self.transport.write(sse_head())
            self._go_on(EVENTS)

        def _go_on(self, left: int) -> None:
            if self.transport.is_closing():
                return
            self.transport.write(word if left else end)
            if left:
                asyncio.get_running_loop().call_soon(self._go_on, left - 1)

    server = await asyncio.get_running_loop().create_server(Canned, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


if __name__ == "__main__":
    typer.run(main)
