"""Batches: none where they are on, on where they must not be, of sizes that do not fit the instances."""

from collections.abc import Iterator
from typing import Final

from gateway.core.doctor.facts import Facts, Setup, Traffic
from gateway.core.doctor.findings import ENOUGH, HELD_SHARE, Finding

ALONE: Final = 1.1
"""Requests in a batch. Below it nine batches of ten or more held one request: batching did nothing."""

TOGETHER: Final = 2.0
"""Requests that wait before a server at once, on the average, from which two could have shared a batch. Those that run
do not count: two callers that take turns at one instance are two at once, of which one waits."""

OVERLAP: Final = 2.5
"""Instances of a server that run batches of one at once. NVIDIA's guide to optimizing Triton has two, so that copies
and work overlap; the half is the error of a short look. Measured with Triton 2.51: where fewer are busy, the next
request starts at once and nothing is lost."""

SCATTERED: Final = 1.25
"""Requests in a batch. Measured with Triton 2.51, four instances: 1.00 to 1.11 with a caller for each, 1.32 to 1.56
with two for each, as batches begin to form by themselves."""

SMALL: Final = 0.25
"""Of max_batch_size: a batch of this part can grow four times; fewer instances let it."""

FULL: Final = 0.9
"""Of max_batch_size: above it batches have no room for more (the rest is noise of arrivals)."""

SPENT: Final = 0.8
"""Of the instances' time. Measured of instances that never stood still: 0.9 to 1.1 in looks of 10 s, as servers'
counters reach the page once a second."""

PILED_SHARE: Final = 0.6
"""Of the time at a server, where batches are full: more than one batch and a half waits for each that runs. One that
waits is what keeps an instance busy (0.45 to 0.57 measured), so that this much is no fault of a full server."""


def single_batches(facts: Facts) -> Iterator[Finding]:
    """Dynamic batching is on, and batches hold one request."""
    for setup, traffic in facts.under_load():
        if not setup.is_batching or traffic.executions < ENOUGH or traffic.joined >= ALONE:
            continue
        if 2 * traffic.rows / traffic.requests > setup.max_batch_size:
            continue  # a request fills a batch by itself
        told = _single(setup, traffic, servers=facts.servers_of(setup.backend))
        if told is not None:
            cause, change, lines = told
            yield Finding(
                symptom="single-batches",
                subject=str(setup),
                severity="warning",
                seen=f"dynamic batching is on, and {traffic.executions:,} batches held {traffic.joined:.2f} requests",
                cause=cause,
                change=change,
                where=setup.file,
                lines=lines,
                numbers={
                    "requests_per_batch": traffic.joined,
                    "batches": traffic.executions,
                    "present": traffic.present,
                    "delay_us": setup.delay_us,
                    "queue_ms": traffic.queue_ms,
                    "compute_ms": traffic.compute_ms,
                },
            )


def _single(setup: Setup, traffic: Traffic, *, servers: int) -> tuple[str, str, tuple[str, ...]] | None:
    """Cause, change and lines. None where it costs nothing, or `instances_against_batches` tells it.

    A delay of 0 keeps no batch single by itself: what waits for a busy instance is joined.
    """
    if traffic.waiting >= TOGETHER * servers:
        return (
            f"{traffic.waiting:.1f} requests wait at once and do not have the same shapes",
            "send equal shapes (pad to a few lengths), or let the model take ragged ones: in its input",
            ("allow_ragged_batch: true",),
        )
    if not traffic.is_held_by(setup.delay_us) or traffic.queue_share < HELD_SHARE:
        return None
    present = traffic.present / servers
    return (
        f"the load is too low: {present:.1f} requests at once, each waited {traffic.queue_ms:.1f} ms for nobody",
        "take the delay away: a busy instance lets batches grow without one",
        ("dynamic_batching { }",),
    )


def stateful_batched(facts: Facts) -> Iterator[Finding]:
    """A model that keeps state is batched by a scheduler that knows no sequences."""
    tasks = {
        setup.name: task.name
        for task in facts.tasks
        if task.is_sequence
        for place in task.places
        for setup in facts.below(place)
    }
    for setup in facts.setups:
        reason = setup.faults.get("sequence_batching", "")
        if not reason and setup.is_batching and not setup.is_sequence and setup.name in tasks:
            reason = (
                f"the task '{tasks[setup.name]}' sends steps of sequences there, and its batcher mixes sequences, "
                "loses their order and may send two steps to two instances"
            )
        if reason:
            yield Finding(
                symptom="stateful-batched",
                subject=str(setup),
                severity="error",
                seen="a stateful model under dynamic_batching",
                cause=reason,
                change="replace dynamic_batching; batches are then made across sequences",
                where=setup.file,
                lines=("sequence_batching { oldest { max_candidate_sequences: 256 } }",),
                numbers={"max_batch_size": setup.max_batch_size},
            )


def llm_batched(facts: Facts) -> Iterator[Finding]:
    """An LLM, whose engine joins requests itself, under dynamic batching."""
    for setup in facts.setups:
        if reason := setup.faults.get("dynamic_batching", ""):
            yield Finding(
                symptom="llm-batched",
                subject=str(setup),
                severity="error",
                seen="dynamic_batching on an LLM",
                cause=reason,
                change="delete the block dynamic_batching, and let the engine batch",
                where=setup.file,
                lines=("max_batch_size: 0", "model_transaction_policy { decoupled: true }"),
                numbers={"max_batch_size": setup.max_batch_size, "delay_us": setup.delay_us},
            )


def instances_against_batches(facts: Facts) -> Iterator[Finding]:
    """Instances take batches from each other, or are too few for full ones."""
    for setup, traffic in facts.under_load():
        if not setup.is_batching or traffic.executions < ENOUGH:
            continue
        servers = facts.servers_of(setup.backend)
        instances = setup.instances * servers
        if _is_spread(setup, traffic, servers=servers):
            cause, change, lines = _told_of_spread(setup, traffic)
        elif _is_full(setup, traffic, instances=instances):
            cause, change, lines = _told_of_full(setup, traffic)
        else:
            continue
        yield Finding(
            symptom="instances-and-batches",
            subject=str(setup),
            severity="warning",
            seen=f"{instances} instance{'s' if instances > 1 else ''}, {traffic.busy:.1f} busy, batches of "
            f"{traffic.mean_batch:.1f} rows of {setup.max_batch_size}, {traffic.present:.1f} requests there at once",
            cause=cause,
            change=change,
            where=setup.file,
            lines=lines,
            numbers={
                "instances": instances,
                "busy": traffic.busy,
                "mean_batch": traffic.mean_batch,
                "max_batch_size": setup.max_batch_size,
                "present": traffic.present,
                "queue_share": traffic.queue_share,
            },
        )


def _told_of_spread(setup: Setup, traffic: Traffic) -> tuple[str, str, tuple[str, ...]]:
    at_once = "; the delay is 0: a free instance takes each at once" if setup.delay_us == 0 else ""
    return (
        f"requests spread over the instances before a batch can form{at_once}",
        "fewer instances make larger batches; measure both (`python -m local_runtime bench`)",
        (
            f"instance_group [ {{ count: {setup.instances // 2} }} ]",
            f"dynamic_batching {{ max_queue_delay_microseconds: {traffic.short_delay_us} }}",
        ),
    )


def _told_of_full(setup: Setup, traffic: Traffic) -> tuple[str, str, tuple[str, ...]]:
    return (
        f"every instance is busy with full batches, and requests wait {traffic.queue_share:.0%} of their time",
        "larger batches if the memory has room for them, else one instance more; measure both",
        (f"max_batch_size: {2 * setup.max_batch_size}", f"instance_group [ {{ count: {setup.instances + 1} }} ]"),
    )


def _is_spread(setup: Setup, traffic: Traffic, *, servers: int) -> bool:
    """Many instances run at once what would fit into one batch."""
    return (
        setup.instances > OVERLAP
        and traffic.busy >= OVERLAP * servers
        and traffic.mean_batch <= SMALL * setup.max_batch_size
        and traffic.joined < SCATTERED
    )


def _is_full(setup: Setup, traffic: Traffic, *, instances: int) -> bool:
    return (
        traffic.mean_batch >= FULL * setup.max_batch_size
        and traffic.busy >= SPENT * instances
        and traffic.queue_share >= PILED_SHARE
    )


def preferred_never_reached(facts: Facts) -> Iterator[Finding]:
    """Sizes are preferred, no batch had one, and requests wait for them."""
    for setup, traffic in facts.under_load():
        batches = sum(traffic.batch_sizes.values())
        if not setup.preferred or batches < ENOUGH or any(traffic.batch_sizes.get(size) for size in setup.preferred):
            continue
        is_held = traffic.is_held_by(setup.delay_us) and traffic.queue_share >= HELD_SHARE
        ready = traffic.waiting * traffic.rows / traffic.requests / facts.servers_of(setup.backend)
        if not is_held and ready < min(setup.preferred):
            continue  # nobody waits for the others, and there are too few: it costs nothing
        largest = max(size for size, count in traffic.batch_sizes.items() if count)
        wanted = ", ".join(map(str, setup.preferred))
        yield Finding(
            symptom="preferred-never-reached",
            subject=str(setup),
            severity="warning",
            seen=f"none of {batches:,} batches had a preferred size ({wanted}); the largest had {largest} rows",
            cause=f"too few requests come within the delay of {setup.delay_us} us"
            if largest < min(setup.preferred)
            else "requests' rows do not add up to these sizes",
            change="take preferred_batch_size away: Triton's documentation advises against it for most models, but "
            "those that are much faster at some sizes, such as TensorRT engines with several profiles",
            where=setup.file,
            lines=(f"dynamic_batching {{ max_queue_delay_microseconds: {setup.delay_us} }}",),
            numbers={"batches": batches, "largest": largest, "delay_us": setup.delay_us, "present": traffic.present},
        )
