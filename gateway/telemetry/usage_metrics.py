"""What answers used up: tokens and money, and how fast tokens came."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from gateway.core.cost import NANO_USD_PER_USD
from gateway.core.types import Usage
from gateway.core.watching.record import RequestRecord
from gateway.telemetry.exemplars import Folder, Newest
from gateway.telemetry.labels import NONE, Children

# Those of OpenTelemetry's `gen_ai.server.time_to_first_token`, and two more for long queues; seconds.
FIRST_TOKEN_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0),
)
# Those of OpenTelemetry's `gen_ai.server.time_per_output_token`; seconds.
INTER_TOKEN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class UsageMetrics:
    """What is counted of every answer."""

    def __init__(self, registry: CollectorRegistry, exemplars: Folder) -> None:
        self._tokens = Children(
            Counter(
                "gateway_tokens",
                "Tokens, by direction: input, cached (a part of input), output, reasoning (a part of output).",
                ("task", "direction"),
                registry=registry,
            )
        )
        self._estimated = Children(
            Counter(
                "gateway_estimated_usage",
                "Requests whose tokens are the gateway's own estimate, as the backend did not tell.",
                ("task",),
                registry=registry,
            )
        )
        self._cost = Children(
            Counter(
                "gateway_cost_usd",
                "What requests cost, where a price is known, in US dollars.",
                ("task", "backend"),
                registry=registry,
            )
        )
        self._first_token = Children(
            Histogram(
                "gateway_first_token_seconds",
                "Of streamed answers: from the request's first byte read to the answer's first part.",
                ("task", "backend"),
                buckets=FIRST_TOKEN_BUCKETS,
                registry=registry,
            )
        )
        self._exemplars = Newest("gateway_first_token_seconds", ("task", "backend"), FIRST_TOKEN_BUCKETS, exemplars)
        self._inter_token = Children(
            Histogram(
                "gateway_inter_token_seconds",
                "Of whole streamed answers: the time after the first part, by output tokens after the first.",
                ("task", "backend"),
                buckets=INTER_TOKEN_BUCKETS,
                registry=registry,
            )
        )

    def ended(self, record: RequestRecord, backend: str) -> None:
        """A request ended."""
        usage, place = record.usage, (record.task, backend)
        if record.first_token_us is not None and backend != NONE:
            first_token_s = record.first_token_us / 1e6
            self._first_token[place](first_token_s)
            self._exemplars.seen(place, first_token_s, record.trace)
            made = usage.output_tokens or 0
            if made > 1 and record.error is None:
                self._inter_token[place]((record.total_us - record.first_token_us) / 1e6 / (made - 1))
        self._used(record.task, usage)
        if usage.cost_nano_usd is not None:
            self._cost[place](usage.cost_nano_usd / NANO_USD_PER_USD)

    def _used(self, task: str, usage: Usage) -> None:
        for direction, count in (
            ("input", usage.input_tokens),
            ("output", usage.output_tokens),
            ("cached", usage.cached_tokens),
            ("reasoning", usage.reasoning_tokens),
        ):
            if count and count > 0:
                self._tokens[task, direction](count)
        if usage.is_estimated:
            self._estimated[task,](1)
