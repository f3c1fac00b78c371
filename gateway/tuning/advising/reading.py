"""What two looks at a stack say of each model under load -> situations, and why others say nothing. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.doctor.facts import Facts, Gate, Setup, Traffic
from gateway.core.types import Priority
from gateway.tuning.advising.situation import ENOUGH, Advice, Part, Setting, Situation
from gateway.tuning.curves import LatencyCurve

Document = Mapping[str, Any]

BATCHES_ENOUGH: Final = 10
"""Of one size: a mean of fewer says little."""

SATURATED: Final = 0.85
"""Of the instances' time: from here on the server, and not its callers, decides how many requests there are."""

OF_BOTH: Final = 5
"""Requests of either priority, from which both are there and not by chance."""

_STAGES: Final = ("compute_input", "compute_infer", "compute_output")
_ADAPTIVE: Final = "ADAPTIVE_BATCHING"
_MEANS: Final = (
    "requests come by chance (Poisson), as many as in the time that was looked at",
    "each batch takes the mean time of its size; beside it the p99 of real batches has their spread in it",
    "what a request takes between the gateway and the server is left out on both sides",
)
_ONE_SIZE: Final = "smaller batches, none of which was seen, take as long as those of {rows} rows"
_CALLERS: Final = "the server was busy, so those who asked are taken for callers who ask again at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimes:
    """Executions of one size, and their time in microseconds altogether."""

    count: int
    total_us: float


def times_of(before: Iterable[Document], after: Iterable[Document]) -> dict[str, dict[int, BatchTimes]]:
    """What `/v2/models/stats` of servers says, less what it said before: by model and rows, all versions together.

    Each document is one server's, in the same order. A version that counts anew is left out.
    """
    found: dict[str, dict[int, BatchTimes]] = {}
    for old, new in zip(before, after, strict=True):
        known = {(str(one["name"]), str(one["version"])): _sizes(one) for one in old["model_stats"]}
        for one in new["model_stats"]:
            name, then = str(one["name"]), known.get((str(one["name"]), str(one["version"])), {})
            sizes = _sizes(one)
            if any(_goes_back(was, sizes.get(rows)) for rows, was in then.items()):
                continue
            for rows, now in sizes.items():
                was = then.get(rows, BatchTimes(count=0, total_us=0.0))
                sums = found.setdefault(name, {}).get(rows, BatchTimes(count=0, total_us=0.0))
                if now.count > was.count:
                    found[name][rows] = BatchTimes(
                        count=sums.count + now.count - was.count,
                        total_us=sums.total_us + now.total_us - was.total_us,
                    )
    return found


def _goes_back(was: BatchTimes, now: BatchTimes | None) -> bool:
    return now is None or now.count < was.count or now.total_us < was.total_us


def _sizes(model: Document) -> dict[int, BatchTimes]:
    return {
        int(batch["batch_size"]): BatchTimes(
            count=int(batch["compute_infer"].get("count", 0)),
            total_us=sum(int((batch.get(stage) or {}).get("ns", 0)) for stage in _STAGES) / 1e3,
        )
        for batch in model.get("batch_stats", ())
    }


def curve_of(model: str, times: Mapping[int, BatchTimes]) -> tuple[LatencyCurve, int] | None:
    """Means by size and, where two sizes are known, the straight line through them for the sizes up to twice as large.

    The second is the largest size of which the curve says something. None where no size has enough batches.
    """
    sure = {rows: one for rows, one in sorted(times.items()) if one.count >= BATCHES_ENOUGH}
    if not sure:
        return None
    means: dict[int, float] = {}
    for rows, one in sure.items():  # a larger batch is not done sooner: that is the noise of few
        means[rows] = max(one.total_us / one.count, max(means.values(), default=0.0))
    largest = max(means)
    if len(means) > 1:
        fixed, each = _line(sure)
        means[2 * largest] = max(means[largest], fixed + each * 2 * largest)
        if 1 not in means:
            means[1] = min(means[min(means)], max(0.0, fixed + each))
    words = ", ".join(f"{rows}: {means[rows] / 1e3:.1f} ms ({one.count:,})" for rows, one in sure.items())
    curve = LatencyCurve(
        model=model,
        compute_us={rows: (us,) for rows, us in sorted(means.items())},
        source=f"rows: mean (batches), as the server counted: {words}",
    )
    return curve, 2 * largest if len(sure) > 1 else largest


def _line(times: Mapping[int, BatchTimes]) -> tuple[float, float]:
    """Least squares over all batches: what one takes by itself, and each row more; neither is below 0."""
    count = sum(one.count for one in times.values())
    mean_rows = sum(rows * one.count for rows, one in times.items()) / count
    mean_us = sum(one.total_us for one in times.values()) / count
    spread = sum(one.count * (rows - mean_rows) ** 2 for rows, one in times.items())
    along = sum((rows - mean_rows) * (one.total_us - one.count * mean_us) for rows, one in times.items())
    each = max(0.0, along / spread)
    return max(0.0, mean_us - each * mean_rows), each


def situations(
    facts: Facts, times: Mapping[tuple[str, str], Mapping[int, BatchTimes]], *, texts: Mapping[str, str]
) -> Iterator[Situation | Advice]:
    """Of each model under load, what is to be simulated, or why it is not.

    `times` are by backend and model; `texts` the configurations by the file that they are in.
    """
    for setup, traffic in facts.under_load():
        if reason := _silence(facts, setup, traffic, texts.get(setup.file, "")):
            yield Advice(subject=str(setup), because=reason)
            continue
        known = curve_of(setup.model, times.get(setup.name, {}))
        if known is None:
            reason = "its times by batch size are not known: give the HTTP address of its server (--server)"
            if setup.name in times:
                reason = f"no size of its batches came {BATCHES_ENOUGH} times: look for longer (--for)"
            yield Advice(subject=str(setup), because=reason)
            continue
        yield _situation(facts, setup, traffic, known=known)


def _silence(facts: Facts, setup: Setup, traffic: Traffic, text: str) -> str:
    """Why nothing can be said of a model; empty where something can."""
    if traffic.requests < ENOUGH:
        wait_s = math.ceil(facts.window_s * ENOUGH / traffic.requests)
        return (
            f"{traffic.requests} requests in {facts.window_s:.0f} s are too few: {ENOUGH} are needed, so at this rate "
            f"--for {wait_s}s"
        )
    if setup.steps:
        return "an ensemble has no batches of its own: see the models that it is made of"
    if setup.is_sequence:
        return "sequences are not simulated"
    if setup.faults:
        return "its configuration is wrong: see `gateway doctor`"
    if _ADAPTIVE in text:
        return "its batches are adaptive: the runtime finds the delay by itself"
    return ""


def _situation(facts: Facts, setup: Setup, traffic: Traffic, *, known: tuple[LatencyCurve, int]) -> Situation:
    curve, largest = known
    gate = next((one for one in facts.gates if one.backend == setup.backend), Gate(backend="", max_in_flight=256))
    servers = facts.servers_of(setup.backend)
    parts = _parts(facts, setup, traffic, gate)
    return Situation(
        backend=setup.backend,
        model=setup.model,
        setting=Setting(
            max_batch_size=setup.max_batch_size,
            delay_us=setup.delay_us,
            instances=setup.instances,
            is_batching=setup.is_batching,
            max_in_flight=gate.max_in_flight * gate.workers,
        ),
        curve=curve,
        parts=parts,
        servers=servers,
        workers=gate.workers,
        largest=largest,
        least=max([part.rows for part in parts]),
        preferred=setup.preferred,
        queue_timeout_us=setup.queue_timeout_us,
        qps=traffic.requests / traffic.window_s,
        at_server_ms=traffic.queue_ms + traffic.compute_ms,
        file=setup.file,
        assumes=(
            *_MEANS,
            *((_CALLERS,) if any(part.callers for part in parts) else ()),
            *((_ONE_SIZE.format(rows=largest),) if len(curve.compute_us) == 1 and largest > 1 else ()),
        ),
    )


def _parts(facts: Facts, setup: Setup, traffic: Traffic, gate: Gate) -> Sequence[Part]:
    """The traffic by priority.

    Where the server is busy, its requests are those of callers who wait for it: so many as there were at once. Of two
    priorities it is the batch ones who do, and the interactive ones come anyway.
    """
    qps, rows = traffic.requests / traffic.window_s, max(1, round(traffic.rows / traffic.requests))
    is_full = traffic.busy >= SATURATED * setup.instances * facts.servers_of(setup.backend)
    callers = max(1, round(traffic.present + (gate.waiting or 0)))
    batch = _batch_share(facts, setup)
    if not 0 < batch < 1:
        priority: Priority = "batch" if batch else "interactive"
        return (
            Part(priority=priority, callers=callers, rows=rows)
            if is_full
            else Part(priority=priority, rate=qps, rows=rows),
        )
    others = Part(priority="batch", callers=max(1, round(callers * batch)), rows=rows)
    return (
        Part(priority="interactive", rate=qps * (1 - batch), rows=rows),
        others if is_full else Part(priority="batch", rate=qps * batch, rows=rows),
    )


def _batch_share(facts: Facts, setup: Setup) -> float:
    """How many of the model's last requests can wait, 0 to 1; those of an ensemble are its steps' as well."""
    counts = {"interactive": 0, "batch": 0}
    for one in facts.requests:
        if any(below.name == setup.name for below in facts.below((one.backend, one.model))):
            counts["batch" if one.priority == "batch" else "interactive"] += one.stands_for
    whole = sum(counts.values())
    if not whole:
        return 0.0
    if min(counts.values()) < OF_BOTH:
        return float(counts["batch"] > counts["interactive"])
    return counts["batch"] / whole
