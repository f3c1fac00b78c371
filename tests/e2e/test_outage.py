"""Kill Triton under load: every answer is right or a clean 503/504, traffic goes to the fallback and returns."""

import asyncio
import os
import signal
from collections import Counter

import httpx
import numpy as np
import pytest

from tests.kit.reference import embed
from tests.kit.wait import until

pytestmark = pytest.mark.stack("up", "compose")

CLEAN = {(503, "no_healthy_backend"), (504, "deadline_exceeded")}
RATE = 20  # requests a second
TEXTS = [f"text number {i} of the outage test" for i in range(20)]


class Load:
    """Open-loop load: a request every 1/RATE seconds, whatever became of the others."""

    def __init__(self, http) -> None:
        self._http = http
        self._calls: set[asyncio.Task] = set()
        self._stop = False
        self.outcomes: list[tuple[int, str | None]] = []
        self.wrong: list[str] = []

    async def run(self) -> None:
        n = 0
        while not self._stop:
            call = asyncio.create_task(self._one(TEXTS[n % len(TEXTS)]))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            n += 1
            await asyncio.sleep(1 / RATE)
        await asyncio.gather(*self._calls)

    def stop(self) -> None:
        self._stop = True

    async def _one(self, text: str) -> None:
        try:
            answer = await self._http.post("/v1/tasks/text-embedding", json={"input": {"text": text}})
        except httpx.HTTPError as error:
            self.wrong.append(repr(error))
            return
        backend = None
        if answer.status_code == 200:
            backend = answer.json()["route"]["backend"]
            if np.array(answer.json()["output"]["embeddings"][0]) @ embed(text) < 0.9999:
                self.wrong.append(f"a wrong vector from {backend}")
        elif (answer.status_code, answer.json()["code"]) not in CLEAN:
            self.wrong.append(answer.text)
        self.outcomes.append((answer.status_code, backend))

    def last(self, backend: str, count: int = 10) -> bool:
        return len(self.outcomes) >= count and all(b == backend for _, b in self.outcomes[-count:])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_no_wrong_answer_while_triton_goes_and_comes_back(stack, http, how):
    for text in TEXTS:  # computed now, so that the load is not held up by it
        embed(text)
    load = Load(http)
    running = asyncio.create_task(load.run())
    try:
        await until(lambda: load.last("triton"), timeout_s=20)
        pid = stack.parts.pid("triton")
        os.kill(pid, how)
        await until(lambda: load.last("local"), timeout_s=30)
        if how is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        else:
            await until(lambda: stack.parts.pid("triton") != pid, timeout_s=60)  # the stack starts another
        await until(lambda: load.last("triton"), timeout_s=60)
    finally:
        load.stop()
        await running
    assert not load.wrong, Counter(load.wrong)
    assert {backend for status, backend in load.outcomes if status == 200} == {"triton", "local"}
