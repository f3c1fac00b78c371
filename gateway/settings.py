"""Configuration: one YAML file and the environment's secrets -> one frozen `Settings`.

Nothing else in the gateway reads the environment. A value may say `${NAME}` or `${NAME:-default}`; secrets are
named (`key_env: NAME`), never written. Paths are relative to the file. Unknown fields are refused by name.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gateway.core.rules import Rule, check_models, check_targets, parse_rules
from gateway.core.types import Limit, OpenAIApi

PERIODS_US = {"second": 1_000_000, "minute": 60_000_000, "hour": 3_600_000_000, "day": 86_400_000_000}
CHAT_TEMPLATES = ("chatml", "llama3", "mistral")  # those that are built in
MAX_WINDOW_US = 10 * 365 * PERIODS_US["day"]  # far below 2^52, up to which Redis's Lua counts exactly
_URL = re.compile(r"https?://[\x21-\x7e]+", re.IGNORECASE)  # what a request line can hold
_FRAMING = frozenset(("connection", "content-length", "transfer-encoding"))
_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")  # of an environment variable, as in `${NAME}`; keys have other letters too
_VARIABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)(?::-([^}]*))?\}")
LOCAL_SOCKET_ENV = "GATEWAY_LOCAL_SOCKET"  # set by `gateway serve` for its workers, where they share one runtime
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: the exit status where starting again would not help
METRICS_DIR_ENV = "PROMETHEUS_MULTIPROC_DIR"  # prometheus-client's own name


class ConfigError(ValueError):
    """A configuration that cannot be used; one line for each fault, with the file's line number."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Backend(_Section):
    """What all kinds share."""

    enabled: bool = True
    max_in_flight: int = Field(
        default=256, ge=1, le=100_000, description="requests of one worker at one server that are not answered yet"
    )
    max_queue_size: int = Field(
        default=1024, ge=0, le=1_000_000, description="requests of one worker that wait for a server; more are refused"
    )


class TritonSettings(_Backend):
    """A Triton server or several equal ones, reached over gRPC."""

    kind: Literal["triton"]
    url: str = Field(
        description="gRPC addresses, host:port, separated by commas; each record of a DNS name is a replica"
    )
    repository: Path | None = Field(
        default=None, description="its model repository as `gateway models deploy` reaches it, shared by all replicas"
    )
    compression: Literal["none", "gzip"] = Field(
        default="none", description="of tensors on their way: worth its time only where the network is slow"
    )


class LocalSettings(_Backend):
    """The in-process runtime over a Triton model repository."""

    kind: Literal["local"]
    repository: Path
    models: tuple[str, ...] | None = Field(default=None, description="load only these; default: every model")


class _LLMEndpoint(_Backend):
    """What all endpoints of generative models share."""

    base_url: str = Field(description="up to and with /v1; several equal endpoints are separated by commas")
    api_key_env: str | None = Field(
        default=None,
        description="environment variable that holds the endpoint's key; not set: the backend is switched off",
    )
    headers: Mapping[str, str] = Field(default_factory=dict, description="sent with every request")
    models: Mapping[str, str] = Field(
        default_factory=dict, description="the endpoint's own name of a model, by its name in rules and calls"
    )
    hosted: bool = Field(
        default=False,
        description="somebody else's API: not probed, not asked for metrics; requests tell its health",
    )
    connect_timeout_ms: int = Field(default=2_000, ge=1, le=600_000)
    first_token_timeout_ms: int | None = Field(
        default=None,
        ge=1,
        description="from the request to its answer's first part; default: the task's own limits",
    )
    idle_timeout_ms: int = Field(default=60_000, ge=1, description="between two parts of an answer")
    usd_per_hour: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="what one such server costs, shared by its requests by the time that they take of it",
    )

    @field_validator("api_key_env")
    @classmethod
    def _is_name(cls, value: str | None) -> str | None:
        if value is not None and not _NAME.fullmatch(value):
            raise ValueError("is no variable's name: the key itself belongs into the environment, its name here")
        return value

    @field_validator("base_url")
    @classmethod
    def _are_urls(cls, value: str) -> str:
        parts = [part.strip() for part in value.split(",")]
        found = [(urlsplit(part), _URL.fullmatch(part)) for part in parts]
        if any(not fits or not u.hostname or u.query or u.fragment or u.username for u, fits in found):
            raise ValueError("must be http(s) URLs in plain ASCII without user, query or fragment")
        if any(u.path.rstrip("/").endswith("/chat/completions") for u, _ in found):
            raise ValueError("ends before /chat/completions, such as https://example.com/v1")
        if not all(u.port is None or u.port for u, _ in found):  # raises ValueError above 65535, and for no number
            raise ValueError("no server has the port 0")
        if len(set(parts)) < len(parts):
            raise ValueError("names one endpoint twice")
        return value

    @field_validator("headers")
    @classmethod
    def _are_headers(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name in value:
            if name.lower() in _FRAMING:
                raise ValueError(f"'{name}' is not to be set: it belongs to the connection")
        return value

    @property
    def base_urls(self) -> tuple[str, ...]:
        """Each endpoint's."""
        return tuple(part.strip() for part in self.base_url.split(","))

    def api_key(self) -> str | None:
        """The endpoint's key; None where none is configured or its variable is not set."""
        return (os.environ.get(self.api_key_env) or None) if self.api_key_env else None


class OpenAISettings(_LLMEndpoint):
    """An OpenAI-compatible endpoint: vLLM, TensorRT-LLM, llama.cpp, SGLang, a hosted API."""

    kind: Literal["openai"]
    apis: tuple[OpenAIApi, ...] = Field(
        default=("chat/completions", "completions", "embeddings"),
        min_length=1,
        description="those that it has, by their paths",
    )


class AnthropicSettings(_LLMEndpoint):
    """An endpoint that speaks Anthropic's Messages API."""

    kind: Literal["anthropic"]
    base_url: str = "https://api.anthropic.com/v1"
    max_tokens: int = Field(default=4096, ge=1, description="where the caller sets no bound: the API wants one")


class TritonGenerateSettings(_LLMEndpoint):
    """Triton's generate extension over HTTP, in front of its vLLM or TensorRT-LLM backend."""

    kind: Literal["triton_generate"]
    base_url: str = Field(description="of Triton's HTTP port, without a path; several are separated by commas")
    engine: Literal["vllm", "tensorrt_llm"] = "vllm"
    chat_template: str = Field(
        default="chatml", description="chatml, llama3, mistral, or the path of a Jinja file as model publishers ship it"
    )


LLMSettings = OpenAISettings | AnthropicSettings | TritonGenerateSettings
BackendSettings = Annotated[TritonSettings | LocalSettings | LLMSettings, Field(discriminator="kind")]


class TaskSettings(_Section):
    """A task: its contract, its time limits and its contract's options."""

    contract: str
    timeout_ms: int = Field(
        default=10_000, ge=1, le=3_600_000, description="the whole request; X-Timeout-Ms may shorten it"
    )
    attempt_timeout_ms: int = Field(default=3_000, ge=1, description="one attempt, while another candidate remains")
    aliases: tuple[str, ...] = Field(default=(), description="further names in the `model` field of OpenAI requests")
    labels_file: Path | None = Field(default=None, description="one label a line, in index order")
    options: Mapping[str, int] = Field(default_factory=dict, description="the contract's bounds")


class LimitSettings(_Section):
    """So many requests per period, of which `burst` may come at once (default: all)."""

    per: Literal["second", "minute", "hour", "day"]
    requests: int = Field(ge=1, le=10**9)
    burst: int | None = Field(default=None, ge=1, le=10**9)

    @model_validator(mode="after")
    def _is_exact(self) -> "LimitSettings":
        if PERIODS_US[self.per] * (self.burst or self.requests) // self.requests > MAX_WINDOW_US:
            raise ValueError("burst is too large for so few requests per period")
        return self

    def limit(self) -> Limit:
        """The same as the limiter takes it."""
        return Limit(requests=self.requests, period_us=PERIODS_US[self.per], burst=self.burst or self.requests)


class KeySettings(_Section):
    """An API key: its secret's environment variable or its SHA-256, whose it is, and what it may."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    tenant: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    key_env: str | None = None
    key_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    limits: tuple[LimitSettings, ...] | None = Field(default=None, description="default: the section `limits`")
    tasks: tuple[str, ...] | None = Field(default=None, description="default: every task")
    admin: bool = Field(default=False, description="may list, load and unload models on /v2/repository")

    @model_validator(mode="after")
    def _has_one_secret(self) -> "KeySettings":
        if (self.key_env is None) == (self.key_sha256 is None):
            raise ValueError("give either key_env or key_sha256")
        return self

    def digest(self) -> str | None:
        """SHA-256 of the secret in hex; None where its environment variable is not set."""
        if self.key_sha256 is not None:
            return self.key_sha256
        secret = os.environ.get(self.key_env or "", "")
        return hashlib.sha256(secret.encode()).hexdigest() if secret else None


class RedisSettings(_Section):
    """The shared store. `url` empty: limits and rules live in this process alone."""

    url: str = ""
    prefix: str = "gateway:"

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value and urlsplit(value).scheme not in ("redis", "rediss", "unix"):
            raise ValueError("must begin with redis://, rediss:// or unix://, or be empty")
        return value


class ServerSettings(_Section):
    """Listeners and bounds of the processes."""

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    ops_host: str = "127.0.0.1"
    ops_port: int = Field(default=8081, ge=0, le=65535)
    admin_host: str = "127.0.0.1"
    admin_port: int = Field(default=8090, ge=0, le=65535)
    admin_token_env: str = "GATEWAY_ADMIN_TOKEN"  # noqa: S105 - the variable's name, not a secret
    workers: int = Field(default=1, ge=1, le=64)
    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    body_timeout_s: float = Field(default=30.0, gt=0)
    drain_timeout_s: float = Field(default=30.0, ge=0, description="how long a stop waits for requests in flight")

    def admin_token(self) -> str:
        """The control plane's token; empty where it is not set."""
        return os.environ.get(self.admin_token_env, "")


class TelemetrySettings(_Section):
    """What is told of requests."""

    access_log: bool = True


class Settings(_Section):
    """The whole configuration. `rules` seed an empty Redis, and serve where there is none."""

    backends: Mapping[str, BackendSettings]
    tasks: Mapping[str, TaskSettings]
    rules: Sequence[Mapping[str, Any]]
    limits: tuple[LimitSettings, ...] = ()
    keys: tuple[KeySettings, ...] = ()
    redis: RedisSettings = Field(default_factory=RedisSettings)
    server: ServerSettings = Field(default_factory=ServerSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
    prices: Path | None = Field(default=None, description="the price table, a YAML file; see deploy/prices.yaml")

    @model_validator(mode="after")
    def _fits_together(self) -> "Settings":
        self.check_rules(parse_rules(self.rules))
        names = [*self.tasks, *(alias for task in self.tasks.values() for alias in task.aliases)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the name '{name}' stands for two tasks")
        for key in self.keys:
            for task in key.tasks or ():
                if task not in self.tasks:
                    raise ValueError(f"key '{key.id}': unknown task '{task}'")
        ids = [key.id for key in self.keys]
        if len(set(ids)) < len(ids):
            raise ValueError("two keys have the same id")
        return self

    def check_rules(self, rules: Sequence[Rule]) -> None:
        """Raise `RuleError` for rules that do not fit the backends and tasks here."""
        check_targets(rules, backends=self.backends, tasks=self.tasks)
        check_models(rules, naming=[name for name, task in self.tasks.items() if task.contract in ("tensor", "chat")])


def load_settings(path: Path) -> Settings:
    """Read and check the file. Raises `ConfigError` with one line per fault."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
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
    return settings.model_copy(update={"backends": backends, "tasks": tasks, "prices": prices})


def _anchored_backend(backend: BackendSettings, folder: Path) -> BackendSettings:
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
        given = os.environ.get(name) or default
        if given is None:
            line = text[: text.find(found[0])].count("\n") + 1
            raise ConfigError(f"{path}:{line}: the environment variable {name} is not set and has no default here")
        return given

    return _VARIABLE.sub(replaced, value)


_WORDS = {"extra_forbidden": "unknown field", "missing": "is required", "union_tag_not_found": "kind is required"}
_RULE = re.compile(r"rule '([^']+)'")


def _fault(path: Path, node: Any, fault: Any) -> str:
    """One line: where, and what is wrong."""
    loc: tuple[int | str, ...] = fault["loc"]
    message = _WORDS.get(fault["type"], fault["msg"].removeprefix("Value error, "))
    line = _line(node, loc)
    if named := _RULE.match(message):
        line = _rule_line(node, named[1]) or line
    # Pydantic names the kind of a backend as a part of the way to it (backends, NAME, KIND, ...); the file does not.
    parts = (*loc[:2], *loc[3:]) if loc[:1] == ("backends",) else loc
    where = ".".join(str(part) for part in parts)
    return f"{path}:{line}: {where + ': ' if where else ''}{message}"


def _rule_line(node: Any, name: str) -> int | None:
    """The line of the rule of this name."""
    for key, rules in node.value:
        if key.value == "rules" and isinstance(rules, yaml.SequenceNode):
            for rule in rules.value:
                named = rule.value if isinstance(rule, yaml.MappingNode) else ()
                if any(k.value == "name" and v.value == name for k, v in named):
                    return int(rule.start_mark.line) + 1
    return None


def _line(node: Any, loc: Sequence[int | str]) -> int:
    """The line of the innermost part of `loc` that stands in the file."""
    line = node.start_mark.line + 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            found = [(k, v) for k, v in node.value if k.value == str(part)]
            if found:
                line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return int(line)


def local_socket() -> str:
    """Where the workers' shared local runtime listens; empty where it lives in this process."""
    return os.environ.get(LOCAL_SOCKET_ENV, "")
