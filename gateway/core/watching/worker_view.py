"""How one worker sees the backends, read out of its report: what `routing.State` is made of, in another process."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.core.breaker import server_of
from gateway.core.loads import Standing
from gateway.core.routing import BACKEND_OFF
from gateway.core.types import EngineLoad, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker's report, read.

    Attributes:
        at_ms: when it was written, in Unix milliseconds; 0 = never: then all backends are taken to be on.
        replicas: of the backends that are on; empty for one with a single server.
        in_flight: requests by the servers' backend and replica.
        waiting: requests before the servers of each backend.
        shut: what breakers keep out, and why; the model `*` is a whole server.
        standings / engines: what strategies see of places, and what LLM servers say of themselves.
    """

    at_ms: int = 0
    replicas: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    in_flight: Mapping[tuple[str, str], int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    shut: Mapping[Place, str] = field(default_factory=dict)
    standings: Mapping[Place, Standing] = field(default_factory=dict)
    engines: Mapping[tuple[str, str], EngineLoad] = field(default_factory=dict)

    def loads(self, backend: str) -> Mapping[str, int]:
        """See `routing.Loads`."""
        return {name: self.in_flight.get((backend, name), 0) for name in self.replicas.get(backend, ())}

    def why_not(self, place: Place) -> str | None:
        """See `routing.WhyNot`; of switches a report knows nothing."""
        if self.at_ms and place.backend not in self.replicas:
            return BACKEND_OFF
        return self.shut.get(server_of(place)) or self.shut.get(place)

    def kept_out(self, target: Place) -> str:
        """Why no server of its backend gets requests for a rule's target; empty where one does."""
        servers = self.replicas.get(target.backend) or ("",)
        reasons = [self.why_not(replace(target, replica=server)) for server in servers]
        return next((reason for reason in reasons if reason), "") if all(reasons) else ""

    def standing(self, place: Place) -> Standing:
        """How a place stands; as one that nothing was sent to, where the report has nothing on it."""
        found = self.standings.get(place)
        return found or Standing(requests=self.in_flight.get((place.backend, place.replica), 0))


def view_of(report: Mapping[str, Any]) -> WorkerView:
    """The report of `WorkerState`. What is missing is empty; raises `ValueError` or `TypeError` for another form."""
    in_flight: dict[tuple[str, str], int] = {}
    for backend, _, _, replica, count in _rows(report, "in_flight", 5):
        in_flight[backend, replica] = in_flight.get((backend, replica), 0) + int(count)
    return WorkerView(
        at_ms=int(report.get("at_ms", 0)),
        replicas={name: tuple(replicas) for name, replicas in report.get("replicas", {}).items()},
        in_flight=in_flight,
        waiting={name: int(count) for name, count in report.get("waiting", {}).items()},
        shut={_place(row): str(row[4]) for row in _rows(report, "shut", 5)},
        standings={
            _place(row): Standing(requests=int(row[4]), tokens=int(row[5]), first_token_us=row[6])
            for row in _rows(report, "standings", 7)
        },
        engines={
            (backend, replica): EngineLoad(running=int(running), waiting=int(waiting), kv_used=kv_used)
            for backend, replica, running, waiting, kv_used in _rows(report, "engines", 5)
        },
    )


def _rows(report: Mapping[str, Any], name: str, width: int) -> Iterator[Sequence[Any]]:
    for row in report.get(name, ()):
        if len(row) != width:
            raise ValueError(f"{name}: a row of {len(row)}")
        yield row


def _place(row: Sequence[Any]) -> Place:
    backend, model, version, replica = row[:4]
    return Place(backend=backend, model=model, version=version, replica=replica)
