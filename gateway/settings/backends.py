"""The section `backends`: what can answer."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from gateway.core.types import OpenAIApi
from gateway.settings.secrets import from_environment
from gateway.settings.section import Section
from gateway.settings.tls import TlsSettings

CHAT_TEMPLATES: Final = ("chatml", "llama3", "mistral")  # those that are built in
_URL = re.compile(r"https?://[\x21-\x7e]+", re.IGNORECASE)  # what a request line can hold
_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")  # of an environment variable, as in `${NAME}`; keys have other letters too
_FRAMING = frozenset(("connection", "content-length", "transfer-encoding"))


class _Backend(Section):
    """What all kinds share."""

    enabled: bool = Field(
        default=True, description="false: as if it were not there; rules that name it go on to the next place"
    )
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
    tls: TlsSettings | None = Field(default=None, description="speak TLS; `{}`: as the system's authorities have it")
    repository: Path | None = Field(
        default=None, description="its model repository as `gateway models deploy` reaches it, shared by all replicas"
    )
    compression: Literal["none", "gzip"] = Field(
        default="none", description="of tensors on their way: worth its time only where the network is slow"
    )

    @field_validator("tls", mode="before")
    @classmethod
    def _is_said(cls, value: object) -> object:
        return _not_empty(value)

    @field_validator("tls")
    @classmethod
    def _is_for_a_network(cls, value: TlsSettings, info: ValidationInfo) -> TlsSettings:
        if any(part.strip().startswith("unix:") for part in info.data.get("url", "").split(",")):
            raise ValueError("a Unix socket has no TLS")
        return value

    @field_validator("compression")
    @classmethod
    def _knows_who_signs(cls, value: str, info: ValidationInfo) -> str:
        tls = info.data.get("tls")
        if value != "none" and tls is not None and tls.ca_file is None:
            raise ValueError(
                "with `tls` it needs tls.ca_file: gRPC's own library does not ask the system's authorities"
            )
        return value


class LocalSettings(_Backend):
    """The in-process runtime over a Triton model repository."""

    kind: Literal["local"]
    repository: Path = Field(description="a Triton model repository")
    models: tuple[str, ...] | None = Field(default=None, description="load only these; default: every model")


class _LLMEndpoint(_Backend):
    """What all endpoints of generative models share."""

    base_url: str = Field(description="up to and with /v1; several equal endpoints are separated by commas")
    api_key_env: str | None = Field(
        default=None,
        description="environment variable that holds the endpoint's key; not set: the backend is switched off",
    )
    tls: TlsSettings | None = Field(default=None, description="of https:// endpoints that the system does not trust")
    headers: Mapping[str, str] = Field(default_factory=dict, repr=False, description="sent with every request")
    models: Mapping[str, str] = Field(
        default_factory=dict, description="the endpoint's own name of a model, by its name in rules and calls"
    )
    hosted: bool = Field(
        default=False,
        description="somebody else's API: not probed, not asked for metrics; requests tell its health",
    )
    connect_timeout_ms: int = Field(
        default=2_000, ge=1, le=600_000, description="until a connection stands, TLS included"
    )
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

    @field_validator("tls", mode="before")
    @classmethod
    def _is_said(cls, value: object) -> object:
        return _not_empty(value)

    @field_validator("tls")
    @classmethod
    def _is_for_https(cls, value: TlsSettings, info: ValidationInfo) -> TlsSettings:
        urls = info.data.get("base_url", "https:").split(",")
        if not all(url.strip().lower().startswith("https:") for url in urls):
            raise ValueError("the base_url is not one for TLS (https://)")
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
        """The endpoint's key; None where none is configured or its variable is not set. Raises `ConfigError`."""
        return (from_environment(self.api_key_env) or None) if self.api_key_env else None


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
    base_url: str = Field(
        default="https://api.anthropic.com/v1",
        description="up to and with /v1; several equal endpoints are separated by commas",
    )
    max_tokens: int = Field(default=4096, ge=1, description="where the caller sets no bound: the API wants one")


class TritonGenerateSettings(_LLMEndpoint):
    """Triton's generate extension over HTTP, in front of its vLLM or TensorRT-LLM backend."""

    kind: Literal["triton_generate"]
    base_url: str = Field(description="of Triton's HTTP port, without a path; several are separated by commas")
    engine: Literal["vllm", "tensorrt_llm"] = Field(
        default="vllm", description="which backend of Triton answers: each has fields of its own"
    )
    chat_template: str = Field(
        default="chatml", description="chatml, llama3, mistral, or the path of a Jinja file as model publishers ship it"
    )


LLMSettings = OpenAISettings | AnthropicSettings | TritonGenerateSettings
BackendSettings = Annotated[TritonSettings | LocalSettings | LLMSettings, Field(discriminator="kind")]


def _not_empty(value: object) -> object:
    """A `tls:` with nothing after it would be none at all: in the clear, and nobody would see it."""
    if value is None:
        raise ValueError("is empty: `{}` is TLS as the system's authorities have it; leave the line out for none")
    return value
