"""Order over several gateway processes under fire: callers leave, a process is killed, and every key goes on in order.

Tests make small runs, `python -m tests.bench.admission` large ones.
"""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis

from tests.kit.replica_runs import all_of, at_rest, keys
from tests.kit.replicas import Answer, Execution, Replica, Rounds, Workshop, all_workers, replicas

LEAVES: Final = 0.1  # of all callers
KILL_AT: Final = 0.4  # of all requests
LEAVING_ROUNDS: Final = 2  # from a peer's leaving until our loop says so, or an answer that nobody takes is written
UNSURE: Final = ("ordering_unavailable",)  # on a machine so busy that Redis seems late

MODES: Final = ("serial", "release")  # a task for each, of the same name


@dataclass(slots=True)
class Line:
    """What became of the requests with one ordering key: answers by their mark, and the marks that got none."""

    answers: dict[str, Answer] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)


async def order_run(
    folder: Path,
    redis_url: str,
    client: Redis,
    prefix: str,
    *,
    workers: int,
    names: int,
    each: int,
    seed: int = 0,
) -> str:
    """Three processes, `each` requests under each of `names` ordering keys; one process is killed on the way.

    Half of the keys are served in the one mode, half in the other. Returns what became of all, in a line.
    """
    rounds = Rounds()
    sections: dict[str, Any] = {
        "keys": keys({"order": []}),
        "tasks": {mode: {"contract": "chat", "timeout_ms": 60_000} for mode in MODES},  # longer than a lease
        "rules": [
            {
                "name": mode,
                "match": {"task": mode},
                "split": [{"backend": "llm", "model": "m"}],
                "ordering": {"mode": mode},
            }
            for mode in MODES
        ],
    }
    async with (
        Workshop(rounds) as workshop,
        replicas(
            folder, workshop.base_url, [redis_url] * 3, prefix, workers=workers, rounds=rounds, **sections
        ) as running,
    ):
        await all_workers(client, prefix, 3 * workers)
        began_s = time.monotonic()
        lines = await _fire(running, names=names, each=each, draw=random.Random(seed))  # noqa: S311 - keeps no secret
        took_s = time.monotonic() - began_s
        alive = [one for one in running if not one.is_killed]
        told = await at_rest(
            client, prefix, poke=lambda: alive[0].ask("probe", key="order", task="serial", ordering_key="probe")
        )
    for name, line in lines.items():
        check_tickets(line, told.numbers[f"order:{name}"])
        if name.startswith("serial"):
            check_executions(line, [one for one in workshop.log if one.mark.startswith(f"{name}/")])
        else:
            check_releases(line)
    answered, left, cut, unsure = (
        sum(len(getattr(line, what)) for line in lines.values()) for what in ("answers", "left", "cut", "unsure")
    )
    return (
        f"{answered:,} answered in {took_s:.1f} s, {left} callers left, {cut} lost their process, "
        f"{unsure} refused; up to {workshop.most_running} at once"
    )


async def _fire(running: Sequence[Replica], *, names: int, each: int, draw: random.Random) -> dict[str, Line]:
    """All requests, in random turn over keys and processes; at `KILL_AT` a process dies."""
    lines = {f"{MODES[number % 2]}-{number}": Line() for number in range(names)}
    order = [name for name in lines for _ in range(each)]
    draw.shuffle(order)

    async def one(number: int) -> None:
        if number == int(len(order) * KILL_AT):
            running[0].kill()
        name = order[number]
        replica = draw.choice([one for one in running if not one.is_killed])
        await _ask(replica, lines[name], name, f"{name}/{number}", draw)

    await all_of(len(order), 4 * names, one)
    return lines


async def _ask(replica: Replica, line: Line, name: str, mark: str, draw: random.Random) -> None:
    what, mode = f"{mark} ms={draw.randrange(8)}", name.partition("-")[0]
    asking = asyncio.ensure_future(replica.ask(what, key="order", task=mode, ordering_key=name))
    if draw.random() < LEAVES:
        await asyncio.wait((asking,), timeout=draw.random() * 0.05)
        if asking.cancel():
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await asking
            line.left.add(mark)
            return
    try:
        answer = await asking
    except OSError:
        assert replica.is_killed
        line.cut.add(mark)
        return
    if answer.code in UNSURE:
        line.unsure.add(mark)
        return
    assert answer.status == 200, answer
    line.answers[mark] = answer


# --- what must hold --------------------------------------------------------------------------------------


def check_tickets(line: Line, issued: int) -> None:
    """Each answer has a ticket of its own, and those that nobody has seen are of requests that got no answer."""
    tickets = {answer.ticket for answer in line.answers.values()}
    assert len(tickets) == len(line.answers)
    assert min(tickets) >= 1
    assert max(tickets) <= issued
    assert issued - len(tickets) <= len(line.left) + len(line.cut) + len(line.unsure)


def check_executions(line: Line, log: Sequence[Execution]) -> None:
    """`serial`: executed one after another in the order of tickets, the unseen ones where a ticket is missing."""
    for before, after in itertools.pairwise(log):
        assert before.ended <= after.began + (0 if before.mark in line.answers else LEAVING_ROUNDS), (before, after)
    assert {one.mark for one in log} >= set(line.answers)
    assert len({one.mark for one in log}) == len(log), "something was executed twice"
    last, unseen = 0, 0
    for execution in log:
        if execution.mark not in line.answers:
            unseen += 1
            continue
        ticket = line.answers[execution.mark].ticket
        assert ticket > last + unseen, f"{execution.mark} has ticket {ticket} and came after {last}"
        last, unseen = ticket, 0


def check_releases(line: Line) -> None:
    """`release`: no answer began to come before those with smaller tickets had come to their ends."""
    answers = sorted(line.answers.values(), key=lambda answer: answer.ticket)
    for before, after in itertools.pairwise(answers):
        assert before.last <= after.first, (before, after)
