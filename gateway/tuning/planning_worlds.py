"""What a plan runs: a world with one model's settings and one backend's replicas to choose, whole or a part of it.

A part: of many replicas, some with their share of the traffic stand for all. It has the load of each replica, but not
the whole's choice between replicas, and its bursts fall on fewer: it tends to say a little more than the whole would.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from google.protobuf import json_format

from gateway.tuning.curves import LatencyCurve
from gateway.tuning.planning import FULLEST, Candidate, Outcome, Setting, capacity, floor_ms
from gateway.tuning.report import ClassReport, Percentiles, Report
from gateway.tuning.simulation.world import World, WorldError, parse_world
from gateway.tuning.slo import Slo
from local_runtime.errors import ModelLoadError
from local_runtime.repository import parsing

PART: Final = 16
"""Replicas that may stand for more; docs/plan.md has what fewer or more of them make of it."""
MOST_REQUESTS: Final = 200_000
"""Of a whole run. What has more is checked with the largest part that has not."""
_MOST_OF_PART: Final = 40_000
_TAIL: Final = 100  # requests beyond the wanted percentile: with fewer, it is a matter of a few of them
_SLOS: Final = 10.0  # a run lasts so many times the SLO at least, so that a queue that grows gets beyond it
_WARMUP: Final = 0.2  # of the counted time, before it

Simulate = Callable[[World, int], Report]
"""A world and a seed to its report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is planned, ready to be run with any setting on any number of replicas.

    Attributes:
        document: a world's, without files beside it; its traffic has the headroom already.
        model / backend: what is planned in it.
        percent: of the requests of each class with an SLO that must be answered within it.
        survive: so many replicas are dead, and the SLO holds.
        is_divisible: whether a part can stand for the whole: all traffic comes at constant rates to one backend, and
            nothing breaks, is limited or has an order.
        rate: of all requests on average, per second and with the headroom; 0 where callers wait for answers.
        rows: that the requests of each class bring.
        slo_ms: the longest of the classes.
        counted_rate: of the class with an SLO that has the fewest requests.
        named: replicas that there must be, since the world's failures name them.
        is_alone: whether all rows there are computed by this model on this backend.
    """

    document: Mapping[str, Any]
    model: str
    backend: str
    percent: float
    survive: int
    curve: LatencyCurve
    is_divisible: bool
    rate: float
    rows_per_s: float
    rows: tuple[int, ...]
    slo_ms: float
    counted_rate: float
    named: int
    is_alone: bool

    def candidate(self, setting: Setting) -> Candidate:
        """With its bounds: what the curve makes of the rows that come, and of the SLO where nothing else takes time."""
        rows = math.gcd(*self.rows)
        floor = floor_ms(self.curve, setting, share=self.percent / 100, rows=rows) if self.is_alone else 0.0
        why = f"computing alone takes {floor:.4g} ms at p{self.percent:g}" if floor > self.slo_ms else ""
        each = FULLEST * capacity(self.curve, setting, rows=rows)
        live = math.ceil(self.rows_per_s / each - 1e-9) if self.is_alone else 1
        return Candidate(setting=setting, least=max(max(1, live) + self.survive, self.named), impossible=why)


def situation_of(
    document: Mapping[str, Any],
    *,
    folder: Path = Path(),
    model: str = "",
    backend: str = "",
    slo: Slo | None = None,
    headroom: float = 0.0,
    survive: int = 0,
) -> Situation:
    """A world as it stands in a file in `folder`, to be planned. Raises `WorldError`.

    `model` and `backend` are not needed where the world has but one. `slo` is that of classes without `slo_ms`, and its
    percentile is for all; without it p99 is. `headroom` is how much more traffic must be held: 0.2 for a fifth.
    """
    world = parse_world(document, folder=folder)
    model, backend = _one("model", model, world.models), _one("backend", backend, world.backends)
    made = copy.deepcopy(dict(document))
    made["models"] = {name: _inlined(name, made["models"][name], world, folder) for name in world.models}
    for entry, one in zip(made["traffic"], world.traffic, strict=True):
        if slo is not None and not entry.get("slo_ms"):
            entry["slo_ms"] = slo.ms
        _raise(entry, one.traffic.concurrency, 1 + headroom)
    made = orjson.loads(orjson.dumps(made, option=orjson.OPT_NON_STR_KEYS))  # curves may have numbers for keys
    final = parse_world(made)
    config = final.models[model].config
    if config.dynamic_batching is not None and config.dynamic_batching.adaptive:
        raise WorldError(f"models.{model}: adaptive batching chooses its own delays and sizes: plan it without")
    judged = [one.traffic for one in final.traffic if one.traffic.slo_ms]
    if not judged:
        raise WorldError("traffic: no class has slo_ms, and no --slo is given: there is nothing to hold")
    classes = [one.traffic for one in final.traffic]
    rates = {one.name: (one.rate + (one.ramp_to or one.rate)) / 2 for one in classes}
    return Situation(
        document=made,
        model=model,
        backend=backend,
        percent=slo.percent if slo else 99.0,
        survive=survive,
        curve=final.models[model].curve,
        is_divisible=_is_divisible(final),
        rate=sum(rates.values()) if all(one.rate for one in classes) else 0.0,
        rows_per_s=sum(rates[one.name] * one.rows for one in classes),
        rows=tuple(one.rows for one in classes),
        slo_ms=max(one.slo_ms for one in judged),
        counted_rate=min(rates[one.name] for one in judged),
        named=max((one.replica + 1 for one in final.failures if one.backend == backend), default=1),
        is_alone=len(final.models) == 1 and len(final.backends) == 1,
    )


def _one(what: str, named: str, known: Mapping[str, object]) -> str:
    if named in known:
        return named
    if named or len(known) > 1:
        raise WorldError(f"--{what}: must be one of {', '.join(known)}")
    return next(iter(known))


def _is_divisible(world: World) -> bool:
    """See `Situation`. What is limited, or ordered by a key, is not less for fewer replicas."""
    return (
        all(one.traffic.rate and not one.traffic.ramp_to and not one.ordering_keys for one in world.traffic)
        and len(world.backends) == 1
        and not world.failures
        and not world.limits
        and not any(rule.limits for rule in world.rules)
    )


def _raise(entry: dict[str, Any], concurrency: int, factor: float) -> None:
    """A class with so many times its traffic: more callers, a higher rate, a trace that goes by faster."""
    if concurrency:
        entry["concurrency"] = math.ceil(concurrency * factor - 1e-9)
    elif entry.get("trace"):
        entry["speed"] = entry.get("speed", 1.0) * factor
    else:
        for name in ("rate", "ramp_to"):
            if entry.get(name):
                entry[name] *= factor


def _inlined(name: str, given: Mapping[str, Any], world: World, folder: Path) -> dict[str, Any]:
    """A model's entry with the contents of its files in their stead."""
    made = {field: value for field, value in given.items() if field != "config"}
    model = world.models[name]
    made["curve"] = {field: value for field, value in model.curve.as_json().items() if value}
    made["max_batch_size"] = model.config.max_batch_size
    made["instances"] = model.instances
    if given.get("config") and "dynamic_batching" not in given:
        try:
            written = parsing.read_text((folder / given["config"]).read_text(), folder_name=name)
        except (OSError, ModelLoadError) as error:
            raise WorldError(f"models.{name}.config: {error}") from error
        adaptive = {key: one.string_value for key, one in written.parameters.items() if key.startswith("ADAPTIVE_")}
        if adaptive:
            made["parameters"] = adaptive | dict(given.get("parameters") or {})
        if written.HasField("dynamic_batching"):
            made["dynamic_batching"] = json_format.MessageToDict(
                written.dynamic_batching, preserving_proto_field_name=True
            )
    return made


# --- runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of it is run: so many live replicas, that share of the traffic, and for how long."""

    live: int
    share: float
    counted_s: float

    @property
    def warmup_s(self) -> float:
        """Before the counted time."""
        return self.counted_s * _WARMUP


def extent_of(situation: Situation, setting: Setting, replicas: int, *, whole: bool) -> Extent | None:
    """For a run that tells the percentile; None for the world's own traffic and duration, which cannot be divided."""
    if not situation.is_divisible:
        return None
    live = replicas - situation.survive
    most = MOST_REQUESTS if whole else _MOST_OF_PART
    settled = min(_settled(situation, setting, live), most)
    needed = max(_TAIL / (1 - situation.percent / 100), settled)  # requests of the rarest class
    wanted_s = _SLOS * situation.slo_ms / 1e3
    counted_s = max(wanted_s, needed / situation.counted_rate)
    if whole:
        fitting = live * MOST_REQUESTS / ((1 + _WARMUP) * counted_s * situation.rate)
    else:
        fitting = math.ceil(needed * live / (situation.counted_rate * wanted_s))
    part = min(live, max(PART, int(fitting)))
    share = part / live
    if not whole:
        counted_s = min(wanted_s, _MOST_OF_PART / (situation.rate * share))
    return Extent(live=part, share=share, counted_s=max(counted_s, needed / (situation.counted_rate * share)))


def _settled(situation: Situation, setting: Setting, live: int) -> float:
    """Requests until queues have found their length (`FULLEST`).

    No batch of a server that holds its SLO has more rows than come to it within that, however large it may be.
    """
    come = situation.rows_per_s * situation.slo_ms / 1e3 / live
    return min(setting.max_batch_size, max(1.0, come)) / (1 - FULLEST) ** 2 / min(situation.rows)


def is_cut(situation: Situation, setting: Setting, replicas: int) -> bool:
    """Whether even a whole run ends before queues of such batches have found their length."""
    return situation.is_divisible and _settled(situation, setting, replicas - situation.survive) > MOST_REQUESTS


def document_of(situation: Situation, setting: Setting, replicas: int, *, whole: bool) -> dict[str, Any]:
    """The world that is run. Where it has all replicas, those that need not survive are dead from the start."""
    made = copy.deepcopy(dict(situation.document))
    model = made["models"][situation.model]
    batching = {**(model.get("dynamic_batching") or {})}
    batching["max_queue_delay_microseconds"] = setting.max_queue_delay_microseconds
    batching["preferred_batch_size"] = list(setting.preferred_batch_size)
    model |= {"max_batch_size": setting.max_batch_size, "instances": setting.count, "dynamic_batching": batching}
    extent = extent_of(situation, setting, replicas, whole=whole)
    if extent is not None:
        made |= {
            "duration_s": round(extent.counted_s + extent.warmup_s, 6),
            "warmup_s": round(extent.warmup_s, 6),
            "traffic": [{**one, "rate": one["rate"] * extent.share} for one in made["traffic"]],
        }
    is_part = extent is not None and (not whole or extent.live < replicas - situation.survive)
    made["backends"][situation.backend] = {
        **(made["backends"][situation.backend] or {}),
        "replicas": extent.live if extent is not None and is_part else replicas,
    }
    if situation.survive and not is_part:
        dead = [
            {"at_s": 0.0, "backend": situation.backend, "replica": replicas - 1 - place, "kind": "dead"}
            for place in range(situation.survive)
        ]
        made["failures"] = [*made.get("failures", ()), *dead]
    return made


class SimulatedProbe:
    """See `planning.Probe`: by simulation, each world and seed once."""

    def __init__(self, situation: Situation, simulate: Simulate) -> None:
        self._situation = situation
        self._simulate = simulate
        self._known: dict[bytes, Outcome] = {}

    def __call__(self, setting: Setting, replicas: int, *, seed: int, whole: bool) -> Outcome:
        """The outcome of the world that `document_of` makes."""
        document = document_of(self._situation, setting, replicas, whole=whole)
        key = orjson.dumps((document, seed))
        if key not in self._known:
            report = self._simulate(parse_world(document), seed)
            simulated = document["backends"][self._situation.backend]["replicas"]
            self._known[key] = outcome_of(report, self._situation, replicas=simulated)
        return self._known[key]


def outcome_of(report: Report, situation: Situation, *, replicas: int) -> Outcome:
    """What of a report a plan goes by. Requests that failed, were refused or never ended are late ones."""
    slo = Slo(ms=situation.slo_ms, percent=situation.percent)
    judged = [one for one in report.classes if one.slo_ms]
    worst = max(judged, key=lambda one: (_latency(one, situation) / one.slo_ms, -slo.share(one)))
    latency_ms = _latency(worst, situation)
    servers = [one for one in report.servers if (one.backend, one.model) == (situation.backend, situation.model)]
    server = servers[0] if servers else None
    whole = report.whole.latency
    return Outcome(
        holds=all(slo.is_held(one) and one.sent for one in judged),
        latency_ms=latency_ms,
        strain=latency_ms / worst.slo_ms,
        good=min(slo.share(one) for one in judged),
        p50_ms=whole.p50 if whole else math.inf,
        p99_ms=whole.p99 if whole else math.inf,
        qps=report.whole.qps,
        goodput=report.whole.goodput,
        busy=(server.busy or 0.0) if server else 0.0,
        mean_batch=server.mean_batch if server else 0.0,
        queue_ms=server.queue_ms if server else 0.0,
        compute_ms=server.compute_ms if server else 0.0,
        requests=report.whole.sent,
        replicas=replicas,
    )


def _latency(one: ClassReport, situation: Situation) -> float:
    """At the wanted percentile; infinite where so many were not answered at all."""
    lost = one.sent - one.codes.get("ok", 0)
    if one.latency is None or lost > one.sent * (1 - situation.percent / 100):
        return math.inf
    return at_percentile(one.latency, situation.percent)


def at_percentile(times: Percentiles, percent: float) -> float:
    """In milliseconds; `percent` is one that `PERCENTILES` has."""
    return float(getattr(times, f"p{percent:g}".replace(".", "_")))
