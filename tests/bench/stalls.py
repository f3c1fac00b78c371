"""`python -m tests.bench.stalls`: what holds a worker's event loop up, and whether it is the search for garbage.

One worker (key, limits in Redis, rules, usage, metrics and access log on) relays chats to a canned upstream. It counts
the turns of its event loop that took long, by the processor time in them: others' work on the machine is not in it. At
1 in flight hardly a turn does more than one step of one request, so what is long there holds up all that wait. Then
come the searches for garbage, and, of half a second without one, what requests left in cycles, which nothing else
frees. Which task or timer it is that takes long is in the log of `gateway serve` with `PYTHONASYNCIODEBUG=1`.
"""

import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import uvloop

from gateway.http.server import bind
from gateway.settings import METRICS_DIR_ENV, load_settings
from gateway.worker import work
from tests.bench.flame import LIMITS, Load, canned
from tests.kit.redis import HOST, RedisServer
from tests.kit.serving import KEY, config
from tests.kit.wait import until

LONG_MS: Final = (1, 2, 5, 10, 20)
WARM_UP: Final = 100  # answers before it is looked at
PATIENCE_S: Final = 60.0
UNCOLLECTED_S: Final = 0.5
SHOWN: Final = 15  # kinds of garbage
WORKER: Final = "worker"  # the first word of its own command line


class Watch:
    """Of a worker, from within. It begins at a signal, and prints what it has seen as JSON."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._loop = seconds, asyncio.get_running_loop()
        self._until_s = self._turn_s = self._search_s = 0.0
        self._turns: Counter[int] = Counter()
        self._searches: defaultdict[int, list[float]] = defaultdict(list)  # by generation
        self._loop.add_signal_handler(signal.SIGUSR1, self._begin)

    def _begin(self) -> None:
        gc.callbacks.append(self._searched)
        self._turn_s, self._until_s = time.thread_time(), self._loop.time() + self._seconds
        self._loop.call_soon(self._turned)

    def _turned(self) -> None:
        """Once in each turn of the loop, which so never sleeps."""
        before_s, self._turn_s = self._turn_s, time.thread_time()
        self._turns.update([ms for ms in LONG_MS if self._turn_s - before_s > ms / 1000])
        if self._loop.time() < self._until_s:
            self._loop.call_soon(self._turned)
            return
        gc.callbacks.remove(self._searched)
        gc.collect()
        gc.disable()
        self._loop.call_later(UNCOLLECTED_S, self._tell)

    def _searched(self, phase: str, found: dict[str, int]) -> None:
        if phase == "start":
            self._search_s = time.thread_time()
        else:
            self._searches[found["generation"]].append((time.thread_time() - self._search_s) * 1000)

    def _tell(self) -> None:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(f"{type(one).__name__} {getattr(one, '__qualname__', '')}" for one in gc.garbage)
        told = {"turns": self._turns, "searches": self._searches, "left": left.most_common(SHOWN)}
        print(json.dumps(told), flush=True)


async def watched(configuration: str, fd: str, seconds: str) -> None:
    """The worker that `main` starts."""
    Watch(float(seconds))
    await work(load_settings(Path(configuration)), int(fd))


def main(
    seconds: Annotated[int, typer.Option(min=1, help="How long it is looked at.")] = 10,
    in_flight: Annotated[int, typer.Option(min=1)] = 1,
    stream: Annotated[bool, typer.Option(help="Streams, in the place of whole answers.")] = False,
) -> None:
    """Measure."""
    told = asyncio.run(measured(seconds, in_flight, is_stream=stream))
    for ms in LONG_MS:
        print(f"turns of the loop longer than {ms:>2} ms: {told['turns'].get(str(ms), 0) / seconds:6.1f} a second")
    for generation, ms in sorted(told["searches"].items()):
        print(f"garbage, generation {generation}: {len(ms) / seconds:.1f} a second, {max(ms):.1f} ms at most")
    print(f"left in cycles in {UNCOLLECTED_S} s:", *(f"{count:>7,}  {name}" for name, count in told["left"]), sep="\n")


async def measured(seconds: int, in_flight: int, *, is_stream: bool) -> Any:
    """What the worker tells."""
    with RedisServer() as redis, tempfile.TemporaryDirectory() as folder, bind(HOST, 0) as listener:
        async with canned() as upstream:
            path, *_ = config(Path(folder), upstream, limits=LIMITS, redis={"url": redis.url})
            load = Load(f"http://{HOST}:{listener.getsockname()[1]}/v1", is_stream=is_stream)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.bench.stalls", WORKER, str(path), str(listener.fileno()), str(seconds)),
                env={**os.environ, METRICS_DIR_ENV: folder, "SERVING_KEY": KEY},
                pass_fds=(listener.fileno(),),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            async with load.running(in_flight):
                await until(lambda: load.done >= WARM_UP, timeout_s=PATIENCE_S)
                process.send_signal(signal.SIGUSR1)
                told = b"" if process.stdout is None else await process.stdout.readline()
            process.terminate()
            await process.wait()
            return json.loads(told)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        uvloop.run(watched(*sys.argv[2:]))
    else:
        typer.run(main)
