"""Streams of a real LLM server, straight and through the gateway: `python -m tests.bench.llm`.

The server computes on one core, the gateway and this client share the other. A round is straight, through the gateway
and straight again, with the same prompts and the same delays, and is compared prompt by prompt. What differs between
the two straight runs is the machine's and the server's own: it puts requests together as they come, a request that
comes a moment later waits for a whole step of the others, and its sums may differ in their last bits.
"""

import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import orjson
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gateway.backends.llm.http_client import HttpClient
from gateway.core.sse import SseParser
from tests.bench.suite.servers import CHAT, is_ok, process
from tests.kit.serving import KEY, free_port, serving

STREAMS = 16
TOKENS = 32
CONTEXT = 8192  # of the server, shared out among its slots
TIMEOUT_US = 120_000_000
SPREAD_S = 1.0  # the callers come within this time
FEWEST_PAIRS = 4  # of which quartiles say something
TOPICS = (
    *("a fox", "the sea", "a clock", "winter", "a bridge", "an old map", "bread", "the moon"),
    *("a violin", "rain", "a train", "gold", "a garden", "chess", "a letter", "the desert"),
)


def main(
    rounds: int = typer.Option(8, help="Rounds of each way; one more of each is not counted."),
    streams: int = typer.Option(STREAMS, min=1, max=STREAMS, help="Streams at the same time."),
) -> None:
    """Measure; some three minutes on two cores."""
    Console().print(compared(rounds, streams))


def compared(rounds: int, streams: int = STREAMS) -> Table:
    """The table; servers of its own run meanwhile."""
    return asyncio.run(_compared(rounds, streams))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One stream as its caller saw it; seconds. `at`: when each piece of text came, from the sending of the request."""

    text: str
    at: tuple[float, ...]

    @property
    def first(self) -> float:
        return self.at[0]

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.at)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Where requests go in, and what they call the model there."""

    client: HttpClient
    model: str

    async def ask(self, prompt: str, **options: Any) -> Answer:
        """One stream to its end. What the events hold is read when all have come."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "temperature": 0,
            "seed": 1,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            **options,
        }
        extra = b"content-type: application/json\r\n"
        written, parser, events = orjson.dumps(body), SseParser(), []
        began = time.perf_counter()
        async with self.client.exchange(
            "POST", "/chat/completions", body=written, extra=extra, timeout_us=TIMEOUT_US
        ) as answer:
            if answer.status != httpx.codes.OK:
                raise SystemExit(f"the answer was {answer.status}: {(await answer.read_all(65536)).decode()}")
            while (read := await answer.read()) is not None:
                now = time.perf_counter() - began
                events += [(now, event) for event in parser.feed(read)]
        if not events or events[-1][1] != b"[DONE]":
            raise SystemExit("a stream broke")
        pieces = [(at, text) for at, event in events[:-1] if (text := _text(event))]
        return Answer(text="".join(text for _, text in pieces), at=tuple(at for at, _ in pieces))

    async def round(self, delays: Sequence[float]) -> list[Answer]:
        """One stream for each delay, which is how many seconds after the others its caller comes."""

        async def one(prompt: str, delay: float) -> Answer:
            await asyncio.sleep(delay)
            return await self.ask(prompt)

        return await asyncio.gather(*(map(one, prompts(len(delays)), delays)))


def prompts(count: int) -> list[str]:
    return [f"Tell me a story about {topic}." for topic in TOPICS[:count]]


def _text(event: bytes) -> str:
    choices = orjson.loads(event)["choices"]
    return (choices[0]["delta"].get("content") or "") if choices else ""


# --- the runs --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What was seen: by round, by prompt. `again` is straight too, as are all that the others are compared with."""

    straight: list[list[Answer]]
    through: list[list[Answer]]
    again: list[list[Answer]]


async def _compared(rounds: int, streams: int) -> Table:
    affinity = sorted(os.sched_getaffinity(0))
    ours, servers = affinity[0], affinity[-1]
    os.sched_setaffinity(0, {ours})  # the gateway inherits it
    try:
        async with _ways(servers) as ways:
            with Progress(transient=True) as progress:
                spread = await _rounds(progress, ways, rounds, lambda draw: [draw() * SPREAD_S for _ in range(streams)])
                at_once = await _rounds(progress, ways, rounds, lambda _: [0.0] * streams)
                alone = await _alone(progress, ways, streams)
    finally:
        os.sched_setaffinity(0, set(affinity))
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    title = f"{streams} streams of {TOKENS} tokens, {rounds} rounds each way; load average {load}"
    table = Table("", "straight", "gateway", "gateway - straight", "straight - straight", title=title)
    _add_rows(table, f"callers come within {SPREAD_S:g} s", spread)
    _add_rows(table, "callers come at once", at_once)
    table.add_section()
    table.add_row("[bold]one at a time, prompts computed anew")
    _add_same(table, alone)
    return table


async def _rounds(
    progress: Progress,
    ways: Sequence[Way],
    rounds: int,
    delays: Callable[[Callable[[], float]], list[float]],
) -> Rounds:
    """Straight, through the gateway, straight again, with the same delays; the first round is thrown away."""
    straight, through = ways
    seen: tuple[list[list[Answer]], ...] = ([], [], [])
    for number in progress.track(range(rounds + 1), description="together"):
        drawn = delays(random.Random(number).random)  # noqa: S311 - no secret
        for way, answers in zip((straight, through, straight), seen, strict=True):
            found = await way.round(drawn)
            if number:
                answers.append(found)
    return Rounds(straight=seen[0], through=seen[1], again=seen[2])


async def _alone(progress: Progress, ways: Sequence[Way], streams: int) -> Rounds:
    """The same with one request at a time."""
    straight, through = ways
    runs: list[list[Answer]] = []
    for way in (straight, through, straight):
        asked = progress.track(prompts(streams), description="one at a time")
        runs.append([await way.ask(prompt, cache_prompt=False) for prompt in asked])
    return Rounds(straight=[runs[0]], through=[runs[1]], again=[runs[2]])


def _add_rows(table: Table, name: str, seen: Rounds) -> None:
    table.add_section()
    table.add_row(f"[bold]{name}")
    table.add_row("first token, median ms", *_row(seen, lambda answer: [answer.first], statistics.median))
    table.add_row("gap between tokens, median ms", *_row(seen, lambda answer: answer.gaps, statistics.median))
    table.add_row("gap between tokens, p95 ms", *_row(seen, lambda answer: answer.gaps, p95))
    _add_same(table, seen)


def _add_same(table: Table, seen: Rounds) -> None:
    table.add_row("same text", "", "", _same(seen.straight, seen.through), _same(seen.straight, seen.again))


def _row(
    seen: Rounds, values: Callable[[Answer], Sequence[float]], measure: Callable[[Sequence[float]], float]
) -> list[str]:
    """The measure of each way, all rounds together, and of the paired differences the median and the middle half.

    A pair is one prompt's answers in the same round, each measured for itself.
    """

    def of(answers: Sequence[Answer]) -> float:
        return measure([value for answer in answers for value in values(answer)]) * 1e3

    def differences(pairs: Iterable[tuple[list[Answer], list[Answer]]]) -> str:
        found = sorted(of([b]) - of([a]) for one, other in pairs for a, b in zip(one, other, strict=True))
        if len(found) < FEWEST_PAIRS:
            return ""
        low, middle, high = statistics.quantiles(found, n=4)
        return f"{middle:+.2f} ({low:+.2f} to {high:+.2f})"

    straight, through = ([answer for one in rounds for answer in one] for rounds in (seen.straight, seen.through))
    return [
        f"{of(straight):.2f}",
        f"{of(through):.2f}",
        differences(zip(seen.straight, seen.through, strict=True)),
        differences(zip(seen.straight, seen.again, strict=True)),
    ]


def p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def _same(one: Sequence[list[Answer]], other: Sequence[list[Answer]]) -> str:
    """How many texts of the rounds are the same, prompt by prompt."""
    pairs = [(a.text, b.text) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


# --- the servers -----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _ways(core: int) -> AsyncIterator[tuple[Way, Way]]:
    """Straight to a server on `core`, and through a gateway; both are ended with the block."""
    with tempfile.TemporaryDirectory() as name:
        folder, url = Path(name), f"http://127.0.0.1:{free_port()}"
        options = ("--slots", str(STREAMS), "--context", str(CONTEXT), "--threads", "1")
        command = (sys.executable, "-m", "gateway.stack.llm_server", "--port", url.rpartition(":")[2], *options)
        async with (
            process(command, cores=(core,), log=folder / "llm.log", ready=lambda: is_ok(f"{url}/health")),
            serving(folder, f"{url}/v1", tasks=CHAT, limits=[{"per": "minute", "requests": 10**9}]) as gateway,
        ):
            headers = {"authorization": f"Bearer {KEY}"}
            clients = [HttpClient(f"{at}/v1", headers=headers) for at in (url, gateway.url)]
            yield Way(client=clients[0], model="m"), Way(client=clients[1], model="general_llm")
            for client in clients:
                await client.close()


if __name__ == "__main__":
    typer.run(main)
