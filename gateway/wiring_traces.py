"""The composition root's part for traces. The SDK is imported where they are sent alone: it is an extra."""

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gateway.settings import AnthropicSettings, ConfigError, LLMSettings, OpenAISettings, Settings
from gateway.wiring_stores import monotonic_us

if TYPE_CHECKING:
    from gateway.telemetry.tracing import Tracing


def open_traces(settings: Settings, stack: AsyncExitStack) -> "Tracing | None":
    """What makes the spans of one worker, closed with `stack`; None where none are sent. Raises `ConfigError`."""
    traces = settings.telemetry.traces
    if not traces.is_on():
        return None
    if fault := traces.fault():
        raise ConfigError(fault)
    from gateway.telemetry.span_attributes import Endpoint  # noqa: PLC0415 - beside the next
    from gateway.telemetry.tracing import open_tracing  # noqa: PLC0415 - needs the extra `otel`

    def endpoint(backend: LLMSettings) -> Endpoint:
        # "openai" is what the conventions say of everybody who speaks that protocol and does not say more.
        names = {OpenAISettings: "openai", AnthropicSettings: "anthropic"}
        provider = names.get(type(backend), "triton")
        if len(backend.base_urls) > 1:
            return Endpoint(provider)
        url = urlsplit(backend.base_url)
        return Endpoint(provider, url.hostname or "", url.port or (443 if url.scheme == "https" else 80))

    tracing = open_tracing(
        endpoint=traces.endpoint,
        sample_ratio=traces.sample_ratio,
        clock=monotonic_us,
        endpoints={name: endpoint(one) for name, one in settings.backends.items() if isinstance(one, LLMSettings)},
        record_content=traces.record_content,
    )
    stack.push_async_callback(tracing.close)
    return tracing
