"""What came of traffic, measured or simulated: one form for both, so that they can be laid side by side. Pure.

Latencies of open traffic are counted from the instant at which a request was due, not from when there was time to
send it: a server that stands still is charged for all that would have come meanwhile (coordinated omission).
"""

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

FORM: Final = "traffic-report/1"
OK: Final = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """In milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p99_9: float
    max: float


def percentiles(times_ms: Sequence[float]) -> Percentiles | None:
    """Of all times, by nearest rank; None where there are none."""
    if not times_ms:
        return None
    ordered = sorted(times_ms)

    def at(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Percentiles(
        mean=math.fsum(ordered) / len(ordered),
        p50=at(0.5),
        p90=at(0.9),
        p95=at(0.95),
        p99=at(0.99),
        p99_9=at(0.999),
        max=ordered[-1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """One class of traffic, or all together.

    Attributes:
        sent: requests that were due in the counted time; each is answered, or ended with a code, or was `unfinished`.
        codes: how they ended, `ok` among them: an error code of the gateway, or what kept it from being asked.
        qps: right answers per second of the counted time; `rows_per_s` the same in rows.
        goodput: right answers within `slo_ms` per second; equal to `qps` where there is no SLO.
        latency: of right answers, from when they were due.
        first_token / inter_token / tokens_per_s: of streams; None where there were none.
    """

    name: str
    slo_ms: float
    sent: int
    codes: Mapping[str, int]
    unfinished: int
    offered: float
    qps: float
    rows_per_s: float
    goodput: float
    latency: Percentiles | None
    first_token: Percentiles | None = None
    inter_token: Percentiles | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """What a model's servers counted by themselves over the same time.

    Attributes:
        batch_sizes: executions by rows; empty where the server does not tell.
        queue_share: of the time that requests spent there, how much they waited.
        busy: how much of the instances' time was computing, 0 to 1; None where it is not known.
    """

    backend: str
    model: str
    executions: int
    mean_batch: float
    queue_ms: float
    compute_ms: float
    queue_share: float
    batch_sizes: Mapping[int, int] = field(default_factory=dict)
    busy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """A second of the run: when it began, right answers, all other ends, and the answers' p50 and p99 in ms."""

    at_s: float
    answered: int
    failed: int
    p50: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run.

    Attributes:
        setting: what was run, for a reader: option to value.
        seconds: counted; what came before (warm-up) is not in it.
        whole: all classes together.
        cost_usd: of the servers over the counted time; None without prices.
        notes: what a reader has to know before he believes it.
    """

    kind: Literal["load", "simulation"]
    title: str
    setting: Mapping[str, str]
    seconds: float
    whole: ClassReport
    classes: Sequence[ClassReport] = ()
    servers: Sequence[ServerReport] = ()
    timeline: Sequence[Second] = ()
    cost_usd: float | None = None
    notes: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"form": FORM, **asdict(self)}


def parse_report(given: Mapping[str, Any]) -> Report:
    """A report out of `as_json`. Raises ValueError for what is none."""
    if given.get("form") != FORM:
        raise ValueError(f"form: must be '{FORM}', not {given.get('form')!r}")
    try:
        plain = {name: value for name, value in given.items() if name != "form"}
        return Report(
            **plain
            | {
                "whole": _class(plain["whole"]),
                "classes": tuple(_class(one) for one in plain["classes"]),
                "servers": tuple(_server(one) for one in plain["servers"]),
                "timeline": tuple(Second(**one) for one in plain["timeline"]),
                "notes": tuple(plain["notes"]),
            }
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no report: {error}") from error


def _class(given: Mapping[str, Any]) -> ClassReport:
    times = {
        name: None if given[name] is None else Percentiles(**given[name])
        for name in ("latency", "first_token", "inter_token")
    }
    return ClassReport(**{**given, **times})


def _server(given: Mapping[str, Any]) -> ServerReport:
    return ServerReport(**{**given, "batch_sizes": {int(rows): n for rows, n in given["batch_sizes"].items()}})


class Tally:
    """Counts the requests of one class while they end. Times in seconds since the start.

    Args:
        name / slo_ms / rows: of the class.
        from_s / until_s: requests that were due then count; others warmed up, or came after the end.
    """

    def __init__(self, *, name: str, slo_ms: float, rows: int, from_s: float, until_s: float) -> None:
        self.name = name
        self.slo_ms = slo_ms
        self.rows = rows
        self.from_s = from_s
        self.until_s = until_s
        self.sent = 0
        self.codes: Counter[str] = Counter()
        self.due_s, self.latency_ms = array("d"), array("d")  # of right answers, side by side
        self.failed_s = array("d")
        self.first_token_ms, self.inter_token_ms = array("d"), array("d")
        self.tokens = 0

    def counts(self, due_s: float) -> bool:
        """Whether a request that is due then is counted at all."""
        return self.from_s <= due_s < self.until_s

    def due(self, due_s: float) -> None:
        """A request was due. `ended` follows, unless the run ends first."""
        self.sent += self.counts(due_s)

    def ended(self, due_s: float, ended_s: float, code: str = OK) -> None:
        """It has ended: `ok` with a right answer."""
        if not self.counts(due_s):
            return
        self.codes[code] += 1
        if code == OK:
            self.due_s.append(due_s)
            self.latency_ms.append((ended_s - due_s) * 1e3)
        else:
            self.failed_s.append(due_s)

    def streamed(self, due_s: float, *, first_token_s: float, gaps_ms: Sequence[float], tokens: int) -> None:
        """Of a streamed answer, beside `ended`: when its first token came, the gaps after it, and all its tokens."""
        if self.counts(due_s):
            self.first_token_ms.append((first_token_s - due_s) * 1e3)
            self.inter_token_ms.extend(gaps_ms)
            self.tokens += tokens


def class_report(tallies: Sequence[Tally], *, name: str, seconds: float) -> ClassReport:
    """What `tallies` counted, together."""
    latency = array("d", (one for tally in tallies for one in tally.latency_ms))
    first = array("d", (one for tally in tallies for one in tally.first_token_ms))
    gaps = array("d", (one for tally in tallies for one in tally.inter_token_ms))
    codes: Counter[str] = Counter()
    for tally in tallies:
        codes += tally.codes
    good = sum(
        sum(one <= tally.slo_ms for one in tally.latency_ms) if tally.slo_ms else len(tally.latency_ms)
        for tally in tallies
    )
    sent = sum(tally.sent for tally in tallies)
    slos = {tally.slo_ms for tally in tallies}
    return ClassReport(
        name=name,
        slo_ms=slos.pop() if len(slos) == 1 else 0.0,
        sent=sent,
        codes=dict(sorted(codes.items())),
        unfinished=sent - codes.total(),
        offered=sent / seconds,
        qps=codes[OK] / seconds,
        rows_per_s=sum(len(tally.latency_ms) * tally.rows for tally in tallies) / seconds,
        goodput=good / seconds,
        latency=percentiles(latency),
        first_token=percentiles(first),
        inter_token=percentiles(gaps),
        tokens_per_s=sum(tally.tokens for tally in tallies) / seconds if first else None,
    )


def timeline(tallies: Sequence[Tally], *, step_s: float = 1.0) -> tuple[Second, ...]:
    """The run in steps, by when requests were due."""
    times: dict[int, list[float]] = {}
    failed: Counter[int] = Counter()
    for tally in tallies:
        for due_s, latency_ms in zip(tally.due_s, tally.latency_ms, strict=True):
            times.setdefault(int(due_s // step_s), []).append(latency_ms)
        failed.update(int(due_s // step_s) for due_s in tally.failed_s)
    found = []
    for step in sorted(times.keys() | failed.keys()):
        these = percentiles(times.get(step, ()))
        found.append(
            Second(
                at_s=step * step_s,
                answered=len(times.get(step, ())),
                failed=failed[step],
                p50=these.p50 if these else None,
                p99=these.p99 if these else None,
            )
        )
    return tuple(found)
