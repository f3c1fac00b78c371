"""OpenTelemetry spans, made of what the walk knows of a request once it has ended; needs the extra `otel`.

    SERVER "POST general_llm"
      admit      to the end of admission: the door, what may be given again, limits, the turn in an order
      route
      dispatch
        CLIENT "chat smollm2"      each attempt, with the span id that its place was told
      settle

On a request's way only ids are made (`begin`, and one for each attempt): no span is open while it is served, and no
context follows it from task to task. A worker's spans wait in the SDK's own queue and are sent by its own thread.
"""

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from gateway.attempt import new_span_id
from gateway.core.trace import RANDOM, ROUTE, SAMPLED, Trace, incoming
from gateway.core.watching.record import RequestRecord
from gateway.core.watching.steps import Steps, TracedAttempt
from gateway.ports import Clock
from gateway.telemetry import span_attributes
from gateway.telemetry.span_attributes import Attributes, Endpoint

SERVICE: Final = "hybrid-inference-gateway"
CLOSE_S: Final = 3.0  # how long a stop waits for the last spans to be sent
_SERVER_ERROR: Final = 500
_OK: Final = Status(StatusCode.UNSET)
_FAILED: Final = Status(StatusCode.ERROR)
_SCOPE: Final = InstrumentationScope(SERVICE)


class Tracing:
    """The traces of one worker: says at the door what is recorded, and makes an observer's spans of it.

    Args:
        processor: takes the spans; it is shut down by `close`.
        provider: for its sampler and its resource.
        clock: by which records have their instants.
        endpoints: the LLM backends, by name.
        record_content: prompts and answers are recorded too.
    """

    def __init__(
        self,
        processor: SpanProcessor,
        provider: TracerProvider,
        *,
        clock: Clock,
        endpoints: Mapping[str, Endpoint],
        record_content: bool = False,
    ) -> None:
        self._processor = processor
        self._sampler = provider.sampler
        self._resource = provider.resource
        self._clock = clock
        self._endpoints = endpoints
        self._record_content = record_content
        # It would write a line for each member of `tracestate` that an older specification did not know, at each span.
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)

    def begin(self, headers: Mapping[str, str], scope: Mapping[str, Any]) -> Trace:
        """The trace of a request that comes with these headers (names in small letters), or a new one.

        `scope` is ASGI's, of an HTTP request or a WebSocket.

        What is not recorded keeps the caller's span as its parent, and the caller's flags.
        """
        came = incoming(headers)
        parent = (
            None if came is None else set_span_in_context(NonRecordingSpan(_context(came, came.span_id)), Context())
        )
        trace = came or Trace(
            trace_id=f"{random.getrandbits(128) or 1:032x}",
            span_id=new_span_id(),
            flags=RANDOM,
        )
        method = scope.get("method", "GET")  # with which a WebSocket begins
        name = f"{method} {scope['path']}"
        sampled = self._sampler.should_sample(parent, int(trace.trace_id, 16), name, SpanKind.SERVER)
        if sampled.decision is not Decision.RECORD_AND_SAMPLE:
            return trace
        span_id = new_span_id() if came else trace.span_id
        flags = trace.flags | SAMPLED
        return replace(
            trace,
            span_id=span_id,
            flags=flags,
            is_recorded=True,
            has_content=self._record_content,
            method=method,
            scheme=scope.get("scheme", "http"),
            path=scope["path"],
            route=scope.get(ROUTE, ""),
        )

    def began(self, task: str) -> None:
        """Nothing is recorded before the end."""

    def ended(self, record: RequestRecord) -> None:
        """The request's spans, where its trace is recorded."""
        if record.trace is not None and record.trace.is_recorded:
            _Spans(self, record, record.trace).tell()

    def refused(self, record: RequestRecord) -> None:
        """The same: a span of its own, and none of steps."""
        self.ended(record)

    async def close(self) -> None:
        """Send what there is, for `CLOSE_S` at most."""
        # A daemon, so that a collector that hangs keeps no process from its end.
        closing = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_S)

    def span(  # noqa: PLR0913 - a span's fields, each by its name
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        *,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        is_failed: bool = False,
    ) -> None:
        """One span, whole.

        The SDK would have spans begun by its tracer, which makes up their ids. These have theirs already, told to
        places before, and have ended; they are given to its processor as that would do.
        """
        self._processor.on_end(
            ReadableSpan(
                name=name,
                context=context,
                parent=parent,
                resource=self._resource,
                attributes=attributes,
                kind=kind,
                status=_FAILED if is_failed else _OK,
                start_time=start_ns,
                end_time=end_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    @property
    def now_us(self) -> int:
        """By the clock of the records."""
        return self._clock()

    def of_attempt(self, tried: TracedAttempt) -> Attributes:
        """An attempt's attributes."""
        told = span_attributes.of_attempt(tried, self._endpoints.get(tried.place.backend))
        return {**told, **span_attributes.content(tried)} if self._record_content else told


class _Spans:
    """Those of one request."""

    def __init__(self, tracing: Tracing, record: RequestRecord, trace: Trace) -> None:
        self._tracing = tracing
        self._record = record
        self._trace = trace
        self._now_us = tracing.now_us
        self._to_unix_ns = time.time_ns() - self._now_us * 1000
        self._own = _context(trace, trace.span_id)

    def tell(self) -> None:
        """The server span and those below it."""
        record, trace, steps = self._record, self._trace, self._record.steps
        if steps is not None:
            self._steps(steps)
        parent = _context(trace, trace.parent_id, is_remote=True) if trace.parent_id else None
        began_us = self._now_us - record.total_us if steps is None else steps.received_us
        self._tracing.span(
            f"{trace.method} {record.task}".strip(),
            self._own,
            parent,
            start_ns=self._ns(began_us),
            end_ns=self._ns(self._now_us),
            attributes=span_attributes.of_request(record),
            kind=SpanKind.SERVER,
            is_failed=record.status >= _SERVER_ERROR,
        )

    def _steps(self, steps: Steps) -> None:
        error, ended_us = self._record.error, steps.ended_us
        routing_us, routed_us = steps.routing_us, steps.routed_us
        self._step("admit", steps.received_us, ended_us if routing_us is None else routing_us)
        if routing_us is not None:
            self._step("route", routing_us, ended_us if routed_us is None else routed_us)
        if routed_us is not None:
            dispatch = self._step("dispatch", routed_us, ended_us, is_failed=error is not None and bool(steps.tried))
            for tried in steps.tried:
                self._attempt(tried, dispatch)
        self._step("settle", ended_us, self._now_us)

    def _step(self, name: str, start_us: int, end_us: int, *, is_failed: bool = False) -> SpanContext:
        context = _context(self._trace, new_span_id())
        start_ns, end_ns = self._ns(start_us), self._ns(end_us)
        self._tracing.span(
            name, context, self._own, start_ns=start_ns, end_ns=end_ns, attributes={}, is_failed=is_failed
        )
        return context

    def _attempt(self, tried: TracedAttempt, dispatch: SpanContext) -> None:
        payload, model = tried.payload, tried.place.model
        self._tracing.span(
            span_attributes.text(f"{span_attributes.operation(payload) if payload else 'infer'} {model}"),
            _context(self._trace, tried.span_id or new_span_id()),
            dispatch,
            start_ns=self._ns(tried.began_us),
            end_ns=self._ns(tried.ended_us),
            attributes=self._tracing.of_attempt(tried),
            kind=SpanKind.CLIENT,
            is_failed=tried.fault is not None,
        )

    def _ns(self, instant_us: int) -> int:
        return instant_us * 1000 + self._to_unix_ns


def _context(trace: Trace, span_id: str, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(
        int(trace.trace_id, 16),
        int(span_id, 16),
        is_remote=is_remote,
        trace_flags=TraceFlags(trace.flags),
        trace_state=TraceState.from_header([trace.state]) if trace.state else None,
    )


def open_tracing(
    *,
    endpoint: str,
    sample_ratio: float | None,
    clock: Clock,
    endpoints: Mapping[str, Endpoint],
    record_content: bool,
) -> Tracing:
    """Spans to an OTLP/HTTP receiver at `endpoint`; what is empty or None is as the SDK's `OTEL_*` variables say."""
    sampler = None if sample_ratio is None else ParentBased(TraceIdRatioBased(sample_ratio))
    resource = Resource.create({"process.pid": os.getpid()})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # neither variable names it
        resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
    return Tracing(
        BatchSpanProcessor(exporter), provider, clock=clock, endpoints=endpoints, record_content=record_content
    )
