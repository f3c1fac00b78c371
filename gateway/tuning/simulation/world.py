"""A world to simulate: models with their times, servers, rules, limits, traffic and what breaks. Read from a file.

Rules and limits have the form of the gateway's own configuration, traffic that of `tuning.traffic`, curves that of
`tuning.curves`, and the settings of a model Triton's own words.

A little longer than others: a field, its bounds and the words of its fault are read together.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import orjson
from pydantic import Field, ValidationError

from gateway.core.rules import Rule, check_targets, parse_rules
from gateway.core.rules.fields import RuleError, suggest
from gateway.core.types import ANY, Limit
from gateway.settings.access import LimitSettings
from gateway.settings.faults import fault_words
from gateway.settings.section import Section
from gateway.settings.yaml_text import YamlFault, read_yaml
from gateway.tuning.curves import CurveError, LatencyCurve, parse_curve
from gateway.tuning.simulation.models import SimulatedModel, configured
from gateway.tuning.traffic import TrafficClass, TrafficError, check_amount, parse_class
from local_runtime.errors import ModelLoadError

Engine = Literal["local", "triton"]
"""Whose batches a backend's are: the local runtime's own, or Triton's, which are formed ahead (`ahead`)."""
FailureKind = Literal["dead", "slow", "refusing"]
"""A replica's: nobody answers at its address, and what it had to do is lost; it computes `times` as long; it answers
every request, and every probe, that the model is not ready."""
DEFAULT_TASK: Final = "simulated"
MOST_INSTANCES: Final = 1024  # of a model on a replica


class WorldError(ValueError):
    """A world that cannot be simulated; the text begins with the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedBackend:
    """Servers that are equal, each of which serves every model that a rule asks of them.

    Attributes:
        engine: which server it is.
        max_in_flight / max_queue_size: of the gateway's gate before each replica.
        usd_per_hour: of each replica.
        overhead_us: of the way there and back, on top of the curve's own: one of these for each request.
    """

    name: str
    engine: Engine = "local"
    replicas: int = 1
    max_in_flight: int = 256
    max_queue_size: int = 1024
    usd_per_hour: float = 0.0
    overhead_us: tuple[float, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of its replicas, `0`, `1` and so on; none where there is but one, as in the gateway."""
        return tuple(str(number) for number in range(self.replicas)) if self.replicas > 1 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTask:
    """How long a request, and an attempt of it, may take."""

    name: str
    timeout_ms: int = 10_000
    attempt_timeout_ms: int = 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTraffic:
    """A class of traffic, and what its requests are like beyond that.

    Attributes:
        ordering_keys: so many keys take turns; 0: its requests have none.
        model_priority / queue_timeout_us: Triton's `priority` and `timeout` of each request; 0: the model's default.
    """

    traffic: TrafficClass
    task: str
    ordering_keys: int = 0
    model_priority: int = 0
    queue_timeout_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A replica (by its number) is not well from `at_s` on, for `for_s`; it comes back with an empty queue."""

    at_s: float
    for_s: float
    backend: str
    replica: int
    kind: FailureKind
    times: float


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All that a simulation is made of.

    Attributes:
        limits: by tenant; of each key, and each tenant has one.
        duration_s: for so long requests come; the first `warmup_s` are not counted.
    """

    models: Mapping[str, SimulatedModel]
    backends: Mapping[str, SimulatedBackend]
    rules: tuple[Rule, ...]
    tasks: Mapping[str, SimulatedTask]
    traffic: tuple[SimulatedTraffic, ...]
    limits: Mapping[str, tuple[Limit, ...]]
    failures: tuple[Failure, ...] = ()
    duration_s: float = 10.0
    warmup_s: float = 0.0
    title: str = ""


def load_document(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file. Raises `WorldError`."""
    try:
        found = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorldError(f"{path}: {error.strerror}") from error
    except YamlFault as error:
        raise WorldError(f"{path}: {error}") from error
    except UnicodeDecodeError as error:
        raise WorldError(f"{path}: no text: {error}") from error
    if not isinstance(found, dict):
        raise WorldError(f"{path}: must be a mapping of sections")
    return found


def changed(document: Mapping[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of `document` with one field set: `models.m.max_batch_size`, `traffic.0.rate`. Raises `WorldError`."""
    made = copy.deepcopy(dict(document))
    *way, last = path.split(".")
    at: Any = made
    for place, step in enumerate(way):
        where = ".".join(way[: place + 1])
        at = _item(at, step, where) if isinstance(at, list) else at.setdefault(step, {})
        if not isinstance(at, dict | list):
            raise WorldError(f"{where}: has no fields")
    if isinstance(at, list):
        _item(at, last, path)
        at[int(last)] = value
    else:
        at[last] = value
    return made


def _item(at: list[Any], step: str, where: str) -> Any:
    if not step.isdecimal() or int(step) >= len(at):
        raise WorldError(f"{where}: there are the numbers 0 to {len(at) - 1}")
    return at[int(step)]


class _Model(Section):
    curve: str | Mapping[str, Any]
    config: str = ""
    max_batch_size: int | None = Field(default=None, ge=0, le=1_000_000)
    dynamic_batching: Mapping[str, Any] | None = None
    sequence_batching: Mapping[str, Any] | None = None
    parameters: Mapping[str, str] = Field(default_factory=dict)
    instances: int | None = Field(default=None, ge=1, le=MOST_INSTANCES)


class _Backend(Section):
    engine: Engine = "local"
    replicas: int = Field(default=1, ge=1, le=100_000)
    max_in_flight: int = Field(default=256, ge=1, le=100_000)
    max_queue_size: int = Field(default=1024, ge=0, le=1_000_000)
    usd_per_hour: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    overhead_us: float | tuple[float, ...] = ()


class _Task(Section):
    timeout_ms: int = Field(default=10_000, ge=1, le=3_600_000)
    attempt_timeout_ms: int = Field(default=3_000, ge=1)


class _Failure(Section):
    at_s: float = Field(ge=0, allow_inf_nan=False)
    for_s: float = Field(default=1e9, gt=0, allow_inf_nan=False)
    backend: str
    replica: int = Field(default=0, ge=0)
    kind: FailureKind = "dead"
    times: float = Field(default=1.0, gt=0, allow_inf_nan=False)


class _Asked(Section):
    """What an entry of `traffic` has beside the fields of a class."""

    task: str = ""
    ordering_keys: int = Field(default=0, ge=0)
    model_priority: int = Field(default=0, ge=0)
    queue_timeout_us: int = Field(default=0, ge=0)


class _World(Section):
    title: str = ""
    models: Mapping[str, _Model]
    backends: Mapping[str, _Backend]
    rules: Sequence[Mapping[str, Any]] | None = None
    tasks: Mapping[str, _Task] = Field(default_factory=dict)
    traffic: Sequence[Mapping[str, Any]]
    limits: Mapping[str, tuple[LimitSettings, ...]] = Field(default_factory=dict)
    failures: tuple[_Failure, ...] = ()
    duration_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    warmup_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)


def parse_world(given: Mapping[str, Any], *, folder: Path = Path()) -> World:
    """A world as it stands in a file in `folder`, which paths are relative to. Raises `WorldError` naming the field."""
    read = _read(given)
    if read.warmup_s >= read.duration_s:
        raise WorldError("warmup_s: must be less than duration_s")
    models = {name: _model(name, one, folder) for name, one in read.models.items()}
    backends = {name: _backend(name, one) for name, one in read.backends.items()}
    rules = _rules(read)
    tasks = {name: SimulatedTask(name=name, **one.model_dump()) for name, one in read.tasks.items()}
    for name in [rule.match.task for rule in rules if rule.match.task != ANY] if not tasks else ():
        tasks[name] = SimulatedTask(name=name)
    tasks = tasks or {DEFAULT_TASK: SimulatedTask(name=DEFAULT_TASK)}
    _check_rules(rules, models=models, backends=backends, tasks=tasks)
    traffic = tuple(_traffic(one, tasks, at=f"traffic.{place}") for place, one in enumerate(read.traffic))
    _check_traffic(traffic, rules, models)
    try:
        check_amount([one.traffic for one in traffic], duration_s=read.duration_s)
    except TrafficError as error:
        raise WorldError(str(error)) from error
    tenants = {one.traffic.tenant for one in traffic}
    for tenant in read.limits:
        if tenant not in tenants:
            raise WorldError(f"limits.{tenant}: no traffic has this tenant{suggest(tenant, tenants)}")
    return World(
        models=models,
        backends=backends,
        rules=rules,
        tasks=tasks,
        traffic=traffic,
        limits={tenant: tuple(one.limit() for one in limits) for tenant, limits in read.limits.items()},
        failures=tuple(_failures(read, backends)),
        duration_s=read.duration_s,
        warmup_s=read.warmup_s,
        title=read.title,
    )


def _read(given: Mapping[str, Any]) -> _World:
    try:
        read = _World.model_validate(given)
    except ValidationError as error:
        _refuse(error, at="")
    for name in ("models", "backends", "traffic"):
        if not getattr(read, name):
            raise WorldError(f"{name}: must have at least one")
    return read


def _refuse(error: ValidationError, *, at: str) -> NoReturn:
    first = error.errors()[0]
    where = ".".join(str(part) for part in (*([at] if at else []), *first["loc"]))
    raise WorldError(f"{where}: {fault_words(first)}") from None


def _model(name: str, given: _Model, folder: Path) -> SimulatedModel:
    at = f"models.{name}"
    text = _text(folder / given.config, at=f"{at}.config") if given.config else ""
    blocks = {"dynamic_batching": given.dynamic_batching, "sequence_batching": given.sequence_batching}
    if None not in blocks.values():
        raise WorldError(f"{at}.sequence_batching: a model has either this or dynamic_batching")
    try:
        config = configured(
            name,
            text,
            max_batch_size=given.max_batch_size,
            blocks={field: block for field, block in blocks.items() if block is not None},
            parameters=given.parameters,
        )
    except ModelLoadError as error:
        raise WorldError(f"{at}: {error}") from error
    instances = given.instances or sum(group.count for group in config.instance_groups)
    if instances > MOST_INSTANCES:
        raise WorldError(f"{at}.config: has {instances:,} instances: {MOST_INSTANCES:,} at most are simulated")
    return SimulatedModel(
        name=name, curve=_curve(given.curve, folder, at=f"{at}.curve"), config=config, instances=instances
    )


def _curve(given: str | Mapping[str, Any], folder: Path, *, at: str) -> LatencyCurve:
    try:
        found = orjson.loads(_text(folder / given, at=at)) if isinstance(given, str) else given
        return parse_curve(found)
    except orjson.JSONDecodeError as error:
        raise WorldError(f"{at}: {given} is not valid JSON: {error}") from error
    except CurveError as error:
        raise WorldError(f"{at}.{error}") from error


def _text(path: Path, *, at: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise WorldError(f"{at}: {path} cannot be read: {getattr(error, 'strerror', None) or 'no text'}") from error


def _backend(name: str, given: _Backend) -> SimulatedBackend:
    times = given.overhead_us if isinstance(given.overhead_us, tuple) else (given.overhead_us,)
    if any(not 0 <= one < float("inf") for one in times):
        raise WorldError(f"backends.{name}.overhead_us: must be numbers from 0 on")
    return SimulatedBackend(name=name, **given.model_dump() | {"overhead_us": tuple(sorted(times))})


def _rules(read: _World) -> tuple[Rule, ...]:
    """Those that are given; else, where there is but one model, all requests go to all backends evenly."""
    document = read.rules
    if document is None:
        if len(read.models) > 1:
            raise WorldError("rules: must say which of the models a request goes to")
        (model,) = read.models
        document = [
            {"name": "all", "match": {}, "split": [{"backend": name, "model": model} for name in read.backends]}
        ]
    try:
        return parse_rules(document)
    except RuleError as error:
        raise WorldError(str(error) if str(error).startswith("rule") else f"rules: {error}") from error


def _check_rules(
    rules: Sequence[Rule],
    *,
    models: Mapping[str, SimulatedModel],
    backends: Mapping[str, SimulatedBackend],
    tasks: Mapping[str, SimulatedTask],
) -> None:
    try:
        check_targets(rules, backends=backends, tasks=tasks)
    except RuleError as error:
        raise WorldError(f"rules: {error}") from error
    for rule in rules:
        for where, target in rule.targets:
            if target.model not in models:
                raise WorldError(
                    f"rules: rule '{rule.name}': {where}.model: '{target.model}' is not among the models"
                    + suggest(target.model, models)
                )


def _traffic(given: Mapping[str, Any], tasks: Mapping[str, SimulatedTask], *, at: str) -> SimulatedTraffic:
    own = {name: value for name, value in given.items() if name in _Asked.model_fields}
    try:
        asked = _Asked.model_validate(own)
    except ValidationError as error:
        _refuse(error, at=at)
    try:
        traffic = parse_class({name: value for name, value in given.items() if name not in own}, at=at)
    except TrafficError as error:
        raise WorldError(str(error)) from error
    task = asked.task or next(iter(tasks))
    if not asked.task and len(tasks) > 1:
        raise WorldError(f"{at}.task: must be one of {', '.join(tasks)}")
    if task not in tasks:
        raise WorldError(f"{at}.task: unknown task '{task}'{suggest(task, tasks)}")
    return SimulatedTraffic(traffic=traffic, **asked.model_dump() | {"task": task})


def _check_traffic(
    traffic: Sequence[SimulatedTraffic], rules: Sequence[Rule], models: Mapping[str, SimulatedModel]
) -> None:
    names = [one.traffic.name for one in traffic]
    for place, one in enumerate(traffic):
        if names.count(one.traffic.name) > 1:
            raise WorldError(f"traffic.{place}.name: '{one.traffic.name}' is used twice")
        for rule in rules:
            if rule.match.task not in (ANY, one.task):
                continue
            for _, target in rule.targets:
                config = models[target.model].config
                most = config.max_batch_size or 1
                if config.sequence_batching is not None:
                    most = 1  # of each sequence, one row at a time
                    if not one.traffic.sequence_length:
                        raise WorldError(
                            f"traffic.{place}.sequence_length: the model '{target.model}' keeps sequences, and takes "
                            "nothing else"
                        )
                if one.traffic.rows > most:
                    raise WorldError(f"traffic.{place}.rows: the model '{target.model}' takes {most} at most")


def _failures(read: _World, backends: Mapping[str, SimulatedBackend]) -> Iterator[Failure]:
    for place, one in enumerate(read.failures):
        at = f"failures.{place}"
        if one.backend not in backends:
            raise WorldError(f"{at}.backend: unknown backend '{one.backend}'{suggest(one.backend, backends)}")
        if one.replica >= backends[one.backend].replicas:
            raise WorldError(
                f"{at}.replica: '{one.backend}' has the replicas 0 to {backends[one.backend].replicas - 1}"
            )
        if (one.kind == "slow") != (one.times != 1):
            raise WorldError(f"{at}.times: how many times as long it takes, for `slow`, and for nothing else")
        yield Failure(**one.model_dump())
