"""Waiting: p99 that is made of queues, interactive requests behind batch ones, time limits below delays."""

from collections.abc import Iterator
from typing import Final

from gateway.core.doctor.facts import Facts, Gate, Request, Setup, Task, Traffic
from gateway.core.doctor.findings import ENOUGH, WAITING_SHARE, Finding

OF_BOTH: Final = 5
"""Requests of either side, from which both are there and not by chance."""

BULK: Final = 0.8
"""Of a backend's requests by one key: it is this key that the others wait for."""

BATCHES_AHEAD: Final = 2
"""Of an instance: one that runs and one that is ready, so that it never stands still."""

BUSY: Final = 0.8
"""Of the instances' time. An M/M/1 queue's wait is four times its work there, and rises ever faster from there."""


def late_by_queue(facts: Facts) -> Iterator[Finding]:
    """The p99 is over its target, and most of the time at the server was waiting."""
    tasks = {task.name: task for task in facts.tasks}
    for latency in facts.latencies:
        task = tasks.get(latency.task)
        if task is None or latency.requests < ENOUGH:
            continue
        # Without a promise: from here on an attempt is given up while another place remains.
        target = facts.target_p99_ms or float(task.attempt_timeout_ms)
        if latency.p99_ms <= target:
            continue
        slow = _slowest(facts, latency.backend, latency.model)
        if slow is None:
            continue
        setup, traffic = slow
        cause, change, lines = _why_late(facts, setup, traffic)
        yield Finding(
            symptom="late-by-queue",
            subject=f"{latency.task} at {setup}",
            severity="warning",
            seen=f"p99 {latency.p99_ms:.0f} ms over {target:.0f} ms; {traffic.queue_share:.0%} of the time was waiting",
            cause=cause,
            change=change,
            where=setup.file,
            lines=lines,
            numbers={
                "p99_ms": latency.p99_ms,
                "target_ms": target,
                "queue_share": traffic.queue_share,
                "queue_ms": traffic.queue_ms,
                "compute_ms": traffic.compute_ms,
                "delay_us": setup.delay_us,
                "busy": traffic.busy,
            },
        )


def _slowest(facts: Facts, backend: str, model: str) -> tuple[Setup, Traffic] | None:
    """Of a model and its steps the one at which requests wait longest, if that is long at all."""
    waiting = [
        (setup, traffic)
        for setup in facts.below((backend, model))
        if (traffic := facts.traffic.get(setup.name)) is not None
        and traffic.requests >= ENOUGH
        and traffic.queue_share >= WAITING_SHARE
    ]
    return max(waiting, key=lambda one: one[1].queue_s, default=None)


def _why_late(facts: Facts, setup: Setup, traffic: Traffic) -> tuple[str, str, tuple[str, ...]]:
    instances = setup.instances * facts.servers_of(setup.backend)
    if setup.is_batching and traffic.is_held_by(setup.delay_us):
        return (
            f"the delay: {setup.delay_us} us of the mean wait of {traffic.queue_ms:.1f} ms",
            "a shorter delay: a tenth of the time of a batch",
            (f"dynamic_batching {{ max_queue_delay_microseconds: {traffic.short_delay_us} }}",),
        )
    if traffic.busy >= BUSY * instances and traffic.mean_batch > 1:
        return (
            f"{traffic.busy:.1f} of {instances} busy: batches of {traffic.compute_ms:.1f} ms are too large",
            "one instance or server more; else smaller batches",
            (
                f"instance_group [ {{ count: {setup.instances + 1} }} ]",
                f"max_batch_size: {max(1, setup.max_batch_size // 2)}",
            ),
        )
    return (
        f"{traffic.present:.1f} requests at once, and {traffic.busy:.1f} of {instances} instances busy",
        "batch what waits, or one instance or server more",
        (() if setup.is_batching else ("dynamic_batching { }",))
        + (f"instance_group [ {{ count: {setup.instances + 1} }} ]",),
    )


def interactive_behind_batch(facts: Facts) -> Iterator[Finding]:
    """Requests that somebody waits for stand in a server's queue, which knows no order, behind those that can wait."""
    for gate in facts.gates:
        queued = [
            (setup, traffic)
            for setup, traffic in facts.under_load()
            if setup.backend == gate.backend and traffic.requests >= ENOUGH and traffic.queue_share >= WAITING_SHARE
        ]
        if not queued or gate.waiting is None or gate.waiting > 0:
            continue  # what waits in the gateway stands in order
        setup, traffic = max(queued, key=lambda one: one[1].queue_s)
        most = BATCHES_AHEAD * setup.instances * max(1, setup.max_batch_size)
        if gate.max_in_flight * gate.workers <= most:
            continue
        here = [one for one in facts.requests if one.backend == gate.backend]
        if (told := _mixed(here)) is not None:
            yield _behind(gate, setup, traffic, told, most=most)


def _behind(
    gate: Gate, setup: Setup, traffic: Traffic, told: tuple[str, tuple[str, ...], dict[str, float]], *, most: int
) -> Finding:
    cause, lines, counts = told
    each = max(1, most // gate.workers)
    return Finding(
        symptom="interactive-behind-batch",
        subject=gate.backend,
        severity="warning",
        seen=f"requests wait {traffic.queue_ms:.1f} ms at {setup} and none in the gateway, where priorities count",
        cause=f"{cause}; max_in_flight {gate.max_in_flight} lets all of them into the server's queue, first come first "
        "served",
        change="let the server have two batches for each instance, and the rest wait in the gateway, where interactive "
        "requests go first",
        where="gateway.yaml",
        lines=(*lines, "backends:", f"  {gate.backend}: {{max_in_flight: {each}}}"),
        numbers={
            **counts,
            "queue_share": traffic.queue_share,
            "queue_ms": traffic.queue_ms,
            "max_in_flight": gate.max_in_flight,
            "waiting": gate.waiting or 0,
        },
    )


def _mixed(requests: list[Request]) -> tuple[str, tuple[str, ...], dict[str, float]] | None:
    """Who waits for whom: in words, the lines that tell the two apart, and counts. None where there are no two."""
    batch = sum(one.stands_for for one in requests if one.priority == "batch")
    whole = sum(one.stands_for for one in requests)
    interactive = whole - batch
    counts: dict[str, float] = {"interactive": interactive, "batch": batch}
    if batch >= OF_BOTH and interactive >= OF_BOTH:
        return f"{interactive} interactive requests among {batch} batch ones", (), counts
    if batch:
        return None
    by_key: dict[str, int] = {}
    for one in requests:
        by_key[one.key] = by_key.get(one.key, 0) + one.stands_for
    key = max(by_key, key=lambda one: by_key[one], default="")
    others = whole - by_key.get(key, 0)
    if others < OF_BOTH or by_key[key] < BULK * whole:
        return None
    cause = f"the key '{key}' sends {by_key[key]} of {whole} requests, and none is marked as batch"
    return cause, (f"# keys: {{id: {key}, priority: batch}}, or X-Priority: batch in its requests",), counts


def timeout_below_delay(facts: Facts) -> Iterator[Finding]:
    """Somebody's time ends before a request that waits for company is sent off."""
    for task in facts.tasks:
        for setup in {one.name: one for place in task.places for one in facts.below(place)}.values():
            yield from _of_task(facts, task, setup)
    for setup in facts.setups:
        if 0 < setup.queue_timeout_us <= setup.delay_us:
            yield _too_short(
                subject=str(setup),
                seen=f"default_timeout_microseconds {setup.queue_timeout_us} is not above the delay of "
                f"{setup.delay_us} us",
                setup=setup,
                timeout_ms=setup.queue_timeout_us / 1000,
            )


def _of_task(facts: Facts, task: Task, setup: Setup) -> Iterator[Finding]:
    shorter = min(task.timeout_ms, task.attempt_timeout_ms)
    if setup.delay_us > 0 and shorter * 1000 <= setup.delay_us:
        yield _too_short(
            subject=f"{task.name} at {setup}",
            seen=f"the task's time limit of {shorter} ms is not above the delay of {setup.delay_us} us",
            setup=setup,
            timeout_ms=shorter,
        )
        return
    ended = [
        one
        for one in facts.requests
        if (one.backend, one.model) == setup.name
        and one.code == "deadline_exceeded"
        and one.total_ms * 1000 <= setup.delay_us
    ]
    count = sum(one.stands_for for one in ended)
    if count >= OF_BOTH:
        yield _too_short(
            subject=f"{task.name} at {setup}",
            seen=f"{count} requests ended at their callers' X-Timeout-Ms, after {ended[0].total_ms:.0f} ms, within the "
            f"delay of {setup.delay_us} us",
            setup=setup,
            timeout_ms=ended[0].total_ms,
        )


def _too_short(*, subject: str, seen: str, setup: Setup, timeout_ms: float) -> Finding:
    return Finding(
        symptom="timeout-below-delay",
        subject=subject,
        severity="error",
        seen=seen,
        cause="a request that comes alone waits the whole delay, and its time is over by then",
        change="a delay well below the time limit, such as a tenth of it; or a longer limit",
        where=setup.file,
        lines=(f"dynamic_batching {{ max_queue_delay_microseconds: {max(1, round(timeout_ms * 100))} }}",),
        numbers={"timeout_ms": timeout_ms, "delay_us": setup.delay_us},
    )
