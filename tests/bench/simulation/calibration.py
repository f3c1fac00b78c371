"""How long a server takes for batches of each size, and for the way there and back, measured by asking it.

Nothing of a run that is predicted is in it. Batches of each size run one after another without a gap, out of three
times as many callers as a batch has rows, each of which pauses for a part of a batch before it asks again: what it
costs to take and to answer requests while the model computes is in the times, as it is near capacity. The way is what
a lone request takes beyond the time of a batch of one and the delay.

Machines change their pace from one second to the next. What a server says of its own computing tells by how much: the
`pace` of a run is what its batches took, beside what batches of their sizes took in the calibration.
"""

import asyncio
import gc
import itertools
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from gateway.tuning.curves import LatencyCurve
from gateway.tuning.load import runner
from gateway.tuning.load.outcomes import Outcome, Target
from gateway.tuning.report import OK
from gateway.tuning.traffic import TrafficClass
from tests.bench.simulation.engines import Counted, Engine
from tests.bench.simulation.subjects import DELAY_US, SETTINGS, SIZES, UNBATCHED, Subject

Times = Mapping[int, Sequence[float]]
"""Of batches, in microseconds, by rows."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Batches by rows: how long each took, seen from outside, and what the server says that their computing took."""

    times: Times
    computed_us: Times


BATCHES = 8  # of each size at least, beyond those that are not counted
NOT_COUNTED = 3
CROWD = 3  # callers for each row: a batch runs, one waits, and one pauses
PAUSE = 0.8  # of a batch at most: whoever pauses is back before there is a gap
LONE_SHARE = 0.4  # of the time somebody is served, where requests shall be alone
LONE_RATE = 40.0
LONE = 48  # at least: the slowest hundredth of them is a figure of its own
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
    chance = random.Random(rows)  # noqa: S311 - no secret

    async def caller(count: int, pause_s: float) -> None:
        for _ in range(count):
            outcome = await target.send(0.0)
            assert outcome.code == OK, outcome.code
            ended.append(time.monotonic())
            if pause_s:
                await asyncio.sleep(chance.uniform(0.0, pause_s))

    async def turns(count: int, pause_s: float) -> list[float]:
        """At the beginning and at the end there are gaps: they are not counted."""
        ended.clear()
        await asyncio.gather(*(caller(count, pause_s) for _ in range(CROWD * rows)))
        firsts = ended[::rows][NOT_COUNTED:-CROWD]
        return [(later - earlier) * 1e6 for earlier, later in itertools.pairwise(firsts)]

    pilot_us = fmean(await turns(4, 0.0))
    batches = max(BATCHES, round(seconds * 1e6 / pilot_us)) + NOT_COUNTED + CROWD
    return await turns(math.ceil(batches / CROWD), PAUSE * pilot_us / 1e6)


def sizes(setting: str) -> tuple[int, ...]:
    """That batches may have under a setting."""
    return SIZES[:1] if setting == UNBATCHED else SIZES


async def measured(engine: Engine, subject: Subject, setting: str, *, seconds: float) -> Measured:
    """By size, all of them together as long as for four sizes."""
    gc.collect()  # what simulations left; the same before each run that is measured
    each_s = seconds * len(SIZES) / len(sizes(setting))
    times, computed = {}, {}
    for rows in sizes(setting):
        name = subject.full(rows)
        before = await engine.counted(name)
        times[rows] = await batches_us(await engine.target(name), rows, seconds=each_s)
        counted = (await engine.counted(name)).since(before)
        computed[rows] = [counted.compute_us / counted.requests]
    return Measured(times=times, computed_us=computed)


def drift(before: Measured, after: Measured) -> float:
    """Of the size whose mean time changed most; 0.1: it takes a tenth longer than before."""
    return max((fmean(after.times[rows]) / fmean(before.times[rows]) - 1 for rows in after.times), key=abs)


def pace(run: Counted, around: Measured) -> float:
    """How many times as long a run's batches took as those of their sizes in the calibration, by the server's count."""
    curve = LatencyCurve(model="", compute_us={rows: (fmean(times),) for rows, times in around.computed_us.items()})
    expected_us = sum(count * rows * curve.mean_us(rows) for rows, count in run.batch_sizes.items())
    return run.compute_us / expected_us


@dataclass(frozen=True, kw_only=True)
class Lone:
    """What requests that meet nobody take, and the pace of that run: a machine that is mostly idle wakes up slowly."""

    took_us: Sequence[float]
    pace: float


async def lone(engine: Engine, subject: Subject, setting: str, before: Measured, *, seconds: float) -> Lone:
    """Under a setting, right after a calibration."""
    name = subject.served(setting)
    timed = Timed(await engine.target(name))
    rate = min(LONE_RATE, LONE_SHARE * 1e6 / (fmean(before.times[1]) + DELAY_US))
    traffic = TrafficClass(rate=rate, arrivals="constant")
    counted = await engine.counted(name)
    await runner.run(timed, [traffic], duration_s=max(seconds, (LONE + NOT_COUNTED + 1) / rate))
    counted = (await engine.counted(name)).since(counted)
    return Lone(took_us=timed.took_us[NOT_COUNTED:], pace=pace(counted, before))


def together(before: Measured, after: Measured) -> Measured:
    """Two calibrations as one."""

    def both(one: Times, other: Times) -> Times:
        return {rows: [*one[rows], *other[rows]] for rows in other}

    return Measured(times=both(before.times, after.times), computed_us=both(before.computed_us, after.computed_us))


def paced(curve: LatencyCurve, pace: float) -> LatencyCurve:
    """The same where all computing takes `pace` times as long."""
    scaled = {rows: tuple(pace * one for one in times) for rows, times in curve.compute_us.items()}
    return replace(curve, compute_us=scaled)


def curve_of(subject: Subject, setting: str, times: Times, lone: Lone) -> LatencyCurve:
    """Out of the times of batches, and of lone requests."""
    compute = {rows: tuple(sorted(times[rows])) for rows in sizes(setting)}
    plain = paced(LatencyCurve(model=subject.name, compute_us=compute), lone.pace)
    alone = LatencyCurve(model="alone", compute_us={1: tuple(sorted(lone.took_us))})
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
