"""One cell: traffic that was measured and the same traffic simulated, and whether the two agree."""

import gc
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from gateway.tuning.curves import LatencyCurve
from gateway.tuning.load import runner
from gateway.tuning.report import OK, Report
from gateway.tuning.simulation.run import simulate
from gateway.tuning.simulation.world import parse_world
from gateway.tuning.traffic import TrafficClass, arrivals
from tests.bench.simulation.engines import Counted, Engine
from tests.bench.simulation.subjects import MAX_BATCH_SIZE, SETTINGS, Subject

WARMUP_S: Final = 1.0
GRACE_S: Final = 20.0
LOADS: Final = (0.95, 0.7, 0.3)  # the one that calibration matters most to comes right after it
BOUNDS: Final = {"qps": 0.10, "p50": 0.15, "p99": 0.25}
DRAWS: Final = 3  # simulations of a cell, whose arrivals are the same and whose batches take other samples
FOREVER_MS: Final = 3_600_000


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Right answers per second, milliseconds, rows a batch."""

    qps: float
    p50: float
    p99: float
    mean_batch: float


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell in one round.

    Attributes:
        drift: by how much the times of batches after the run differed from those before it, of the size that did most.
        pace: how many times as long the run's own batches took as those of the calibration, by the server's count.
        predicted: with the calibrated times at the run's pace.
        calibrated: with the calibrated times as they are.
        wrong: ends other than right answers.
        notes: of the measured run.
    """

    engine: str
    model: str
    setting: str
    load: float
    round: int
    rate: float
    seconds: float
    requests: int
    drift: float
    pace: float
    wrong: Mapping[str, int]
    measured: Figures
    predicted: Figures
    calibrated: Figures
    notes: Sequence[str] = ()

    @property
    def name(self) -> tuple[str, str, str, str]:
        """All but the round."""
        return self.engine, self.model, self.setting, f"{self.load:.0%}"

    @property
    def holds(self) -> bool:
        """Within all bounds, and every request answered."""
        return holds(self.errors) and not self.wrong

    @property
    def errors(self) -> dict[str, float]:
        """By figure: how far the prediction is off, as a share of what was measured."""
        return self._errors(self.predicted)

    @property
    def calibrated_errors(self) -> dict[str, float]:
        """The same of the calibrated times as they are."""
        return self._errors(self.calibrated)

    def _errors(self, figures: Figures) -> dict[str, float]:
        return {name: getattr(figures, name) / getattr(self.measured, name) - 1 for name in BOUNDS}

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "errors": self.errors, "holds": self.holds}


def parse_cell(given: Mapping[str, Any]) -> Cell:
    """Out of `as_json`."""
    kept = {name: value for name, value in given.items() if name not in ("errors", "holds")}
    halves = {half: Figures(**given[half]) for half in ("measured", "predicted", "calibrated")}
    return Cell(**kept | halves | {"notes": tuple(given["notes"])})


def holds(errors: Mapping[str, float]) -> bool:
    return all(abs(error) <= BOUNDS[name] for name, error in errors.items())


def capacity(curve: LatencyCurve, setting: str) -> float:
    """Requests per second that an instance that never waits would answer."""
    most = MAX_BATCH_SIZE if SETTINGS[setting][0] else 1
    return max(rows / curve.mean_us(rows) for rows in range(1, most + 1)) * 1e6


def instants(rate: float, *, seed: int, seconds: float) -> tuple[float, ...]:
    """Poisson arrivals of the warm-up and of the counted time."""
    seconds += WARMUP_S
    return tuple(arrivals(TrafficClass(rate=rate), random.Random(seed), duration_s=seconds))  # noqa: S311 - no secret


async def measured(
    engine: Engine, subject: Subject, setting: str, *, trace: tuple[float, ...], seconds: float
) -> tuple[Report, Counted]:
    """The run, and what the server counted in it, warm-up included."""
    name = subject.served(setting)
    target = await engine.target(name)
    before = await engine.counted(name)
    traffic = TrafficClass(trace=trace)
    gc.collect()
    report = await runner.run(target, [traffic], duration_s=seconds, warmup_s=WARMUP_S, grace_s=GRACE_S)
    return report, (await engine.counted(name)).since(before)


def predicted(engine: str, curve: LatencyCurve, config: Path, *, trace: tuple[float, ...], seconds: float) -> Figures:
    """The same instants, simulated: the median of each figure over `DRAWS` simulations. No loop may run here."""
    world = parse_world(
        {
            "models": {"m": {"curve": curve.as_json(), "config": config.name}},
            "backends": {"server": {"engine": engine, "max_in_flight": 100_000}},
            "tasks": {"simulated": {"timeout_ms": FOREVER_MS, "attempt_timeout_ms": FOREVER_MS}},
            "traffic": [{"trace": trace}],
            "duration_s": WARMUP_S + seconds,
            "warmup_s": WARMUP_S,
        },
        folder=config.parent,
    )
    found = [
        figures(report, report.servers[0].mean_batch) for report in (simulate(world, seed=n) for n in range(DRAWS))
    ]
    return Figures(**{name: median(getattr(one, name) for one in found) for name in asdict(found[0])})


def figures(report: Report, mean_batch: float) -> Figures:
    latency = report.whole.latency
    assert latency is not None, report.whole.codes
    return Figures(qps=report.whole.qps, p50=latency.p50, p99=latency.p99, mean_batch=mean_batch)


def wrong(report: Report) -> dict[str, int]:
    """Requests that did not end well."""
    ends = {code: count for code, count in report.whole.codes.items() if code != OK}
    return ends | ({"unfinished": report.whole.unfinished} if report.whole.unfinished else {})
