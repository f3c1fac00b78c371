"""Traffic that comes whatever the answers do, in steps of so many times the capacity, and what became of it."""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.tuning.load import runner
from gateway.tuning.load.http_wire import HttpPool
from gateway.tuning.load.judging import failed
from gateway.tuning.load.outcomes import Outcome
from gateway.tuning.report import OK
from gateway.tuning.traffic import TrafficClass

BEFORE: Final = 0.5
SLICE_S: Final = 1.0
WARM_S: Final = 0.5  # of each step that is not counted: what the step before has left
FEWEST: Final = 5  # answers of a slice that tell anything
ENOUGH: Final = 1.5  # of the p99 before: it is as it was
GRACE_S: Final = 5.0
REFUSED: Final = frozenset(("http_429", "http_503", "queue_full", "rate_limited", "no_healthy_backend"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sort:
    """One sort of requests: its share of what comes, and the requests, of several tenants, by turns."""

    share: float
    requests: Sequence[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """So many times the capacity for so long; `is_alone`: of interactive ones only their part of it, and no others."""

    name: str
    times: float
    seconds: float
    is_alone: bool = False


STEPS: Final = (
    Step(name="0.5x", times=BEFORE, seconds=4),
    Step(name="1x", times=1, seconds=3),
    Step(name="2x", times=2, seconds=3),
    Step(name="alone", times=5, seconds=4, is_alone=True),
    Step(name="5x", times=5, seconds=5),
    Step(name="0.5x after", times=BEFORE, seconds=6),
)
"""The burst is the last but one."""
BURST: Final = STEPS[-2]


@dataclass(frozen=True, slots=True)
class Ended:
    """One request: when it was due, how long it took from then, what came of it, and how late it was begun."""

    due_s: float
    took_s: float
    code: str
    late_s: float = 0.0


class _Told:
    """A target that keeps what became of each request."""

    def __init__(self, pool: HttpPool, requests: Sequence[bytes]) -> None:
        self._pool = pool
        self._requests = requests
        self._next = 0
        self.ended: list[tuple[float, float, str, float]] = []

    async def send(self, due: float, /) -> Outcome:
        """One exchange."""
        self._next += 1
        late_s = time.monotonic() - due
        answer = await self._pool.exchange(self._requests[self._next % len(self._requests)])
        outcome = Outcome(ended_at=answer.ended_at) if answer.status == 200 and not answer.trouble else failed(answer)
        self.ended.append((due, answer.ended_at - due, outcome.code, late_s))
        return outcome


async def offer(
    host: str, port: int, capacity: float, sorts: Mapping[str, Sort], *, connections: int
) -> Mapping[str, list[Ended]]:
    """Send it all; what became of each sort, by the seconds since the beginning.

    Each sort has so many connections of its own: whoever waits for an answer does not wait behind another's batch.
    """
    pools = [HttpPool(host, port, limit=connections) for _ in sorts]
    rng = random.Random(1)  # noqa: S311 - the same instants in each run
    targets, classes = [], []
    for (name, sort), pool in zip(sorts.items(), pools, strict=True):
        targets.append(_Told(pool, sort.requests))
        instants = _instants(rng, capacity * sort.share, is_interactive=name == "interactive")
        classes.append(TrafficClass(name=name, trace=tuple(instants)))
    await runner.run(targets, classes, duration_s=_whole_s(), grace_s=GRACE_S)
    for pool in pools:
        await pool.close()
    first = min(due for target in targets for due, *_ in target.ended)
    return {
        name: [Ended(due - first, *others) for due, *others in target.ended]
        for name, target in zip(sorts, targets, strict=True)
    }


def _instants(rng: random.Random, rate: float, *, is_interactive: bool) -> list[float]:
    at, until, instants = 0.0, 0.0, []
    for step in STEPS:
        at, until = until, until + step.seconds
        if step.is_alone and not is_interactive:
            continue
        while (at := at + rng.expovariate(rate * step.times)) < until:
            instants.append(at)
    return instants


def _whole_s() -> float:
    return sum(step.seconds for step in STEPS)


def figures(found: Mapping[str, Sequence[Ended]], capacity: float) -> dict[str, float]:
    """Goodput by step as a share of the best step's, the p99 of interactive ones, how all ended, and the recovery."""
    goodputs, told, at = {}, dict[str, float](), 0.0
    interactive = found["interactive"]
    for step in STEPS:
        begin, end, name = at + WARM_S, at + step.seconds, step.name
        at = end
        good = [one for sort in found.values() for one in sort if _is_good(one, begin, end)]
        goodputs[name] = len(good) / (end - begin)
        told[f"goodput {name}"] = goodputs[name] / capacity
        due = [one for sort in found.values() for one in sort if begin <= one.due_s < end]
        told[f"refused {name}"] = sum(one.code in REFUSED for one in due) / max(1, len(due))
        if p99 := _p99_ms([one for one in interactive if _is_good(one, begin, end)]):
            told[f"p99 ms {name}"] = p99
    told["goodput of peak"] = goodputs[BURST.name] / max(goodputs.values())
    for quiet, name in (("0.5x", "p99 of before"), ("alone", "p99 of alone")):
        if f"p99 ms {BURST.name}" in told and told.get(f"p99 ms {quiet}"):
            told[name] = told[f"p99 ms {BURST.name}"] / told[f"p99 ms {quiet}"]
    told["recovery s"] = _recovery_s(interactive, told.get("p99 ms 0.5x", 0.0))
    every = [one for sort in found.values() for one in sort]
    told["neither answered nor refused"] = sum(one.code != OK and one.code not in REFUSED for one in every) / len(every)
    return told


def sent_late_ms(found: Mapping[str, Sequence[Ended]]) -> float:
    """How late the burst's requests were begun: the median."""
    over_s = _whole_s() - STEPS[-1].seconds
    late = [one.late_s for sort in found.values() for one in sort if over_s - BURST.seconds <= one.due_s < over_s]
    return statistics.median(late) * 1000 if late else 0.0


def _is_good(one: Ended, begin: float, end: float) -> bool:
    """Answered within the step."""
    return one.code == OK and begin <= one.due_s + one.took_s < end


def _p99_ms(ended: Sequence[Ended]) -> float | None:
    if len(ended) < FEWEST:
        return None
    return statistics.quantiles([one.took_s for one in ended], n=100, method="inclusive")[98] * 1000


def _recovery_s(interactive: Sequence[Ended], before_ms: float) -> float:
    """How long after the burst until a slice, and all after it, are as before."""
    whole_s = _whole_s()
    over_s = whole_s - STEPS[-1].seconds
    at_s, since_s = over_s, over_s
    while at_s < whole_s - SLICE_S / 2:
        part = [one for one in interactive if at_s <= one.due_s < at_s + SLICE_S]
        p99 = _p99_ms([one for one in part if one.code == OK])
        if any(one.code != OK for one in part) or (p99 is not None and p99 > ENOUGH * before_ms):
            since_s = at_s + SLICE_S
        at_s += SLICE_S
    return since_s - over_s
