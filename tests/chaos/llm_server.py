"""An OpenAI-compatible server whose answer is a function of the prompt, as a process that can be killed.

    python -m tests.chaos.llm_server PORT LOG

A real one's answers depend on what it happens to batch them with; here each has one right answer. LOG gets a line when
a request begins and another when its answer is written: by this one process's clock, so nothing comes between.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import uvloop

from tests.chaos.answers import PROMPT_TOKENS, WORDS, words_of
from tests.kit.http_requests import Requests
from tests.kit.upstream import DONE, HOST, completion, delta, event, reply, sse_head

_USAGE = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": WORDS, "total_tokens": PROMPT_TOKENS + WORDS}


class Server(Requests):
    """One connection; requests come one after the other."""

    numbers = itertools.count(1)

    def __init__(self, log: TextIO) -> None:
        super().__init__()
        self._log = log
        self._task: asyncio.Task[None] | None = None

    def asked(self, head: bytes, body: bytes) -> None:
        if not body:  # a question for the models
            models = {"object": "list", "data": [{"id": "m", "object": "model"}]}
            self.transport.write(b"".join(reply(200, json.dumps(models).encode())))
            return
        self._task = asyncio.ensure_future(self._answer(json.loads(body)))

    async def _answer(self, asked: dict[str, Any]) -> None:
        name = f"{os.getpid()}-{next(self.numbers)}"
        self._note("began", name)
        prompt = asked["messages"][-1]["content"]
        words = words_of(prompt)
        takes_s = 0.01 + int(words[0], 16) % 50 / 1000
        if asked.get("stream"):
            await self._stream(name, words, takes_s)
        else:
            await asyncio.sleep(takes_s)
            whole = {**completion(" ".join(words)), "id": name, "usage": _USAGE}
            self._note("ended", name)
            self.transport.write(b"".join(reply(200, json.dumps(whole).encode())))

    async def _stream(self, name: str, words: list[str], takes_s: float) -> None:
        self.transport.write(sse_head())
        for number, word in enumerate(words):
            await asyncio.sleep(takes_s)
            self.transport.write(event({**delta(f" {word}" if number else word), "id": name}))
        self.transport.write(event({**delta("", finish="stop"), "id": name}))
        self.transport.write(event({**delta(""), "id": name, "choices": [], "usage": _USAGE}))
        self._note("ended", name)
        self.transport.write(DONE)

    def _note(self, what: str, name: str) -> None:
        self._log.write(f"{what}:{name} {time.monotonic():.6f};\n")
        self._log.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()


async def main(port: int, path: str) -> None:
    with Path(path).open("a") as log:  # noqa: ASYNC230 - a small local file, before anybody asks
        server = await asyncio.get_running_loop().create_server(lambda: Server(log), HOST, port)
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2]))
