"""Documents of the control plane and configurations -> the parts of `Facts`. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from gateway.core.doctor.facts import Gate, Gpu, Latency, Request, Setup, Task
from gateway.core.doctor.looks import Document, Look
from gateway.core.memory_plan import MemoryPlan


def setup_of(config: Document, *, backend: str, file: str = "", faults: Mapping[str, str] | None = None) -> Setup:
    """Of a configuration in the form of Triton's JSON, in which 64-bit numbers may be texts."""
    batching = config.get("dynamic_batching") or {}
    policy = batching.get("default_queue_policy") or {}
    groups = config.get("instance_group") or [{}]
    most = int(config.get("max_batch_size") or 0)
    preferred = tuple(int(size) for size in batching.get("preferred_batch_size") or ())
    steps = (config.get("ensemble_scheduling") or {}).get("step", ())
    return Setup(
        backend=backend,
        model=str(config["name"]),
        file=file,
        max_batch_size=most,
        is_batching=config.get("dynamic_batching") is not None,
        is_sequence=config.get("sequence_batching") is not None,
        delay_us=int(batching.get("max_queue_delay_microseconds") or 0),
        # Servers fill it in so where a file has none; it changes nothing then.
        preferred=() if preferred == (most,) else preferred,
        queue_timeout_us=int(policy.get("default_timeout_microseconds") or 0),
        instances=max(1, sum(int(group.get("count") or 1) for group in groups)),
        steps=tuple(str(step["model_name"]) for step in steps),
        faults=faults or {},
    )


def tasks_of(
    timeouts: Mapping[str, tuple[int, int]], rules: Sequence[Document], sequences: frozenset[str]
) -> list[Task]:
    """Tasks by name with their whole and their attempts' time limit (ms), and where `/rules` sends them.

    `sequences`: those whose requests are steps of sequences.
    """
    found = []
    for name, (timeout_ms, attempt_ms) in timeouts.items():
        places = dict.fromkeys(
            (str(target["backend"]), str(target["model"]))
            for rule in rules
            if rule.get("enabled", True) and (rule.get("match") or {}).get("task", "*") in (name, "*")
            for target in (*rule.get("split", ()), *rule.get("fallback", ()))
        )
        task = Task(
            name=name,
            timeout_ms=timeout_ms,
            attempt_timeout_ms=attempt_ms,
            is_sequence=name in sequences,
            places=tuple(places),
        )
        found.append(task)
    return found


def latencies_of(overview: Document) -> list[Latency]:
    """The series of `/overview`; those of no place are left out."""
    return [
        Latency(
            task=one["task"],
            backend=one["backend"],
            model=one["model"],
            requests=int(one["requests"]),
            p99_ms=float(one["p99_ms"]),
        )
        for one in overview.get("by", ())
        if one["backend"] and one["p99_ms"] is not None
    ]


def requests_of(documents: Iterable[Document], *, since_ms: float) -> list[Request]:
    """The last requests that ended since then (Unix milliseconds, the control plane's clock)."""
    found = []
    for one in documents:
        if one["at_ms"] < since_ms:
            continue
        backend, _, rest = str(one["place"]).partition("/")
        found.append(
            Request(
                key=one["key"],
                priority=one["priority"],
                code=one["code"],
                backend=backend,
                model=rest.partition("@")[0].partition(":")[0],
                total_ms=float(one["total_ms"]),
                stands_for=int(one.get("stands_for", 1)),
            )
        )
    return found


def gates_of(looks: Sequence[Look], bounds: Mapping[str, int]) -> list[Gate]:
    """The gateway's queues; `bounds` are each backend's `max_in_flight`."""
    workers = max([1, *(int((look.overview.get("workers") or {}).get("live", 0)) for look in looks)])
    found = []
    for backend, bound in bounds.items():
        seen = [one for look in looks for one in look.backends if one["backend"] == backend and one["is_on"]]
        waiting = [one["waiting"] for one in seen if one["waiting"] is not None]
        in_flight = [sum(server["in_flight"] or 0 for server in one["replicas"]) for one in seen]
        if seen:
            found.append(
                Gate(
                    backend=backend,
                    max_in_flight=bound,
                    waiting=max(waiting, default=None),
                    in_flight=max(in_flight),
                    workers=workers,
                    servers=max(1, len(seen[-1]["replicas"])),
                )
            )
    return found


def limit_words(limits: Iterable[Document]) -> list[str]:
    """Limits as the configuration and `/keys` have them, in words."""
    found = []
    for limit in limits:
        kind = next(kind for kind in ("requests", "tokens", "usd", "concurrent") if limit.get(kind) is not None)
        per = f" per {limit['per']}" if limit.get("per") else ""
        task = f" of {limit['task']}" if limit.get("task") else ""
        found.append(f"{limit[kind]:g} {kind}{per}{task}")
    return list(dict.fromkeys(found))


def gpus_of(look: Look, plan_of: Mapping[int, MemoryPlan] | None = None) -> list[Gpu]:
    """The GPUs that servers tell of; `plan_of` is the repository's plan by the memory of a GPU in bytes."""
    found: dict[str, Gpu] = {}
    for address, samples in look.servers.items():
        memory: dict[str, dict[str, int]] = {}
        for sample in samples:
            if sample.name in ("nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"):
                memory.setdefault(sample.labels.get("gpu_uuid", ""), {})[sample.name] = int(sample.value)
        for uuid, told in memory.items():
            total = told.get("nv_gpu_memory_total_bytes", 0)
            found[uuid or address] = Gpu(
                name=f"GPU {uuid} of {address}",
                used=told.get("nv_gpu_memory_used_bytes", 0),
                total=total,
                plan=(plan_of or {}).get(total),
            )
    return list(found.values())
