"""Raw sockets against a running plane: bytes out, answers in, everything within a time."""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

HOST = "127.0.0.1"
QUIET_S = 3.0
"""Without a byte from the server for so long, our side is closed: longer than the 2 s that a body has here."""
BOUND_S = 60.0
"""In which every connection ends, whatever is sent: the longest documented time, 30 s for a head, twice."""
AT_ONCE = 32
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[ \r]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """What is sent on one connection: parts, with a pause of `pause_s` before each but the first.

    `most` answers may come at most: what is one request to some reader in the row is none of several to us.
    """

    name: str
    parts: Sequence[bytes]
    pause_s: float = 0.0
    most: int = 1
    patience_s: float = QUIET_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came back."""

    attack: Attack
    answer: bytes
    is_over: bool

    @property
    def statuses(self) -> list[int]:
        return [int(found) for found in _STATUS.findall(self.answer) if found != b"100"]


async def play(port: int, attacks: Sequence[Attack]) -> list[Outcome]:
    """All of them, some at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(attack: Attack) -> Outcome:
        async with room:
            return await exchanged(port, attack)

    return await asyncio.gather(*(one(attack) for attack in attacks))


async def exchanged(port: int, attack: Attack) -> Outcome:
    """One attack, and what the server said until it closed; where it says nothing, we close our side first."""
    reader, writer = await asyncio.open_connection(HOST, port)
    sending = asyncio.create_task(_send(writer, attack))
    found, is_over = b"", False
    try:
        async with asyncio.timeout(BOUND_S):
            while True:
                try:
                    async with asyncio.timeout(attack.patience_s):
                        part = await reader.read(65536)
                except TimeoutError:
                    if not sending.done():
                        continue  # a slow one goes on
                    with contextlib.suppress(OSError):
                        writer.write_eof()
                    part = await reader.read(65536)
                except ConnectionError:
                    part = b""
                if not part:
                    is_over = True
                    break
                found = (found + part)[-1_000_000:]
    except TimeoutError:
        pass
    except ConnectionError:
        is_over = True
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await sending
        writer.close()
    return Outcome(attack=attack, answer=found, is_over=is_over)


async def _send(writer: asyncio.StreamWriter, attack: Attack) -> None:
    with contextlib.suppress(ConnectionError):
        for at, part in enumerate(attack.parts):
            if at and attack.pause_s:
                await asyncio.sleep(attack.pause_s)
            writer.write(part)
            await writer.drain()


def faults(outcome: Outcome, *, also: Sequence[int] = (501, 502, 503, 504)) -> list[str]:
    """What is wrong with an outcome, in words; nothing where all is as it should be."""
    found = []
    if not outcome.is_over:
        found.append("the connection did not end in its time")
    if len(outcome.statuses) > outcome.attack.most:
        found.append(f"{len(outcome.statuses)} answers to {outcome.attack.most} requests")
    if any(status >= 500 and status not in also for status in outcome.statuses):
        found.append("a status that is not documented")
    if b"\nset-cookie: x=1" in outcome.answer.lower() or b"smuggled-answer" in outcome.answer:
        found.append("what the caller wrote has become a header, or a request, of its own")
    if b"root:x:" in outcome.answer or b"Traceback" in outcome.answer:
        found.append("what no caller may see")
    return [f"{outcome.attack.name}: {words}: {outcome.answer[:300]!r}" for words in found]
