"""Documents of the control plane, configurations and metrics pages, as read twice -> `Facts`. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.core.doctor.facts import Gate, Gpu, Latency, Limiting, Name, Request, Server, Setup, Task, Traffic
from gateway.core.memory_plan import MemoryPlan

Document = Mapping[str, Any]
COMPUTE: Final = ("compute_input", "compute_infer", "compute_output")
LIMITED: Final = "rate_limited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line of a metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """All that was read at one instant (seconds of a clock that only goes forward).

    `models`, `backends`, `requests`, `overview`: the control plane's; `samples`: the gateway's page; `servers`: pages
    of model servers by address. What could not be read is empty.
    """

    at_s: float
    models: Sequence[Document] = ()
    backends: Sequence[Document] = ()
    requests: Sequence[Document] = ()
    overview: Document = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    servers: Mapping[str, Sequence[Sample]] = field(default_factory=dict)


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


def traffic_of(before: Look, after: Look) -> dict[Name, Traffic]:
    """What the gateway's page says of models, less what it said before; models without a request are left out."""
    window_s = max(1e-9, after.at_s - before.at_s)
    counts = _grown(before.samples, after.samples)
    found = {}
    for name in {
        (labels["backend"], labels["model"]) for (metric, labels) in _keys(counts) if metric == "gateway_model_requests"
    }:

        def total(metric: str, name: Name = name, **wanted: str) -> float:
            return sum(
                value
                for (one, labels), value in _items(counts)
                if one == f"gateway_model_{metric}"
                and (labels["backend"], labels["model"]) == name
                and all(labels.get(label) == word for label, word in wanted.items())
            )

        sizes = Counter[int]()
        for (metric, labels), value in _items(counts):
            if metric == "gateway_model_batch_executions" and (labels["backend"], labels["model"]) == name:
                sizes[int(labels["batch_size"])] += int(value)
        if requests := int(total("requests", outcome="ok")):
            found[name] = Traffic(
                window_s=window_s,
                requests=requests,
                rows=int(total("inferences")),
                executions=int(total("executions")),
                queue_s=total("seconds", stage="queue"),
                compute_s=sum(total("seconds", stage=stage) for stage in COMPUTE),
                batch_sizes={size: count for size, count in sorted(sizes.items()) if count},
            )
    return found


_Key = tuple[str, tuple[tuple[str, str], ...]]


def _key(sample: Sample) -> _Key:
    return sample.name, tuple(sorted(sample.labels.items()))


def _grown(before: Sequence[Sample], after: Sequence[Sample]) -> dict[_Key, float]:
    """By how much each has grown; a server that was started again counts from 0."""
    old = {_key(sample): sample.value for sample in before}
    return {
        (key := _key(sample)): sample.value - old.get(key, 0.0) if sample.value >= old.get(key, 0.0) else sample.value
        for sample in after
    }


def _keys(counts: Mapping[_Key, float]) -> Iterator[tuple[str, dict[str, str]]]:
    return ((metric, dict(labels)) for metric, labels in counts)


def _items(counts: Mapping[_Key, float]) -> Iterator[tuple[tuple[str, dict[str, str]], float]]:
    return (((metric, dict(labels)), value) for (metric, labels), value in counts.items())


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


def servers_of(before: Look, after: Look) -> list[Server]:
    """Each replica that `/models` counts of, with what `/backends` says of it."""
    old, new = (_by_replica(look.models) for look in (before, after))
    states = {
        (one["backend"], server["replica"]): server for one in after.backends for server in one.get("replicas", ())
    }
    found = []
    for backend, replica in sorted({*new, *((name, server) for name, server in states if server)}):
        state = states.get((backend, replica), {})
        now, then = new.get((backend, replica), 0), old.get((backend, replica), 0)
        shut = (*state.get("shut", ()), *(f"switch {one}" for one in state.get("switches", ())))
        found.append(
            Server(
                backend=backend,
                replica=replica,
                requests=now - then if now >= then else now,
                is_live=bool(state.get("live", True)),
                shut=shut,
            )
        )
    return found


def _by_replica(models: Sequence[Document]) -> Counter[tuple[str, str]]:
    counts = Counter[tuple[str, str]]()
    for model in models:
        for figures in model["figures"]:
            counts[model["backend"], figures["replica"]] += int(figures["requests"])
    return counts


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


def limiting_of(before: Look, after: Look, limits: Sequence[str]) -> Limiting | None:
    """What the limiter refused; None where the gateway's page was not read."""
    if not after.samples:
        return None
    counts = _grown(before.samples, after.samples)
    whole, refused, hit = 0.0, 0.0, Counter[str]()
    for (metric, labels), value in _items(counts):
        if metric == "gateway_requests_total":
            whole += value
            refused += value if labels["code"] == LIMITED else 0
        elif metric == "gateway_limited_total" and value:
            hit[" per ".join(word for word in (labels.get("kind", ""), labels.get("window", "")) if word)] += int(value)
    return Limiting(requests=int(whole), refused=int(refused), limits=tuple(limits), hit=hit)


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
