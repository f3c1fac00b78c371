"""The composition root's part for backends: from the settings of each to a running one.

A kind that brings libraries along (gRPC, Jinja, torch) is imported where one is configured: a worker without it starts
sooner and is smaller. `tests/component/test_imports_of_a_process.py` names those libraries.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Literal

from gateway.backends.llm.anthropic_codec import AnthropicCodec
from gateway.backends.llm.backend import Limits, LLMBackend
from gateway.backends.llm.codec import Codec
from gateway.backends.llm.openai_codec import OpenAICodec
from gateway.ports import Backend
from gateway.settings import (
    AnthropicSettings,
    BackendSettings,
    ConfigError,
    LLMSettings,
    LocalSettings,
    OpenAISettings,
    Settings,
    TlsSettings,
    TritonGenerateSettings,
    TritonSettings,
    local_socket,
)

_log = logging.getLogger(__name__)


async def open_backends(settings: Settings, stack: AsyncExitStack) -> Mapping[str, Backend]:
    """Every enabled backend; those that rules name but that are switched off are simply not there."""
    backends: dict[str, Backend] = {}
    for name, backend in settings.backends.items():
        if isinstance(backend, LLMSettings) and backend.api_key_env and not backend.api_key():
            _log.info(
                "backend is off: its key's variable is not set",
                extra={"backend": name, "variable": backend.api_key_env},
            )
        elif backend.enabled:
            try:
                backends[name] = await _backend(name, backend)
            except ValueError as error:
                raise ConfigError(f"backends.{name}: {error}") from error
            stack.push_async_callback(backends[name].close)
    return backends


def tls_faults(settings: Settings) -> list[str]:
    """Which backends' certificates cannot be used."""
    faults = []
    for name, backend in settings.backends.items():
        try:
            if not isinstance(backend, LocalSettings) and backend.tls is not None:
                backend.tls.context()
        except ValueError as error:
            faults.append(f"backends.{name}: {error}")
    return faults


async def _backend(name: str, settings: BackendSettings) -> Backend:
    """A new kind of backend is a case here. Raises ValueError for what cannot be served."""
    match settings:
        case TritonSettings():
            return await _triton_backend(name, settings.url, settings.compression, settings.tls)
        case OpenAISettings():
            return _llm_backend(name, settings, OpenAICodec(settings.apis))
        case AnthropicSettings():
            return _llm_backend(name, settings, AnthropicCodec(now_s=_now_s, max_tokens=settings.max_tokens))
        case TritonGenerateSettings():
            return _llm_backend(name, settings, _triton_generate_codec(settings))
        case LocalSettings():
            if shared := local_socket():  # the one runtime of all workers speaks Triton's own protocol
                return await _triton_backend(name, shared)
            from gateway.backends.local import LocalBackend  # noqa: PLC0415 - brings torch

            return await LocalBackend.open(name, settings.repository, models=settings.models)


async def _triton_backend(
    name: str, url: str, compression: Literal["none", "gzip"] = "none", tls: TlsSettings | None = None
) -> Backend:
    from gateway.backends.triton.backend import TritonBackend  # noqa: PLC0415 - brings gRPC and protobuf

    return await TritonBackend.open(name, url, compression=compression, tls=tls)


def _triton_generate_codec(settings: TritonGenerateSettings) -> Codec:
    from gateway.backends.llm.chat_templates import load  # noqa: PLC0415 - brings Jinja
    from gateway.backends.llm.triton_generate_codec import TritonGenerateCodec  # noqa: PLC0415 - the same

    template = load(settings.chat_template)
    return TritonGenerateCodec(engine=settings.engine, template=template, now_us=_now_us)


def _now_s() -> int:
    """The wall clock, which tells callers when an answer was made."""
    return int(time.time())


def _now_us() -> int:
    return time.time_ns() // 1000


def _llm_backend(name: str, settings: LLMSettings, codec: Codec) -> LLMBackend:
    first_token_ms = settings.first_token_timeout_ms
    return LLMBackend(
        name,
        codec=codec,
        base_urls=settings.base_urls,
        api_key=settings.api_key(),
        headers=settings.headers,
        models=settings.models,
        limits=Limits(
            connect_us=settings.connect_timeout_ms * 1000,
            first_token_us=None if first_token_ms is None else first_token_ms * 1000,
            idle_us=settings.idle_timeout_ms * 1000,
        ),
        is_hosted=settings.hosted,
        tls=settings.tls.context() if settings.tls is not None else None,
        server_name=(settings.tls.server_name or "") if settings.tls is not None else "",
    )
