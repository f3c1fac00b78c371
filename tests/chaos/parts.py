"""The parts, each with what can be done to it and undone again: real processes behind switches."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.kit import serving
from tests.kit.redis import RedisServer
from tests.kit.serving import Serving, children, free_port
from tests.kit.tcp_switch import HOST, TcpSwitch
from tests.kit.tritons import Triton
from tests.kit.wait import until_async

START_S = 90.0


class Process(Protocol):
    """What runs in a part."""

    async def kill(self) -> None:
        """SIGKILL."""

    async def start(self) -> None:
        """Start it again after `kill`, and wait until it is there."""

    async def restart(self) -> None:
        """SIGTERM, and start it anew."""

    async def pause(self) -> None:
        """SIGSTOP."""

    async def resume(self) -> None:
        """SIGCONT."""


@dataclass(slots=True)
class Part:
    """A part and the ways to it. `downs` are the switches that refuse while its process is gone."""

    process: Process
    ways: Sequence[TcpSwitch]
    downs: Sequence[TcpSwitch] = ()

    async def strike(self, action: str, late_s: float) -> None:  # noqa: C901 - one case for each action
        """Begin a fault."""
        match action:
            case "kill":
                await self.process.kill()
                for way in self.downs:  # nobody listens there now
                    await way.refuse()
            case "pause":
                await self.process.pause()
            case "restart":
                await self.process.restart()
            case "cut":
                for way in self.ways:
                    await way.refuse()
            case "swallow":
                for way in self.ways:
                    way.pause()
            case "slow":
                for way in self.ways:
                    way.delay_s = late_s

    async def heal(self, action: str) -> None:
        """End it."""
        match action:
            case "kill":
                await self.process.start()
                for way in self.downs:
                    await way.restore()
            case "pause":
                await self.process.resume()
            case "cut" | "swallow" | "slow":
                for way in self.ways:
                    await way.restore()


@dataclass(slots=True)
class RedisProcess:
    """The server keeps its data on disk, as where order and money matter."""

    server: RedisServer

    async def kill(self) -> None:
        await asyncio.to_thread(self.server.stop)

    async def start(self) -> None:
        await asyncio.to_thread(self.server.start)

    async def restart(self) -> None:
        await asyncio.to_thread(self.server.end)
        await self.start()

    async def pause(self) -> None:
        self.server.hang()

    async def resume(self) -> None:
        self.server.resume()


@dataclass(slots=True)
class TritonProcess:
    """One replica with its models."""

    triton: Triton

    async def kill(self) -> None:
        await asyncio.to_thread(self.triton.kill)

    async def start(self) -> None:
        await asyncio.to_thread(self.triton.launch)
        await asyncio.to_thread(self.triton.wait_ready)

    async def restart(self) -> None:
        await asyncio.to_thread(self.triton.stop)
        await self.start()

    async def pause(self) -> None:
        self.triton.hang()

    async def resume(self) -> None:
        self.triton.resume()


@dataclass(slots=True)
class OwnProcess:
    """A process of ours: `begin` starts it, `is_there` says whether it answers."""

    begin: Callable[[], Awaitable[asyncio.subprocess.Process]]
    port: int
    process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    async def start(self) -> None:
        self.process = await self.begin()
        await until_async(self._is_there, timeout_s=START_S)

    async def _is_there(self) -> bool:
        assert self.process is not None
        assert self.process.returncode is None, f"it ended with {self.process.returncode}"
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(HOST, self.port)
            writer.close()
            return True
        return False

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def restart(self) -> None:
        await self._end(signal.SIGTERM)
        await self.start()

    async def stop(self) -> None:
        """At the end of all."""
        if self.process is not None and self.process.returncode is None:
            await self.resume()
            await self._end(signal.SIGTERM)

    async def _end(self, number: int) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        await self.process.wait()

    async def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    async def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@dataclass(slots=True)
class Workers:
    """The gateway's workers: the younger one is struck, which its parent starts anew; the older lives on."""

    serving: Serving
    count: int
    _struck: list[int] = field(default_factory=list)

    def pids(self) -> list[int]:
        """The living, the oldest first."""
        found = children(self.serving.process.pid)
        mine = [pid for pid, command in found.items() if "gateway.worker" in command]
        return sorted(mine, key=_began)

    async def kill(self) -> None:
        os.kill(self.pids()[-1], signal.SIGKILL)

    async def start(self) -> None:
        """Wait for the one that the parent has started."""
        await until_async(self._are_all_there, timeout_s=START_S)

    async def _are_all_there(self) -> bool:
        return len(self.pids()) == self.count

    async def restart(self) -> None:
        old = self.pids()[-1]
        os.kill(old, signal.SIGTERM)

        async def is_another() -> bool:
            pids = self.pids()
            return old not in pids and len(pids) == self.count

        await until_async(is_another, timeout_s=START_S)

    async def pause(self) -> None:
        self._struck.append(self.pids()[-1])
        os.kill(self._struck[-1], signal.SIGSTOP)

    async def resume(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._struck.pop(), signal.SIGCONT)


def _began(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return sys.maxsize


def llm(log: Path) -> OwnProcess:
    """The LLM server, not started yet."""
    port = free_port()

    async def begin() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.chaos.llm_server", str(port), str(log))

    return OwnProcess(begin, port)


def control(config: Path, port: int) -> OwnProcess:
    """The control plane, not started yet."""

    async def begin() -> asyncio.subprocess.Process:
        process, _ = await serving.start(config, command="admin")
        return process

    return OwnProcess(begin, port)
