"""Configuration: one YAML file and the environment's secrets -> one frozen `Settings`.

Nothing else in the gateway reads the environment. A value may say `${NAME}` or `${NAME:-default}`; secrets are
named (`key_env: NAME`), never written. Either may lie in a file (see `secrets`). Paths are relative to the
configuration. Unknown fields are refused by name.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator

from gateway.core.rules import Rule, check_models, check_targets, parse_rules
from gateway.core.rules.fields import suggest
from gateway.settings.access import AnyOrigin, KeySettings, LimitSettings
from gateway.settings.admin import AdminSettings
from gateway.settings.backends import (
    CHAT_TEMPLATES,
    AnthropicSettings,
    BackendSettings,
    LLMSettings,
    LocalSettings,
    OpenAISettings,
    TritonGenerateSettings,
    TritonSettings,
)
from gateway.settings.faults import ConfigError, fault_words
from gateway.settings.lines import below, line_at, rule_line
from gateway.settings.recall import RecallSettings
from gateway.settings.redis import RedisSettings, read_url
from gateway.settings.secrets import from_environment
from gateway.settings.section import Section
from gateway.settings.tls import TlsSettings, anchored_files, stays_here
from gateway.settings.traces import TracesSettings
from gateway.settings.yaml_text import YamlFault, read_with_nodes

__all__ = [
    "AdminSettings",
    "AnthropicSettings",
    "BackendSettings",
    "ConfigError",
    "KeySettings",
    "LLMSettings",
    "LimitSettings",
    "LocalSettings",
    "OpenAISettings",
    "RedisSettings",
    "Settings",
    "TlsSettings",
    "TritonGenerateSettings",
    "TritonSettings",
    "load_settings",
]

_VARIABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)(?::-([^}]*))?\}")
LOCAL_SOCKET_ENV = "GATEWAY_LOCAL_SOCKET"  # set by `gateway serve` for its workers, where they share one runtime
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: the exit status where starting again would not help
MIN_SIGNING_BYTES = 32  # what HMAC-SHA256 is as strong as
METRICS_DIR_ENV = "PROMETHEUS_MULTIPROC_DIR"  # prometheus-client's own name


class TaskSettings(Section):
    """A task: its contract, its time limits and its contract's options."""

    contract: str = Field(description="what goes in and comes out; docs/tasks.md has all of them")
    timeout_ms: int = Field(
        default=10_000, ge=1, le=3_600_000, description="the whole request; X-Timeout-Ms may shorten it"
    )
    attempt_timeout_ms: int = Field(default=3_000, ge=1, description="one attempt, while another candidate remains")
    aliases: tuple[str, ...] = Field(default=(), description="further names in the `model` field of OpenAI requests")
    labels_file: Path | None = Field(default=None, description="one label a line, in index order")
    options: Mapping[str, int] = Field(default_factory=dict, description="the contract's bounds")


class ServerSettings(Section):
    """Listeners and bounds of the processes."""

    host: str = Field(default="127.0.0.1", description="where the data plane listens")
    port: int = Field(default=8080, ge=0, le=65535, description="0: any that is free")
    ops_host: str = Field(default="127.0.0.1", description="where /metrics and /healthz listen")
    ops_port: int = Field(default=8081, ge=0, le=65535, description="the same; it has no key")
    admin_host: str = Field(default="127.0.0.1", description="where the control plane listens")
    admin_port: int = Field(default=8090, ge=0, le=65535, description="the same")
    admin_token_env: str = Field(
        default="GATEWAY_ADMIN_TOKEN", description="environment variable that holds the admin key with all rights"
    )
    workers: int = Field(default=1, ge=1, le=64, description="processes of the data plane, one core each")
    max_body_bytes: int = Field(
        default=32 * 2**20, ge=1024, description="of one request, packed or not, and of one WebSocket message"
    )
    body_timeout_s: float = Field(default=30.0, gt=0, description="in which a request's body must have come")
    shed_after_ms: int = Field(
        default=500,
        ge=0,
        le=60_000,
        description="how much work may lie ahead of a request in a worker whose event loop is behind; others are "
        "refused, those of priority batch at half of it; 0: never",
    )
    cors_origins: tuple[AnyOrigin, ...] = Field(
        default=(), description="web pages whose scripts may read the data plane's answers; `*`: any"
    )
    client_token_secret_env: str = Field(
        default="GATEWAY_CLIENT_TOKEN_SECRET",
        description="environment variable that holds what signs client tokens; not set: Redis keeps one",
    )
    drain_timeout_s: float = Field(default=30.0, ge=0, description="how long a stop waits for requests in flight")

    def admin_token(self) -> str:
        """The control plane's token; empty where it is not set. Raises `ConfigError`."""
        return from_environment(self.admin_token_env)

    def client_token_secret(self) -> bytes:
        """What signs client tokens; empty where it is not set, and Redis keeps one instead. Raises `ConfigError`."""
        secret = from_environment(self.client_token_secret_env).encode()
        if 0 < len(secret) < MIN_SIGNING_BYTES:
            raise ConfigError(f"{self.client_token_secret_env}: must have at least {MIN_SIGNING_BYTES} characters")
        return secret


class TelemetrySettings(Section):
    """What is told of requests."""

    access_log: bool = Field(default=True, description="one JSON line for each request, on stderr")
    traces: TracesSettings = Field(default_factory=TracesSettings, description="OpenTelemetry")


class Settings(Section):
    """The whole configuration. `rules` seed an empty Redis, and serve where there is none."""

    backends: Mapping[str, BackendSettings] = Field(description="what can answer, by name")
    tasks: Mapping[str, TaskSettings] = Field(description="what can be asked, by name")
    rules: Sequence[Mapping[str, Any]] = Field(
        description="where requests go (docs/routing.md); they seed an empty Redis"
    )
    limits: tuple[LimitSettings, ...] = Field(default=(), description="of every key that has none of its own")
    keys: tuple[KeySettings, ...] = Field(default=(), description="beside those that are made at run time")
    redis: RedisSettings = Field(default_factory=RedisSettings, description="what all workers agree on")
    recall: RecallSettings = Field(default_factory=RecallSettings, description="answers that are given again")
    server: ServerSettings = Field(default_factory=ServerSettings, description="listeners and bounds")
    admin: AdminSettings = Field(default_factory=AdminSettings, description="who may enter the control plane")
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings, description="logs and traces")
    prices: Path | None = Field(default=None, description="the price table, a YAML file; see deploy/prices.yaml")

    @model_validator(mode="after")
    def _fits_together(self) -> "Settings":
        self.check_rules(parse_rules(self.rules))
        names = [*self.tasks, *(alias for task in self.tasks.values() for alias in task.aliases)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the name '{name}' stands for two tasks")
        for place, task in self._named_tasks():
            if task not in self.tasks:
                raise ValueError(f"{place}: unknown task '{task}'{self._meant(task)}")
        ids = [key.id for key in self.keys]
        if len(set(ids)) < len(ids):
            raise ValueError("two keys have the same id")
        return self

    def _named_tasks(self) -> Iterator[tuple[str, str]]:
        """The tasks that limits and keys are for, and where each stands: a limit on no task would count nothing."""
        limits = [("limits", self.limits)]
        for i, key in enumerate(self.keys):
            yield from ((f"keys.{i}.tasks.{n}", task) for n, task in enumerate(key.tasks or ()))
            limits.append((f"keys.{i}.limits", key.limits or ()))
        for place, those in limits:
            yield from ((f"{place}.{n}.task", limit.task) for n, limit in enumerate(those) if limit.task is not None)

    def _meant(self, name: str) -> str:
        """A hint at the task that is meant by a name that is none."""
        of_alias = next((task for task, one in self.tasks.items() if name in one.aliases), None)
        return f" (that is an alias of the task '{of_alias}')" if of_alias else suggest(name, self.tasks)

    def with_server(self, **changes: Any) -> "Settings":
        """The same, but for these fields of `server`, which a command line may say."""
        return self.model_copy(update={"server": self.server.model_copy(update=changes)})

    def in_the_clear(self) -> list[str]:
        """Which connections show whoever listens between this host and others what is asked, or a secret."""
        found = []
        for name, one in self.backends.items():
            if isinstance(one, TritonSettings) and one.enabled and one.tls is None:
                hosts = [part.strip().rpartition(":")[0].strip("[]") for part in one.url.split(",")]
            elif isinstance(one, LLMSettings) and one.enabled:
                hosts = [urlsplit(url).hostname or "" for url in one.base_urls if url.lower().startswith("http:")]
            else:
                continue
            found += [f"backends.{name}"] * any(host and host != "unix" and not stays_here(host) for host in hosts)
        place = read_url(self.redis.url) if self.redis.url else None
        if place is not None and not place.is_tls and not all(stays_here(host) for host, _ in place.nodes):
            found.append("redis")
        return found

    def secret_faults(self) -> list[str]:
        """Which secrets are given and cannot be used."""
        named: list[str | None] = [self.server.admin_token_env, *(key.key_env for key in self.keys)]
        named += [key.key_env for key in self.admin.keys]
        named += [one.api_key_env for one in self.backends.values() if isinstance(one, LLMSettings)]
        reads: list[Callable[[], object]] = [partial(from_environment, name) for name in named if name]
        faults = []
        for read in (self.server.client_token_secret, *reads):
            try:
                read()
            except ConfigError as error:
                faults.append(str(error))
        return faults

    def check_rules(self, rules: Sequence[Rule]) -> None:
        """Raise `RuleError` for rules that do not fit the backends and tasks here."""
        check_targets(rules, backends=self.backends, tasks=self.tasks)
        check_models(rules, naming=[name for name, task in self.tasks.items() if task.contract in ("tensor", "chat")])


def load_settings(path: Path) -> Settings:
    """Read and check the file. Raises `ConfigError` with one line per fault."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error}") from error
    try:
        document, node = read_with_nodes(text)
    except YamlFault as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path}: must be a mapping of sections")
    try:
        return _anchored(Settings.model_validate(_expanded(document, path, text)), path.parent)
    except ValidationError as error:
        faults = (_fault(path, node, fault) for fault in error.errors())
        raise ConfigError("\n".join(dict.fromkeys(faults))) from error


def _anchored(settings: Settings, folder: Path) -> Settings:
    """Make relative paths relative to the configuration file."""
    backends = {name: _anchored_backend(backend, folder) for name, backend in settings.backends.items()}
    tasks = {
        name: task.model_copy(update={"labels_file": (folder / task.labels_file).resolve()})
        if task.labels_file
        else task
        for name, task in settings.tasks.items()
    }
    prices = (folder / settings.prices).resolve() if settings.prices else None
    redis = settings.redis.model_copy(update=anchored_files(settings.redis, folder))
    return settings.model_copy(update={"backends": backends, "tasks": tasks, "prices": prices, "redis": redis})


def _anchored_backend(backend: BackendSettings, folder: Path) -> BackendSettings:
    if not isinstance(backend, LocalSettings) and backend.tls is not None:
        backend = backend.model_copy(update={"tls": backend.tls.anchored(folder)})
    if isinstance(backend, LocalSettings | TritonSettings) and backend.repository is not None:
        return backend.model_copy(update={"repository": (folder / backend.repository).resolve()})
    if isinstance(backend, TritonGenerateSettings) and backend.chat_template not in CHAT_TEMPLATES:
        return backend.model_copy(update={"chat_template": str((folder / backend.chat_template).resolve())})
    return backend


def _expanded(value: Any, path: Path, text: str) -> Any:
    """`${NAME:-default}` replaced in every string, from the environment; a name without either is a fault."""
    if isinstance(value, Mapping):
        return {k: _expanded(v, path, text) for k, v in value.items()}
    if isinstance(value, list):
        return [_expanded(v, path, text) for v in value]
    if not isinstance(value, str):
        return value

    def replaced(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        line = text[: text.find(found[0])].count("\n") + 1
        try:
            given = from_environment(name) or default
        except ConfigError as error:
            raise ConfigError(f"{path}:{line}: {error}") from error
        if given is None:
            raise ConfigError(f"{path}:{line}: the environment variable {name} is not set and has no default here")
        return given

    return _VARIABLE.sub(replaced, value)


_PLACE = re.compile(r"((?:limits|keys)\.[a-z0-9_.]+): ")


def _fault(path: Path, node: Any, fault: Any) -> str:
    """One line: where, and what is wrong."""
    loc: tuple[int | str, ...] = fault["loc"]
    message = fault_words(fault)
    line = rule_line(below(node, "rules"), message) or line_at(node, loc)
    if placed := _PLACE.match(message):
        line = line_at(node, [int(part) if part.isdigit() else part for part in placed[1].split(".")])
    # Pydantic names the kind of a backend as a part of the way to it (backends, NAME, KIND, ...); the file does not.
    parts = (*loc[:2], *loc[3:]) if loc[:1] == ("backends",) else loc
    where = ".".join(str(part) for part in parts)
    return f"{path}:{line}: {where + ': ' if where else ''}{message}"


def local_socket() -> str:
    """Where the workers' shared local runtime listens; empty where it lives in this process."""
    return os.environ.get(LOCAL_SOCKET_ENV, "")
