"""All parts together: start them, watch them, start again what dies, stop them in reverse order.

Each part has one task that owns its process for its whole life. The supervisor owns the tasks: whatever ends
the stack (a signal, a part that does not start, a bug) goes through the same `finally`.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.stack import display as shown
from gateway.stack import process
from gateway.stack.display import Display
from gateway.stack.leftovers import identity, remove_shared_memory
from gateway.stack.parts import Part
from gateway.stack.process import Backoff, Child, PartFailedError
from gateway.stack.state import Identity, Leftovers, RunDir, write_json, write_pids

SUPERVISOR = "supervisor"


@dataclass(slots=True)
class Stops:
    """What was asked from outside: `once` to stop, `twice` to stop at once."""

    once: asyncio.Event = field(default_factory=asyncio.Event)
    twice: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(self) -> None:
        """A signal came."""
        (self.twice if self.once.is_set() else self.once).set()


@contextlib.contextmanager
def signals(stops: Stops) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP ask `stops` while this is open."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stops.ask)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class Supervisor:
    """Runs the parts of one stack.

    Args:
        parts: in the order of their start; `after` may only name earlier ones.
        run: where the records and logs go; the caller holds its lock.
        run_id: the mark of this run.
        addresses: the fields of `stack.json`, without `pids`.
        display: what a person sees.
        on_ready: called once when all parts are ready, after `stack.json` was written.
        backoff: makes the waits between two starts of one part.
    """

    def __init__(
        self,
        *,
        parts: Sequence[Part],
        run: RunDir,
        run_id: str,
        addresses: Mapping[str, Any],
        display: Display,
        on_ready: Callable[[], None] = lambda: None,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._parts = tuple(parts)
        self._run = run
        self._run_id = run_id
        self._addresses = addresses
        self._display = display
        self._on_ready = on_ready
        self._backoff = backoff
        self._children: dict[str, Child] = {}
        self._starting: set[asyncio.Task[Child]] = set()
        self._ready = {part.name: asyncio.Event() for part in parts}
        self._up = False

    async def run(self, stops: Stops) -> None:
        """Start everything and watch it until a stop is asked for; `PartFailedError` if the start fails."""
        tasks = [asyncio.create_task(self._tend(part), name=part.name) for part in self._parts]
        asked = asyncio.create_task(stops.once.wait())
        try:
            with self._display:
                await _first(asked, asyncio.gather(*(one.wait() for one in self._ready.values())), tasks)
            if not asked.done():
                self._up = True
                self._record()
                self._on_ready()
                await _first(asked, None, tasks)
        finally:
            self._run.stack.unlink(missing_ok=True)
            for task in (asked, *tasks):
                task.cancel()
            await asyncio.gather(asked, *tasks, *self._starting, return_exceptions=True)
            await self._stop(stops)

    async def _tend(self, part: Part) -> None:
        """Own one part: start it, and start it again whenever it dies, with growing waits."""
        for name in part.after:
            if name in self._ready:
                await self._ready[name].wait()
        backoff = self._backoff()
        again = False
        while True:
            lived_s, why = await self._live_once(part, again=again)
            wait_s = backoff.after(lived_s)
            self._display.say(f"{part.title} {why}; it starts again in {wait_s:g} s ({self._run.log(part.name)})")
            await asyncio.sleep(wait_s)
            again = True

    async def _live_once(self, part: Part, *, again: bool) -> tuple[float, str]:
        """One life of a part: how long it was ready, how it ended. Raises while the stack is not up yet."""
        try:
            child = await self._start(part, again=again)
            note = await child.become_ready()
        except PartFailedError as failed:
            if not self._up:
                self._display.show(part.name, shown.FAILED)
                raise
            await self._discard(part.name)
            return 0.0, str(failed).removeprefix(f"{part.title} ")
        took_s = child.age_s()
        self._display.show(part.name, shown.READY, seconds=took_s, note=note)
        self._ready[part.name].set()
        why = await child.exited()
        await self._discard(part.name)
        if not self._up:
            self._display.show(part.name, shown.FAILED)
            raise PartFailedError(part, why)
        return child.age_s() - took_s, why

    async def _start(self, part: Part, *, again: bool) -> Child:
        self._display.show(part.name, shown.STARTING)
        # Shielded, and awaited by `run`: a process that was started is recorded also when the stop comes now.
        starting = asyncio.create_task(self._start_recorded(part, again=again))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        return await asyncio.shield(starting)

    async def _start_recorded(self, part: Part, *, again: bool) -> Child:
        child = await process.start(part, log=self._run.log(part.name), append=again)
        self._children[part.name] = child
        self._record()
        return child

    async def _discard(self, name: str) -> None:
        """Clear away a part that died or never became ready, with the children it left."""
        child = self._children.get(name)
        if child is not None:
            at_once = asyncio.Event()
            at_once.set()
            await child.stop(at_once=at_once)
            del self._children[name]

    async def _stop(self, stops: Stops) -> None:
        """Stop every process in reverse order of the start: those that depend on others first."""
        for wave in reversed(waves(self._parts)):
            async with asyncio.TaskGroup() as group:
                for part in wave:
                    if part.name in self._children:
                        group.create_task(self._stop_one(part.name, stops))
        remove_shared_memory(self._run_id)
        self._run.pids.unlink(missing_ok=True)

    async def _stop_one(self, name: str, stops: Stops) -> None:
        child = self._children.pop(name)
        self._display.show(name, shown.STOPPING)
        began = asyncio.get_running_loop().time()
        await child.stop(at_once=stops.twice)
        self._display.show(name, shown.STOPPED, seconds=asyncio.get_running_loop().time() - began)

    def _record(self) -> None:
        """Write down who runs: `pids.json` always, `stack.json` once the stack is up."""
        own = identity(os.getpid()) or Identity(pid=os.getpid(), started=0)
        processes = {name: child.identity for name, child in self._children.items()}
        write_pids(self._run, Leftovers(run_id=self._run_id, processes={**processes, SUPERVISOR: own}))
        if self._up:
            pids = {name: one.pid for name, one in processes.items()}
            write_json(self._run.stack, {**self._addresses, "pids": {**pids, SUPERVISOR: own.pid}})


def waves(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts in groups: a part stands in a later group than all those it starts after."""
    level: dict[str, int] = {}
    for part in parts:
        level[part.name] = 1 + max((level.get(name, -1) for name in part.after), default=-1)
    return [[part for part in parts if level[part.name] == number] for number in sorted(set(level.values()))]


async def _first(
    asked: "asyncio.Task[bool]", done: "asyncio.Future[Any] | None", tasks: Sequence["asyncio.Task[None]"]
) -> None:
    """Return when a stop is asked for or `done` is; raise what a part's task raised."""
    awaited: set[asyncio.Future[Any]] = {asked, *tasks}
    if done is not None:
        awaited.add(done)
    try:
        finished, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        for task in finished.intersection(tasks):
            task.result()
    finally:
        if done is not None and not done.done():
            done.cancel()
            await asyncio.gather(done, return_exceptions=True)
