"""Capacity: one server that does the others' work, limits below what could be served, GPU memory over its plan."""

import math
from collections.abc import Iterator
from typing import Final

from gateway.core.doctor.facts import Facts, Gpu
from gateway.core.doctor.findings import Finding
from gateway.core.memory_plan import GIB, RUNTIME_PERCENT

SPREAD_ENOUGH: Final = 100
"""Requests in the window, below which shares of servers vary by themselves."""

HOT: Final = 1.5
"""Times the fair share: half as much again is what a spare server would have to take."""

SIGMAS: Final = 3.0
"""Standard deviations of fair chance (binomial) which a fair share is exceeded by once in 740
looks."""

REFUSED: Final = 0.05
"""Of all requests: below it limits do what they are for, holding back a few who send too much."""

REFUSED_ENOUGH: Final = 10
"""Refusals in the window, below which it was one burst."""

IDLE: Final = 0.5
"""Of the busiest model's instances, and of every gate: below it twice as much could be served."""

SUGGESTED_USE: Final = 0.8
"""Of the capacity, to which limits may let requests: the rest is for bursts, and for a server that fails."""

GPU_USED: Final = 1 - RUNTIME_PERCENT / 100
"""Of a GPU's memory: the rest is the runtime's part in `core.memory_plan`."""


def hot_replica(facts: Facts) -> Iterator[Finding]:
    """One server of several gets far more than its share."""
    for backend in dict.fromkeys(server.backend for server in facts.servers):
        servers = [server for server in facts.servers if server.backend == backend]
        whole = sum(server.requests for server in servers)
        if len(servers) < 2 or whole < SPREAD_ENOUGH:  # noqa: PLR2004 - one server has all
            continue
        hottest = max(servers, key=lambda server: server.requests)
        fair = whole / len(servers)
        chance = SIGMAS * math.sqrt(fair * (1 - 1 / len(servers)))
        if hottest.requests <= max(HOT * fair, fair + chance):
            continue
        away = [
            f"{server.replica} ({'; '.join(server.shut) or 'it does not answer'})"
            for server in servers
            if server is not hottest and (server.shut or not server.is_live)
        ]
        yield Finding(
            symptom="hot-replica",
            subject=f"{backend}@{hottest.replica}",
            severity="warning",
            seen=f"{hottest.requests:,} of {whole:,} requests ({hottest.requests / whole:.0%}) went to one of "
            f"{len(servers)} servers",
            cause=f"requests are kept away from {', '.join(away)}"
            if away
            else "long sequences or sessions that stay where they began, or other clients that name this server alone",
            change="bring the others back: `gateway backends list`, `gateway backends resume`, `gateway models load`"
            if away
            else "send every client through the gateway, and end sequences; see who stays with `gateway requests list`",
            lines=(),
            numbers={
                "requests": hottest.requests,
                "all": whole,
                "servers": len(servers),
                "share": hottest.requests / whole,
            },
        )


def refused_below_capacity(facts: Facts) -> Iterator[Finding]:
    """Limits refuse requests while servers have nothing to do."""
    seen = facts.limiting
    if seen is None or seen.refused < REFUSED_ENOUGH or seen.refused < REFUSED * seen.requests:
        return
    uses = [traffic.busy / (setup.instances * facts.servers_of(setup.backend)) for setup, traffic in facts.under_load()]
    uses += [gate.use for gate in facts.gates]
    # Without the gateway's queues nobody knows whether it was idle: no worker tells, or Redis is away.
    is_idle = bool(facts.gates) and all(gate.waiting == 0 for gate in facts.gates)
    if not is_idle or max(uses) >= IDLE:
        return
    use = max(uses)
    served = seen.requests - seen.refused
    # Nothing is doubled more than once at a time: what is idle now says little of what is far from it.
    a_minute = math.ceil(60 * served / facts.window_s * min(2.0, SUGGESTED_USE / max(use, 1e-9)))
    hit = ", ".join(f"{count} by {name}" for name, count in sorted(seen.hit.items()))
    yield Finding(
        symptom="refused-below-capacity",
        subject="limits",
        severity="warning",
        seen=f"{seen.refused:,} of {seen.requests:,} requests were refused by limits"
        f"{f' ({hit})' if hit else ''}, and the busiest place was used to {use:.0%}",
        cause=f"limits are below what can be served: {'; '.join(seen.limits) or 'those of rules or of single keys'}",
        change="raise the limit that refuses (`retry-after` and `x-ratelimit-*` name it; of a key by `gateway keys`); "
        "leave it where it is a price or a promise. In the configuration, where it is the limit of all keys",
        where="gateway.yaml",
        lines=("limits:", f"  - {{per: minute, requests: {max(1, a_minute)}}}"),
        numbers={"requests": seen.requests, "refused": seen.refused, "use": use},
    )


def gpu_memory(facts: Facts) -> Iterator[Finding]:
    """A GPU is fuller than planned, or its models need more than it has."""
    for gpu in facts.gpus:
        share = gpu.used / gpu.total if gpu.total else 0.0
        if share > GPU_USED or (gpu.plan is not None and not gpu.plan.fits):
            yield _memory(gpu, share)


def _memory(gpu: Gpu, share: float) -> Finding:
    over = [part for part in gpu.plan.parts if not part.fits] if gpu.plan else []
    best = gpu.plan.suggestions[0] if gpu.plan and gpu.plan.suggestions else None
    words = (f"{part.name} need {part.needed / GIB:.1f} GiB of {part.budget / GIB:.1f} GiB" for part in over)
    return Finding(
        symptom="gpu-memory",
        subject=gpu.name,
        severity="error" if share > GPU_USED else "warning",
        seen=f"{gpu.used / GIB:.1f} of {gpu.total / GIB:.1f} GiB are used ({share:.0%}); the plan leaves "
        f"{RUNTIME_PERCENT} % free",
        cause=f"by the plan {' and '.join(words)}"
        if over
        else "more than the repository's models is on it: another process, or weights and batches larger than planned",
        change=f"{best.title}: as `gateway models plan` has it" if best else "see `gateway models plan` and nvidia-smi",
        lines=best.changes if best else (),
        numbers={"used_bytes": gpu.used, "total_bytes": gpu.total, "share": share},
    )
