"""The services of docker-compose.yml as a stack for tests of any event loop.

They live in a thread's loop of their own: what an engine does meanwhile (names, health, starting again) goes on while
a test's own loop stands still or has ended.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.compose import SECRETS, ComposeStack, Service
from tests.kit.stack import Stack

GATEWAYS = ("gateway-1", "gateway-2")


@dataclass(frozen=True, slots=True)
class ComposeParts:
    """The services; what is awaited happens in their own loop."""

    compose: ComposeStack
    loop: asyncio.AbstractEventLoop

    @property
    def folder(self) -> Path:
        return self.compose.folder

    @property
    def services(self) -> Mapping[str, Service]:
        return self.compose.services

    def pid(self, part: str) -> int:
        process = self.compose.services[part].process
        assert process is not None, f"{part} was never started"
        return process.pid

    def url(self, name: str, port: int) -> str:
        return self.compose.url(name, port)

    def command_line(self, name: str) -> str:
        return self.compose.command_line(name)

    async def stop(self, name: str) -> int | None:
        return await self._there(self.compose.stop(name))

    async def start(self, name: str) -> None:
        await self._there(self.compose.start(name))

    async def health(self, name: str) -> int:
        return await self._there(self.compose.health(name))

    async def run(self, name: str, *arguments: str) -> tuple[int, str]:
        return await self._there(self.compose.run(name, *arguments))

    async def _there(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))


@contextlib.contextmanager
def composed(folder: Path) -> Iterator[Stack]:
    """Start all services in the file's order; stopped with the block, and where one does not start."""
    compose = ComposeStack(folder)
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()
    ready: Future[None] = Future()

    async def live() -> None:
        loop = asyncio.get_running_loop()
        begun.set_result((loop, asyncio.current_task()))
        with contextlib.suppress(asyncio.CancelledError):  # which is how it is ended
            async with compose.running():
                ready.set_result(None)
                await loop.create_future()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="compose") as thread:
        life = thread.submit(asyncio.run, live())
        loop, task = begun.result()
        try:
            wait([ready, life], return_when=FIRST_COMPLETED)
            if ready.done():
                yield _stack(ComposeParts(compose, loop))
        finally:
            if not life.done():
                loop.call_soon_threadsafe(task.cancel)
            life.result()


def _stack(parts: ComposeParts) -> Stack:
    def at(port: int, *names: str) -> list[str]:
        return [f"{parts.services[name].address}:{port}" for name in names]

    serve = parts.services["gateway-1"].written["command"]
    return Stack(
        parts=parts,
        data_url=parts.url("front", 8080),
        admin_url=parts.url("front", 8090),
        ops_urls=[parts.url(name, 8081) for name in GATEWAYS],
        llm_url=parts.url("llm", 8085),
        triton_url=parts.url("triton", 8000),
        key=SECRETS["GATEWAY_DEV_KEY"],
        admin_token=SECRETS["GATEWAY_ADMIN_TOKEN"],
        workers=len(GATEWAYS) * int(serve[serve.index("--workers") + 1]),
        scraped={"gateway": at(8081, *GATEWAYS), "triton": at(8002, "triton"), "llm": at(8085, "llm")},
        prometheus_url=parts.url("prometheus", 9090),
    )
