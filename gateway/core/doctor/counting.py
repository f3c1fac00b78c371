"""What counters have grown by between two looks; and which cannot be compared, as their server began anew. Pure.

Counters that went back, or that come from other servers than before, are left out and named: the life of a server must
not pass for the seconds between two looks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gateway.core.doctor.facts import Limiting, Name, Server, Traffic
from gateway.core.doctor.looks import Document, Look, Sample

LIMITED: Final = "rate_limited"
NAMED: Final = 3
"""Models by name in a line of what is left out; of the others the number."""

_MODEL: Final = "gateway_model_"
_REFUSALS: Final = ("gateway_requests_total", "gateway_limited_total")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What happened between the looks. `limiting` is None where it is not known; `unseen`: what was left out, and why.

    `traffic` has no models without a request.
    """

    traffic: Mapping[Name, Traffic] = field(default_factory=dict)
    servers: Sequence[Server] = ()
    limiting: Limiting | None = None
    unseen: Sequence[str] = ()


def counted(before: Look, after: Look, *, limits: Sequence[str] = ()) -> Counted:
    """Compare two looks; `limits` are those that are set, in words."""
    anew, window_s = _anew(before, after), max(1e-9, after.at_s - before.at_s)
    old = _by_model(before.samples)
    traffic = {
        name: one
        for name, samples in _by_model(after.samples).items()
        if name not in anew and (one := _traffic(old[name], samples, window_s=window_s)) is not None
    }
    uneven = _uneven(before, after)
    limiting = _limiting(before, after, limits)
    unseen = [
        *_names(anew),
        *(f"shares of the servers of '{backend}': one of them counts anew" for backend in sorted(uneven)),
    ]
    if limiting is None and before.samples and after.samples:
        unseen.append("refusals by limits: the gateway was started again between the looks")
    servers = [
        replace(server, requests=0) if server.backend in uneven else server for server in _servers(before, after)
    ]
    return Counted(traffic=traffic, servers=servers, limiting=limiting, unseen=unseen)


# --- models, as the gateway's page has them ----------------------------------------------------------------


def _by_model(samples: Sequence[Sample]) -> dict[Name, list[Sample]]:
    found: dict[Name, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.name.startswith(_MODEL) and "model" in sample.labels:
            found[sample.labels.get("backend", ""), sample.labels["model"]].append(sample)
    return found


_Key = tuple[str, frozenset[tuple[str, str]]]


def _key(sample: Sample) -> _Key:
    return sample.name, frozenset(sample.labels.items())


def _values(samples: Sequence[Sample]) -> dict[_Key, float]:
    return {_key(sample): sample.value for sample in samples}


def _anew(before: Look, after: Look) -> set[Name]:
    """Models some of whose counters went back, appeared or vanished: by the page, or by a server's own word."""
    old, new = _by_model(before.samples), _by_model(after.samples)
    found = new.keys() - old.keys()
    for name in new.keys() & old.keys():
        now = _values(new[name])
        if any(now.get(key, -1.0) < value for key, value in _values(old[name]).items()):
            found.add(name)
    servers_then, servers_now = _by_server(before.models), _by_server(after.models)
    for backend, model in new:
        then, now_by = servers_then.get((backend, model), {}), servers_now.get((backend, model), {})
        if then.keys() != now_by.keys() or any(now_by[one] < then[one] for one in then):
            found.add((backend, model))
    return found


def _by_server(models: Sequence[Document]) -> dict[Name, dict[str, int]]:
    """Requests that each server counts of a model."""
    found: dict[Name, dict[str, int]] = {}
    for model in models:
        counts = found.setdefault((model["backend"], model["model"]), {})
        for figures in model["figures"]:
            counts[figures["replica"]] = counts.get(figures["replica"], 0) + int(figures["requests"])
    return found


def _names(anew: set[Name]) -> Iterator[str]:
    """A line for each backend."""
    by_backend: dict[str, list[str]] = defaultdict(list)
    for backend, model in sorted(anew):
        by_backend[backend].append(model)
    for backend, models in by_backend.items():
        more = f" and {len(models) - NAMED} more" if len(models) > NAMED else ""
        yield (
            f"queues and batches of {', '.join(models[:NAMED])}{more} on '{backend}': their counters began anew, as "
            "after a start or a load"
        )


def _traffic(before: Sequence[Sample], after: Sequence[Sample], *, window_s: float) -> Traffic | None:
    """What one model did; None without a request."""
    old = _values(before)
    whole: dict[str, float] = defaultdict(float)
    sizes: Counter[int] = Counter()
    for sample in after:
        grown = sample.value - old.get(_key(sample), 0.0)
        if sample.name == f"{_MODEL}batch_executions":
            sizes[int(sample.labels["batch_size"])] += round(grown)
        else:
            kind = sample.labels.get("outcome") or ("queue" if sample.labels.get("stage") == "queue" else "")
            whole[f"{sample.name.removeprefix(_MODEL)} {kind}".strip()] += grown
    if not (requests := round(whole["requests ok"])):
        return None
    return Traffic(
        window_s=window_s,
        requests=requests,
        rows=round(whole["inferences"]),
        executions=round(whole["executions"]),
        queue_s=whole["seconds queue"],
        compute_s=whole["seconds"],
        batch_sizes={size: count for size, count in sorted(sizes.items()) if count},
    )


# --- servers, as they tell the control plane ---------------------------------------------------------------


def _by_replica(models: Sequence[Document]) -> dict[tuple[str, str], Counter[tuple[str, str]]]:
    """Requests of each version of each model, by backend and server."""
    found: dict[tuple[str, str], Counter[tuple[str, str]]] = defaultdict(Counter)
    for model in models:
        for figures in model["figures"]:
            counts = found[model["backend"], figures["replica"]]
            counts[model["model"], figures.get("version", "")] += int(figures["requests"])
    return found


def _uneven(before: Look, after: Look) -> set[str]:
    """Backends with a server that counts anew, or that was not there before. One that is gone took nothing more."""
    old, new = _by_replica(before.models), _by_replica(after.models)
    return {
        spot[0]
        for spot, counts in new.items()
        if spot not in old or any(counts[one] < value for one, value in old[spot].items())
    }


def _servers(before: Look, after: Look) -> Iterator[Server]:
    """Each server that `/models` counts of, with what `/backends` says of it."""
    old, new = _by_replica(before.models), _by_replica(after.models)
    states = {
        (one["backend"], server["replica"]): server for one in after.backends for server in one.get("replicas", ())
    }
    grown = {spot: counts - old.get(spot, Counter()) for spot, counts in new.items()}
    lacking = _lacking(after.models, grown)
    for spot in sorted({*new, *(spot for spot in states if spot[1])}):
        state = states.get(spot, {})
        shut = (*state.get("shut", ()), *(f"switch {one}" for one in state.get("switches", ())))
        yield Server(
            backend=spot[0],
            replica=spot[1],
            requests=grown.get(spot, Counter()).total(),
            is_live=bool(state.get("live", True)),
            shut=(*shut, *(f"{model} is not loaded there" for model in lacking.get(spot, ()))),
        )


def _lacking(
    models: Sequence[Document], grown: Mapping[tuple[str, str], Counter[tuple[str, str]]]
) -> dict[tuple[str, str], list[str]]:
    """Models that other servers of the backend were asked for and this one, which answers, does not serve."""
    asked = {(backend, model) for (backend, _), counts in grown.items() for model, _ in counts}
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for model in models:
        for one in model.get("replicas", ()):
            if not one["ready"] and not one["error"] and (model["backend"], model["model"]) in asked:
                found[model["backend"], one["replica"]].append(model["model"])
    return found


# --- limits --------------------------------------------------------------------------------------------------


def _limiting(before: Look, after: Look, limits: Sequence[str]) -> Limiting | None:
    """What the limiter refused. None where a page was not read, or the gateway has begun anew."""
    old, new = ([one for one in look.samples if one.name in _REFUSALS] for look in (before, after))
    then, now = _values(old), _values(new)
    if not before.samples or not after.samples or any(now.get(key, -1.0) < value for key, value in then.items()):
        return None
    whole, refused, hit = 0.0, 0.0, Counter[str]()
    for sample in new:
        grown = sample.value - then.get(_key(sample), 0.0)
        if sample.name == "gateway_requests_total":
            whole += grown
            refused += grown if sample.labels.get("code") == LIMITED else 0
        elif grown:
            words = (sample.labels.get("kind", ""), sample.labels.get("window", ""))
            hit[" per ".join(word for word in words if word)] += round(grown)
    return Limiting(requests=round(whole), refused=round(refused), limits=tuple(limits), hit=hit)
