"""The section `telemetry.traces`: whether, where to and of how many requests OpenTelemetry traces are sent."""

import importlib.util
import os
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from gateway.settings.section import Section

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")  # the SDK's own names
_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


class TracesSettings(Section):
    """Traces are sent where an endpoint is named, here or in the SDK's variables; all else those may say too."""

    endpoint: str = Field(
        default="", description="an OTLP/HTTP receiver, such as http://localhost:4318; `/v1/traces` is added to it"
    )
    sample_ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="of traces that begin here; a caller's is recorded as it says. Default: OTEL_TRACES_SAMPLER",
    )
    record_content: bool = Field(default=False, description="prompts and answers of LLMs too")

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str) -> str:
        url = urlsplit(value)
        if value and (url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment):
            raise ValueError("must be an http(s) URL such as http://localhost:4318")
        if url.username or url.password:
            raise ValueError("holds no secret: OTEL_EXPORTER_OTLP_HEADERS is for those")
        return value

    def is_on(self) -> bool:
        """Whether traces are sent."""
        is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        if is_off or os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
            return False
        return bool(self.endpoint) or any(os.environ.get(name) for name in _ENDPOINTS)

    def fault(self) -> str:
        """Why they cannot be, where they are to; else empty."""
        if not self.is_on() or all(map(_is_installed, _PACKAGES)):
            return ""
        where = "telemetry.traces.endpoint" if self.endpoint else next(n for n in _ENDPOINTS if os.environ.get(n))
        return f"{where}: traces need the extra `otel`, which is not installed (docs/traces.md)"


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a package above it
        return False
