"""What was seen of one model under load, and what is advised of it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.core.types import Priority
from gateway.tuning.curves import LatencyCurve

ENOUGH: Final = 300
"""Requests in the time between two looks: three of them are above the p99."""

LEAST_GAIN: Final = 0.1
"""A change that gains less is not worth a new setting: a simulation is right within some percent only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What may be changed of a model and of the gateway's queue before it.

    Attributes:
        delay_us: max_queue_delay_microseconds.
        instances: of all groups, on each server.
        is_batching: whether it has `dynamic_batching`.
        max_in_flight: of all workers together at one server; 0 where there is no gateway before it.
    """

    max_batch_size: int
    delay_us: int = 0
    instances: int = 1
    is_batching: bool = True
    max_in_flight: int = 0

    def __str__(self) -> str:
        batching = f"delay {self.delay_us} us" if self.is_batching else "no dynamic_batching"
        gate = f", {self.max_in_flight} in flight" if self.max_in_flight else ""
        return (
            f"max_batch_size {self.max_batch_size}, {batching}, {self.instances} "
            f"instance{'' if self.instances == 1 else 's'}{gate}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The requests of one priority: so many a second that come anyway, or so many callers who ask again at once."""

    priority: Priority
    rate: float = 0.0
    callers: int = 0
    rows: int = 1

    def __str__(self) -> str:
        much = f"{self.callers} callers who ask again at once" if self.callers else f"{self.rate:.1f} requests/s"
        return f"{much}, {self.priority}" + (f", of {self.rows} rows" if self.rows > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One model of one backend.

    Attributes:
        curve: how long its batches take.
        knows_more_instances: whether the curve tells how instances slow each other down.
        largest: the size of batch up to which times are known, by measurement or on the line through those that are.
        least: the rows of the largest request: no batch can be smaller.
        preferred: preferred_batch_size.
        queue_timeout_us: default_timeout_microseconds; 0 is none.
        qps / at_server_ms: right answers per second, and how long a request was at the server; 0 where not seen.
        file: the config.pbtxt; empty where it is not known.
        workers: of the gateway, each of which has its own `max_in_flight`.
        assumes: what is taken for given, a line each.
    """

    backend: str
    model: str
    setting: Setting
    curve: LatencyCurve
    parts: Sequence[Part]
    servers: int = 1
    workers: int = 1
    knows_more_instances: bool = False
    largest: int = 0
    least: int = 1
    preferred: tuple[int, ...] = ()
    queue_timeout_us: int = 0
    qps: float = 0.0
    at_server_ms: float = 0.0
    file: str = ""
    assumes: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """Backend and model."""
        return f"{self.backend}/{self.model}" if self.backend else self.model

    @property
    def is_mixed(self) -> bool:
        """Whether some wait for answers, and others can wait."""
        return len({part.priority for part in self.parts}) > 1

    @property
    def is_saturated(self) -> bool:
        """Whether callers wait for the server, so that it decides how many requests there are."""
        return any(part.callers for part in self.parts)

    def at(self, setting: Setting) -> "Situation":
        """The same traffic at another setting."""
        return replace(self, setting=setting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a setting gives, measured or simulated: p99 of those that count, and throughput of all, in rows.

    `bulk` is the rows per second of `batch` requests; `good` the part of the requests that were answered within the
    target, 1 where there is none; `busy` how much of the instances' time was computing.
    """

    p99_ms: float
    rows_per_s: float
    bulk: float = 0.0
    good: float = 1.0
    at_server_ms: float = 0.0
    busy: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change, or that there is none to make.

    Attributes:
        setting / advised: as it is, and as it is to be; None: nothing is to be changed, or nothing can be said.
        gain: how much better by `aim`, 0.1 for a tenth; 0 without a change.
        aim: what was to be made better, in words.
        because: why, in one sentence.
        evidence: numbers, and where they are from, a line each.
        assumes: what has to be so for them to come true, a line each.
        where / diff: what to write: a file, and a unified diff of it, or lines where there is no file to change.
    """

    subject: str
    because: str
    setting: Setting | None = None
    advised: Setting | None = None
    aim: str = ""
    gain: float = 0.0
    before: Outlook | None = None
    after: Outlook | None = None
    evidence: tuple[str, ...] = ()
    assumes: tuple[str, ...] = ()
    where: str = ""
    diff: str = ""
