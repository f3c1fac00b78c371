"""The composition root: settings -> running objects, and in reverse order away again. Nothing else builds them."""

import contextlib
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.api.app import create_app
from gateway.api.auth import KeptSecret, KeyRing, Signing
from gateway.api.body import BodyLimits
from gateway.api.endpoint import Api, passed_through
from gateway.api.shedding import Shedding
from gateway.core.breaker import BreakerBoard
from gateway.core.cost import PriceError, PriceTable, parse_prices
from gateway.core.errors import Fault
from gateway.core.loads import LoadBoard
from gateway.core.rules import Rule, check_prices, check_shared_limits, check_speech, parse_rules, unrouted
from gateway.core.rules.fields import RuleError
from gateway.core.types import Caller, Place, Speech
from gateway.gate import Gate
from gateway.healing import Healer
from gateway.health import Prober
from gateway.http.application import Application
from gateway.pipeline import Pipeline, Task
from gateway.ports import Backend, HearsOfDeaths, Observer
from gateway.recall import Recalls
from gateway.reports import report
from gateway.sequences import PinnedSequences
from gateway.settings import (
    METRICS_DIR_ENV,
    BackendSettings,
    ConfigError,
    LLMSettings,
    Settings,
    TaskSettings,
)
from gateway.settings.yaml_text import YamlFault, read_yaml
from gateway.shadowing import Shadows
from gateway.stores.redis_deaths import RedisDeaths
from gateway.stores.redis_keys import RedisKeys
from gateway.tasks import CONTRACTS, SPEAKS
from gateway.tasks.contract import Contract
from gateway.telemetry.logs import AccessLog, configure_logging
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.observers import Observers
from gateway.wiring_backends import open_backends, tls_faults
from gateway.wiring_stores import lies_together, monotonic_us, open_redis, open_stores, wall_us
from gateway.wiring_traces import open_traces

_log = logging.getLogger(__name__)


def check(settings: Settings) -> None:
    """All that can be known without the network and that settings alone do not know.

    Raises `ConfigError` with one line per fault.
    """
    faults: list[str] = []
    for name, task in settings.tasks.items():
        try:
            _contract(name, task)
        except ConfigError as error:
            faults.append(str(error))
    try:
        rule_check(settings)(parse_rules(settings.rules))
    except RuleError as error:
        faults.append(f"rules: {error}")
    except ConfigError as error:  # the price table
        faults.append(str(error))
    if settings.redis.url:
        try:
            open_redis(settings)  # which reads passwords and certificates, and connects to nothing yet
        except ConfigError as error:
            faults.append(str(error))
    faults += [*tls_faults(settings), *settings.secret_faults()]
    if fault := settings.telemetry.traces.fault():
        faults.append(fault)
    if faults:
        raise ConfigError("\n".join(faults))


def rule_check(settings: Settings) -> Callable[[Sequence[Rule]], None]:
    """What raises `RuleError` for rules that do not fit the backends, the tasks and the prices here."""
    speeches: dict[str, Speech] = {
        name: "openai" if isinstance(backend, LLMSettings) else "tensors" for name, backend in settings.backends.items()
    }
    spoken = {name: SPEAKS[task.contract] for name, task in settings.tasks.items() if task.contract in SPEAKS}
    prices, by_time = prices_of(settings), _usd_per_hour(settings)

    def check_rules(rules: Sequence[Rule]) -> None:
        settings.check_rules(rules)
        check_speech(rules, backends=speeches, tasks=spoken)
        if settings.redis.url and not lies_together(settings):
            check_shared_limits(rules)
        check_prices(rules, has_price=lambda at: at.backend in by_time or prices.of(at.backend, at.model) is not None)

    return check_rules


@contextlib.asynccontextmanager
async def data_plane(
    settings: Settings, registry: CollectorRegistry, *, is_draining: Callable[[], bool]
) -> AsyncGenerator[Application, None]:
    """One worker of the data plane, ready to serve: models loaded, rules read, every place probed once.

    Raises `ConfigError` for a configuration that cannot be served.
    """
    tasks = make_tasks(settings)
    folder = os.environ.get(METRICS_DIR_ENV)
    metrics, board = Metrics(registry, Path(folder) if folder else None), BreakerBoard()
    observers: list[Observer] = [metrics]
    async with AsyncExitStack() as stack:
        if settings.telemetry.access_log:
            access_log = AccessLog()
            stack.callback(access_log.flush)
            observers.append(access_log)
        tracing = open_traces(settings, stack)
        if tracing is not None:
            observers.append(tracing)
        backends = await open_backends(settings, stack)
        prices = prices_of(settings)
        stores = await open_stores(settings, stack, rule_check(settings), metrics.redis)
        observers += stores.observers
        if missing := unrouted(stores.rules.current().rules, settings.tasks):
            # A stored set is older than the configuration's newest tasks; the file seeds an empty store only.
            _log.warning("tasks without a rule: `gateway rules apply` gives them one", extra={"tasks": missing})
        if stores.deaths is not None:
            _share_deaths(stores.deaths, backends, board)
        gates, loads = {name: _gate(settings.backends[name]) for name in backends}, LoadBoard()
        healer = Healer(backends=backends, board=board, leases=stores.leases, observer=metrics, events=stores.events)
        stack.push_async_callback(metrics.process.close)
        metrics.process.start()
        prober = Prober(
            backends=backends,
            rules=stores.rules,
            board=board,
            clock=monotonic_us,
            observer=metrics,
            healer=healer,
            gates=gates,
            loads=loads,
        )
        stack.push_async_callback(prober.close)
        await prober.start()
        once_us = settings.recall.idempotency_ttl_s * 1_000_000
        recalls = Recalls(stores.answers, monotonic_us, once_us=once_us)
        stack.push_async_callback(recalls.close)
        shadows = Shadows(
            has_room=lambda at: gates[at.backend].has_room(at.replica),
            results=stores.shadows,
            compared=stores.figures.compared if stores.figures else None,
        )
        stack.push_async_callback(shadows.close)
        pipeline = Pipeline(
            tasks=tasks,
            backends=backends,
            gates=gates,
            admissions=stores.admissions,
            rules=stores.rules,
            recalls=recalls,
            sequences=PinnedSequences(stores.sequences, backends, board=board, clock=monotonic_us),
            board=board,
            observer=Observers(observers),
            clock=monotonic_us,
            draw=random.random,
            loads=loads,
            prices=prices,
            usd_per_hour=_usd_per_hour(settings),
            shadows=shadows,
            wall_clock=wall_us,
        )
        stores.tell_of(lambda: report(pipeline))
        shedding = Shedding(settings.server.shed_after_ms * 1000, _thread_us, monotonic_us, metrics)
        stack.callback(shedding.close)
        shedding.start()
        api = Api(
            pipeline=pipeline,
            keys=KeyRing(callers_of(settings), keys=stores.keys, signing=_signing(settings, stores.keys)),
            models=_models(settings),
            body=BodyLimits(max_bytes=settings.server.max_body_bytes, timeout_s=settings.server.body_timeout_s),
            is_ready=lambda: not is_draining(),
            cors_origins=frozenset(settings.server.cors_origins),
            traced=tracing.begin if tracing is not None else passed_through,
            shedding=shedding,
        )
        yield create_app(api)


def make_tasks(settings: Settings) -> Mapping[str, Task]:
    """The tasks of a configuration, by name."""
    return {
        name: Task(
            name=name,
            contract=_contract(name, task),
            timeout_us=task.timeout_ms * 1000,
            attempt_timeout_us=task.attempt_timeout_ms * 1000,
        )
        for name, task in settings.tasks.items()
    }


def _contract(name: str, task: TaskSettings) -> Contract:
    build = CONTRACTS.get(task.contract)
    if build is None:
        raise ConfigError(f"tasks.{name}.contract: must be one of {', '.join(CONTRACTS)}")
    options: dict[str, Any] = dict(task.options)
    if task.labels_file is not None:
        options["labels"] = _labels(name, task.labels_file)
    try:
        return build(**options)
    except TypeError:
        raise ConfigError(
            f"tasks.{name}: the contract {task.contract} lacks an option or does not take one of {sorted(options)}"
        ) from None


def _labels(name: str, path: Path) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except OSError as error:
        told = f"tasks.{name}.labels_file: {path}: {error.strerror} (`make setup` builds those of triton_models)"
        raise ConfigError(told) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"tasks.{name}.labels_file: {path}: is not UTF-8 text: {error}") from None


def prices_of(settings: Settings) -> PriceTable:
    """The price table of the file that the settings name; empty where they name none. Raises `ConfigError`."""
    if settings.prices is None:
        return PriceTable()
    try:
        return parse_prices(read_yaml(settings.prices.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"prices: {settings.prices}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"prices: {settings.prices}: is not UTF-8 text: {error}") from error
    except YamlFault as error:
        raise ConfigError(f"prices: {settings.prices}: {error}") from error
    except PriceError as error:
        raise ConfigError(f"{settings.prices}: {error}") from error


def _usd_per_hour(settings: Settings) -> Mapping[str, float]:
    return {
        name: backend.usd_per_hour
        for name, backend in settings.backends.items()
        if isinstance(backend, LLMSettings) and backend.usd_per_hour is not None
    }


def _gate(settings: BackendSettings) -> Gate:
    return Gate(max_in_flight=settings.max_in_flight, max_queue_size=settings.max_queue_size)


def _thread_us() -> int:
    """The processor time of the calling thread, which is the event loop's."""
    return time.thread_time_ns() // 1000


def _signing(settings: Settings, keys: RedisKeys | None) -> Signing | None:
    """What signs client tokens, the same in all workers; None where they share nothing to keep it in."""
    secret = settings.server.client_token_secret()
    if not secret and keys is not None:
        return keys.signing
    if not secret and settings.server.workers > 1:
        return None
    return KeptSecret(secret or os.urandom(32)).signing


def _share_deaths(deaths: RedisDeaths, backends: Mapping[str, Backend], board: BreakerBoard) -> None:
    """What one worker hears of a model's death, all act on."""
    told = {name: backend for name, backend in backends.items() if isinstance(backend, HearsOfDeaths)}
    for backend in told.values():
        backend.on_death = deaths.tell

    def heard(place: Place, fault: Fault) -> None:
        if place.backend in told:
            board.failed(place, now_us=monotonic_us(), fault=fault)
            told[place.backend].died(place, fault)

    deaths.start(heard)


def callers_of(settings: Settings) -> Mapping[str, Caller]:
    """By the digest of their key. Raises `ConfigError`."""
    callers: dict[str, Caller] = {}
    for key in settings.keys:
        digest = key.digest()
        if digest is None:
            _log.warning("key lets nobody in: its variable is not set", extra={"key": key.id, "variable": key.key_env})
        else:
            # Of two the later would be whoever comes with it: with another tenant, another's limits and answers.
            if digest in callers:
                raise ConfigError(f"keys: '{callers[digest].key_id}' and '{key.id}' have the same secret")
            callers[digest] = key.caller(settings.limits)
    return callers


def _models(settings: Settings) -> Mapping[str, str]:
    """Every name for an OpenAI `model` field: the tasks themselves and their aliases."""
    names = {name: name for name in settings.tasks}
    names.update({alias: name for name, task in settings.tasks.items() for alias in task.aliases})
    return names


__all__ = ["configure_logging", "data_plane", "monotonic_us", "wall_us"]
