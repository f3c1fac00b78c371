"""How long a server takes for batches of each size, and for the way there and back, measured by asking it.

Nothing of a run that is predicted is in it. Batches of each size run one after another without a gap, out of twice as
many callers as a batch has rows: what it costs to take and to answer requests while the model computes is in their
times, as it is near capacity. The way is what a lone request takes beyond the time of a batch of one and the delay.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from gateway.tuning.curves import LatencyCurve
from gateway.tuning.load import runner
from gateway.tuning.load.outcomes import Outcome, Target
from gateway.tuning.report import OK
from gateway.tuning.traffic import TrafficClass
from tests.bench.simulation.engines import Engine
from tests.bench.simulation.subjects import DELAY_US, SETTINGS, SIZES, Subject

BATCHES = 16  # of each size at least, beyond those that are not counted
NOT_COUNTED = 3
LONE_SHARE = 0.4  # of the time somebody is served, where requests shall be alone
LONE_RATE = 40.0
LONE = 24  # at least
WAYS = 64


@dataclass(frozen=True)
class Timed:
    """A target, and how long it took from when requests were due, in microseconds."""

    target: Target
    took_us: list[float] = field(default_factory=list)

    async def send(self, due: float, /) -> Outcome:
        outcome = await self.target.send(due)
        assert outcome.code == OK, outcome.code
        self.took_us.append((time.monotonic() - due) * 1e6)
        return outcome


async def batches_us(target: Target, rows: int, *, seconds: float) -> list[float]:
    """How long each batch took, from the end of the one before it."""
    ended: list[float] = []

    async def caller(count: int) -> None:
        for _ in range(count):
            outcome = await target.send(0.0)
            assert outcome.code == OK, outcome.code
            ended.append(time.monotonic())

    async def turns(count: int) -> list[float]:
        ended.clear()
        await asyncio.gather(*(caller(count) for _ in range(2 * rows)))
        firsts = ended[::rows]
        return [(later - earlier) * 1e6 for earlier, later in itertools.pairwise(firsts)][NOT_COUNTED:]

    pilot = fmean(await turns(NOT_COUNTED + 2))
    batches = max(BATCHES, round(seconds * 1e6 / pilot)) + NOT_COUNTED
    return await turns((batches + 1) // 2 + 1)


async def curve_us(engine: Engine, subject: Subject, *, seconds: float) -> dict[int, list[float]]:
    """By size."""
    return {rows: await batches_us(await engine.target(subject.full(rows)), rows, seconds=seconds) for rows in SIZES}


def drift(before: Mapping[int, Sequence[float]], after: Mapping[int, Sequence[float]]) -> float:
    """Of the size whose mean time changed most; 0.1: it takes a tenth longer than before."""
    return max((fmean(after[rows]) / fmean(before[rows]) - 1 for rows in SIZES), key=abs)


async def lone_us(engine: Engine, subject: Subject, setting: str, *, alone_us: float, seconds: float) -> list[float]:
    """What requests that meet nobody take under a setting."""
    timed = Timed(await engine.target(subject.served(setting)))
    rate = min(LONE_RATE, LONE_SHARE * 1e6 / (alone_us + DELAY_US))
    traffic = TrafficClass(rate=rate, arrivals="constant")
    await runner.run(timed, [traffic], duration_s=max(seconds, (LONE + NOT_COUNTED + 1) / rate))
    return timed.took_us[NOT_COUNTED:]


def curve_of(
    subject: Subject, setting: str, parts: Sequence[Mapping[int, Sequence[float]]], lone: Sequence[float]
) -> LatencyCurve:
    """Out of several measurements of the batches, and of lone requests."""
    compute = {rows: tuple(sorted(one for part in parts for one in part[rows])) for rows in SIZES}
    plain = LatencyCurve(model=subject.name, compute_us=compute)
    alone = LatencyCurve(model="alone", compute_us={1: tuple(sorted(lone))})
    delay_us = SETTINGS[setting][1]
    shares = [(step + 0.5) / WAYS for step in range(WAYS)]
    # Share by share, for the slow ones of both are slow for the same reason: somebody else had the processor.
    way = sorted(max(0.0, alone.at(1, share) - plain.at(1, share) - delay_us) for share in shares)
    return LatencyCurve(
        model=subject.name,
        compute_us=compute,
        overhead_us=tuple(way),
        source=f"tests.bench.simulation, {subject.title}, {setting}",
    )
