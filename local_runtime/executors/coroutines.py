"""The event loop of one instance of a Python model whose `execute` is a coroutine: it runs on between batches."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class CoroutineThread:
    """A thread with an event loop, started by the first coroutine, as in Triton.

    Args:
        name: of the thread.
        enter: called first in the thread.
    """

    def __init__(self, *, name: str, enter: Callable[[], None]) -> None:
        self._name = name
        self._enter = enter
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        """Run the coroutine; its result, when it has one."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A daemon: a model that never returns must not keep the process from ending.
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self, *, timeout_s: float = 2) -> None:
        """Cancel what still runs and end the thread; one that does not end in time is left behind."""
        if self._loop is None or self._thread is None:
            return
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self._enter()
        asyncio.set_event_loop(loop)
        try:
            self._run_until_stopped(loop)
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()

    @staticmethod
    def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # A coroutine raised it, who waits for that one learns it; asyncio would end the loop for all others.
                continue
            return
