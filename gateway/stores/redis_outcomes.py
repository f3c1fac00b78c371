"""What became of requests, by the version of the model that they were sent to, of all workers together.

A server counts what it believes to have done well (Triton 2.51 counts an error that a model answers to one request as a
success); the gateway sees errors, answers that break the model's own word, and time-outs.

Layout: `{prefix}outcomes:{model}`, a hash of `{version}:answered` and `{version}:failed`; it expires an hour after its
last word.
"""

import logging
from collections import Counter
from collections.abc import Mapping

from redis.asyncio import Redis

from gateway.core.attempts import CONSEQUENCES
from gateway.core.errors import Fault, FaultKind
from gateway.core.models import Outcomes
from gateway.core.types import Place, Route
from gateway.core.watching.record import RequestRecord
from gateway.stores.flushing import TIMEOUT_S, Flushing
from gateway.stores.redis_script import UNREACHABLE, answering, in_time

FLUSH_S = 0.25
FORGET_AFTER_S = 3600
MAX_WAITING = 10_000  # names that are counted and not written yet; more are Redis's absence, and are let go

_log = logging.getLogger(__name__)


class RedisOutcomeCounter(Flushing):
    """An `Observer` that counts the requests to places with a version, and writes the counts four times a second."""

    def __init__(self, client: Redis, prefix: str) -> None:
        super().__init__("outcomes", FLUSH_S)
        self._client = client
        self._prefix = prefix
        self._counts: Counter[tuple[str, str]] = Counter()

    def began(self, task: str) -> None:
        """Nothing is known of it yet."""

    def refused(self, record: RequestRecord) -> None:
        """It has not come to any model."""

    def ended(self, record: RequestRecord) -> None:
        """Count each attempt: those that failed, and the one that answered."""
        if record.plan is None or not record.plan.candidates:
            return
        places = record.plan.candidates
        # Rules name a version only while it matters which.
        if not places[0].version:
            return
        for fault in record.faults:
            if fault.place and fault.place.version and _is_failure(fault):
                self._count(fault.place.model, f"{fault.place.version}:failed")
        route = record.route
        if record.error is None and route and any(place.version and _is_at(route, place) for place in places):
            self._count(route.model, f"{route.version}:answered")

    def _count(self, model: str, name: str) -> None:
        if len(self._counts) < MAX_WAITING:
            self._counts[model, name] += 1

    async def _write(self) -> bool:
        counts, self._counts = self._counts, Counter()
        if not counts:
            return False
        try:
            async with in_time(TIMEOUT_S), self._client.pipeline(transaction=False) as steps:
                for (model, name), count in counts.items():
                    steps.hincrby(f"{self._prefix}outcomes:{model}", name, count)
                for model in {model for model, _ in counts}:
                    steps.expire(f"{self._prefix}outcomes:{model}", FORGET_AFTER_S)
                await steps.execute()
        except UNREACHABLE:  # a late count would be taken for one of now
            self.lost += counts.total()
            raise
        return True


class RedisOutcomes:
    """See `admin_ports.OutcomeSource`."""

    def __init__(self, client: Redis, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    async def read(self, model: str) -> Mapping[str, Outcomes]:
        """By version. Raises `RulesUnavailable` when Redis does not answer."""
        async with answering("the outcomes", TIMEOUT_S):
            stored = await self._client.hgetall(f"{self._prefix}outcomes:{model}")
        found: dict[str, dict[str, int]] = {}
        for name, count in stored.items():
            version, _, kind = (name.decode() if isinstance(name, bytes) else name).partition(":")
            found.setdefault(version, {})[kind] = int(count)
        return {
            version: Outcomes(requests=counts.get("answered", 0), failures=counts.get("failed", 0))
            for version, counts in found.items()
        }


def _is_at(route: Route, place: Place) -> bool:
    """Whether the answer came from `place`; what a server tells of its version where none was named is no match."""
    return (route.backend, route.model, route.version) == (place.backend, place.model, place.version)


def _is_failure(fault: Fault) -> bool:
    """Whether the model, or where it runs, may be at fault."""
    return fault.kind is FaultKind.FAILED or CONSEQUENCES[fault.kind].blames_backend
