"""One part as a process: started in a group of its own, awaited until ready, stopped with its children."""

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from gateway.stack import probes
from gateway.stack.leftovers import identity
from gateway.stack.parts import Part
from gateway.stack.state import Identity

PROBE_EVERY_S = 0.1
KILL_WAIT_S = 5.0


class PartFailedError(Exception):
    """A part did not become ready; the text says why, in words for a person."""

    def __init__(self, part: Part, reason: str) -> None:
        super().__init__(f"{part.title} {reason}")
        self.part = part


@dataclass(slots=True)
class Backoff:
    """The waits between two starts of a part: doubling, bounded, and short again after a good while."""

    first_s: float = 0.5
    last_s: float = 10.0
    forget_after_s: float = 30.0
    _next_s: float = field(default=0.0, init=False)

    def after(self, lived_s: float) -> float:
        """How long to wait before the next start of a part that was ready for `lived_s`."""
        if lived_s >= self.forget_after_s:
            self._next_s = 0.0
        wait = self._next_s or self.first_s
        self._next_s = min(wait * 2, self.last_s)
        return wait


@dataclass(slots=True, kw_only=True)
class Child:
    """A running part. Its process leads a session and group of its own: a signal reaches all its children."""

    part: Part
    process: asyncio.subprocess.Process
    identity: Identity
    started_at: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        """Its process id, which is its group's too."""
        return self.process.pid

    def age_s(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.started_at

    async def exited(self) -> str:
        """Wait for its end; how it ended, in words."""
        return how_it_ended(await self.process.wait())

    async def become_ready(self) -> str:
        """Wait until it is ready: the probe's note. `PartFailedError` when it dies or takes too long."""
        exit_task = asyncio.ensure_future(self.exited())
        try:
            while self.age_s() < self.part.ready_within_s:
                answer = await probes.ask(self.part.ready)
                # An answer counts only while our process lives: another server could hold the same port.
                if exit_task.done():
                    raise PartFailedError(self.part, f"did not start: it {exit_task.result()}")
                if answer.ready:
                    return answer.note
                await asyncio.wait({exit_task}, timeout=PROBE_EVERY_S)
        finally:
            exit_task.cancel()
        raise PartFailedError(self.part, f"was not ready after {self.part.ready_within_s:.0f} s")

    async def stop(self, *, at_once: asyncio.Event) -> None:
        """SIGTERM to its own process; SIGKILL to the group after its grace time, or when `at_once` is set.

        The group is always swept at the end: a child that outlived its parent does not stay.
        """
        with contextlib.suppress(ProcessLookupError):
            if self.process.returncode is None and not at_once.is_set():
                self.process.terminate()
        waiting = {asyncio.ensure_future(self.process.wait()), asyncio.ensure_future(at_once.wait())}
        await asyncio.wait(waiting, timeout=self.part.grace_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        self.kill_group()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_WAIT_S):
                await self.process.wait()

    def kill_group(self) -> None:
        """SIGKILL to whatever is left of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


async def start(part: Part, *, log: Path, append: bool) -> Child:
    """Start a part with its output in `log`; raises `PartFailedError` when it cannot even be started."""
    try:
        if part.prepare is not None:
            await asyncio.to_thread(part.prepare)
        with log.open("ab" if append else "wb") as output:
            process = await asyncio.create_subprocess_exec(
                *part.command,
                env=dict(part.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise PartFailedError(part, f"could not be started: {error.strerror or error}") from error
    return Child(part=part, process=process, identity=identity(process.pid) or Identity(pid=process.pid, started=0))


def how_it_ended(code: int) -> str:
    """A return code in words: `exited with code 1`, `was ended by SIGKILL`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def last_lines(log: Path, count: int = 15) -> list[str]:
    """The last lines of a log, for a person who asks why."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 64 * 1024))
        return file.read().decode(errors="replace").splitlines()[-count:]
    return []
