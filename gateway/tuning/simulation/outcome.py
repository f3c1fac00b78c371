"""What came of a simulated world, in the form of a report. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.tuning.report import Report, ServerReport, Tally, class_report, timeline
from gateway.tuning.simulation.world import SimulatedTraffic, World
from gateway.tuning.traffic import TrafficClass
from local_runtime.repository.model_config import DirectStrategy, ModelConfig
from local_runtime.scheduling.stats import ModelStatistics

NOTES: Final = (
    "simulated: the gateway's own code, and the machines' CPUs and networks beyond the curves' overhead, cost no time",
)
Counts = dict[tuple[str, str], ModelStatistics]
"""By backend and model: what all its replicas have counted by some instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How it went for the servers.

    Attributes:
        counts: at the begin and at the end of the counted time.
        busy_us: how long all instances together were at work in it, by backend and model.
        lost: sequences that died with the replica that kept them, by backend and replica, over the whole run.
    """

    counts: tuple[Counts, Counts]
    busy_us: Mapping[tuple[str, str], float]
    lost: Mapping[tuple[str, str], int]


def report_of(world: World, tallies: Sequence[Tally], course: Course, *, seed: int) -> Report:
    """The report of the counted time."""
    seconds = world.duration_s - world.warmup_s
    hourly = sum(one.usd_per_hour * one.replicas for one in world.backends.values())
    return Report(
        kind="simulation",
        title=world.title or "simulation",
        setting=dict(_setting(world, seed)),
        seconds=seconds,
        whole=class_report(tallies, name="all", seconds=seconds),
        classes=tuple(class_report([tally], name=tally.name, seconds=seconds) for tally in tallies),
        servers=tuple(_servers(world, course.counts, course.busy_us)),
        timeline=timeline(tallies),
        cost_usd=hourly * seconds / 3600 if hourly else None,
        notes=(*NOTES, *_lost(course.lost)),
    )


def _lost(lost: Mapping[tuple[str, str], int]) -> Iterator[str]:
    if lost:
        where = ", ".join(f"{'/'.join(filter(None, place))} {count}" for place, count in sorted(lost.items()))
        yield f"sequences lost with the server that kept them, in the whole run: {where}"


def _servers(
    world: World, counts: tuple[Counts, Counts], busy_us: Mapping[tuple[str, str], float]
) -> Iterator[ServerReport]:
    """Of the models that were asked for."""
    before, after = counts
    for (backend, model), last in after.items():
        first = before[backend, model]
        executions = last.execution_count - first.execution_count
        if not executions:
            continue
        sizes = {rows: count - first.batch_sizes.get(rows, 0) for rows, count in last.batch_sizes.items()}
        requests = max(1, last.success.count - first.success.count)
        queue_us = last.queue.total_us - first.queue.total_us
        compute_us = last.compute_infer.total_us - first.compute_infer.total_us
        instances = world.backends[backend].replicas * world.models[model].instances
        yield ServerReport(
            backend=backend,
            model=model,
            executions=executions,
            mean_batch=sum(rows * count for rows, count in sizes.items()) / executions,
            queue_ms=queue_us / requests / 1e3,
            compute_ms=compute_us / requests / 1e3,
            queue_share=queue_us / max(1, queue_us + compute_us),
            batch_sizes={rows: count for rows, count in sizes.items() if count},
            busy=busy_us[backend, model] / (instances * (world.duration_s - world.warmup_s) * 1e6),
        )


def _setting(world: World, seed: int) -> Iterator[tuple[str, str]]:
    """What was run, for a reader."""
    for name, backend in world.backends.items():
        yield f"backends.{name}", f"{backend.replicas} replica{'' if backend.replicas == 1 else 's'}"
    for name, model in world.models.items():
        words = (f"max_batch_size {model.config.max_batch_size}", f"instances {model.instances}")
        yield f"models.{name}", ", ".join((*words, *_batching(model.config)))
    for one in world.traffic:
        yield f"traffic.{one.traffic.name}", _how_much(one)
    for failure in world.failures:
        yield (
            f"failure at {failure.at_s:g} s",
            f"{failure.backend} {failure.replica} {failure.kind}"
            + (f" x {failure.times:g}" if failure.kind == "slow" else ""),
        )
    yield "duration_s", f"{world.duration_s:g}, of which {world.warmup_s:g} warm up"
    yield "seed", str(seed)


def _batching(config: ModelConfig) -> Iterator[str]:
    """How a model batches, in Triton's words."""
    sequences, batching = config.sequence_batching, config.dynamic_batching
    if sequences is not None:
        strategy = sequences.strategy
        if isinstance(strategy, DirectStrategy):
            yield "sequence_batching direct"
        else:
            yield f"sequence_batching oldest, max_candidate_sequences {strategy.max_candidate_sequences}"
        yield f"max_queue_delay_microseconds {strategy.max_queue_delay_microseconds}"
        yield f"max_sequence_idle_microseconds {sequences.max_sequence_idle_microseconds}"
    elif batching is None:
        yield "no dynamic_batching"
    elif batching.adaptive:
        yield "adaptive"
    else:
        yield f"max_queue_delay_microseconds {batching.max_queue_delay_microseconds}"
        if batching.preferred_batch_size:
            yield f"preferred_batch_size {', '.join(map(str, batching.preferred_batch_size))}"


def _how_much(one: SimulatedTraffic) -> str:
    """Of a class: what comes, and of how many requests each is."""
    traffic = one.traffic
    gap = f", {traffic.sequence_gap_ms:g} ms between" if traffic.sequence_gap_ms else ""
    return _arrivals(traffic) + (f", sequences of {traffic.sequence_length}{gap}" if traffic.sequence_length else "")


def _arrivals(traffic: TrafficClass) -> str:
    if traffic.concurrency:
        return f"{traffic.concurrency} callers"
    if traffic.trace:
        return f"{len(traffic.trace)} arrivals of a trace"
    ramp = f" to {traffic.ramp_to:g}" if traffic.ramp_to else ""
    return f"{traffic.rate:g}{ramp}/s, {traffic.arrivals}"
