"""Which neighbour of a setting is better, by the simulator: the gateway's and the runtime's own code. No I/O."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.tuning.advising.situation import LEAST_GAIN, Advice, Outlook, Setting, Situation
from gateway.tuning.report import OK, ClassReport, Report
from gateway.tuning.simulation.run import simulate
from gateway.tuning.simulation.world import parse_world
from gateway.tuning.slo import Slo

DELAYS_US: Final = (0, 500, 2000, 5000)
BATCHES_AHEAD: Final = 2
"""Of each instance, at the server: one that runs and one that is ready; the rest waits where priorities count."""

REQUESTS: Final = 3000
"""Of one simulation: thirty of them are above the p99. Some tenths of a second of a core."""

MOST_REQUESTS: Final = 20_000
MOST_IN_FLIGHT: Final = 100_000
"""No bound, to the simulator."""

WATCHED: Final = 500
"""Of those whose p99 counts, where they are few among many."""

TRUST: Final = 2.0
"""Times by which a simulation of the setting as it is may miss what was seen; beyond that it does not know enough."""

KEEPS: Final = 0.95
"""Of the throughput, that a better p99 may not cost more than."""

SAME: Final = 0.03
"""What differs by less in gain from the best is as good; the first of `neighbours` is taken then."""

BUSY: Final = 0.5
"""Of the instances' time: below it one more is not what is missing, though a queue always gets shorter by it."""

SEEDS: Final = (1, 2)
"""What is better by chance in one of the two is not in the other."""

Simulate = Callable[[Situation, float, int], Outlook]
"""A situation, the ms of its SLO (0: none) and a seed -> what comes of it."""


def advise(situation: Situation, *, slo: Slo | None = None, simulated: Simulate | None = None) -> Advice:
    """The best single change, or why there is none.

    As long as `slo` is held the setting is right; without one the best p99, or throughput, is looked for.
    """
    run, slo_ms = simulated or outlook, slo.ms if slo else 0.0
    now = run(situation, slo_ms, SEEDS[0])
    told = _told(situation, now)
    if not _is_trusted(situation, now):
        return Advice(
            subject=situation.subject,
            because="the simulation does not come near what was seen, so it is not asked; measure: `gateway sweep`",
            setting=situation.setting,
            before=now,
            evidence=told,
            assumes=situation.assumes,
        )
    if slo and now.good * 100 >= slo.percent:
        because = f"{now.good:.1%} of the requests are answered within {slo.ms:g} ms"
        return _none(situation, now, because, told)
    aim = _Aim.of(situation, slo_ms)
    is_short = now.busy >= BUSY or bool(slo_ms)
    tried = [
        (one, run(situation.at(one), slo_ms, SEEDS[0]))
        for one in neighbours(situation)
        if is_short or one.instances <= situation.setting.instances
    ]
    better = [(aim.gain(now, then), one, then) for one, then in tried]
    most = max((found[0] for found in better), default=0.0)
    better.sort(key=lambda found: min(found[0], most - SAME), reverse=True)
    worth = [one for one in better if one[0] >= LEAST_GAIN]
    # An instance more needs room that nobody has looked at: the last resort.
    worth.sort(key=lambda one: not situation.knows_more_instances and one[1].instances > situation.setting.instances)
    again = None
    for gain, setting, then in worth:
        again = again or run(situation, slo_ms, SEEDS[1])
        sure = min(gain, aim.gain(again, run(situation.at(setting), slo_ms, SEEDS[1])))
        if sure >= LEAST_GAIN:
            return _change(situation, aim, found=(sure, setting, then), now=now, told=told)
    names = f"none of {len(tried)} neighbours is better by {LEAST_GAIN:.0%}"
    if better:
        gain, best, then = better[0]
        names += f"; the nearest, {changes(situation.setting, best)}: {aim.words(now, then)}"
    return _none(situation, now, names, told)


def outlook(situation: Situation, slo_ms: float, seed: int) -> Outlook:
    """By the simulator."""
    return outlook_of(simulate(parse_world(world(situation, slo_ms)), seed=seed), situation)


def outlook_of(report: Report, situation: Situation) -> Outlook:
    """What a report says of those that count: interactive requests where there are both kinds, else all."""
    classes = {one.name: one for one in report.classes}
    watched = classes["interactive"] if situation.is_mixed else report.whole
    server = next((one for one in report.servers if one.model == situation.model), None)
    return Outlook(
        p99_ms=watched.latency.p99 if watched.latency else float("inf"),
        rows_per_s=report.whole.rows_per_s,
        bulk=classes["batch"].rows_per_s if "batch" in classes else 0.0,
        good=_good(watched),
        at_server_ms=server.queue_ms + server.compute_ms if server else 0.0,
        busy=(server.busy or 0.0) if server else 0.0,
    )


def _good(watched: ClassReport) -> float:
    """Requests under way at the end are left out: in a short run of a full server they are many, and not late."""
    ended = sum(watched.codes.values())
    if not ended:
        return 0.0
    return watched.goodput / watched.qps * watched.codes.get(OK, 0) / ended if watched.qps else 0.0


def world(situation: Situation, slo_ms: float = 0.0) -> dict[str, Any]:
    """The situation as a document for `simulation.world.parse_world`."""
    setting, backend = situation.setting, situation.backend or "server"
    model: dict[str, Any] = {
        "curve": situation.curve.as_json(),
        "max_batch_size": setting.max_batch_size,
        "instances": setting.instances,
    }
    if setting.is_batching:
        model["dynamic_batching"] = _batching(situation)
    duration_s = _duration_s(situation)
    return {
        "title": f"{situation.subject}: {setting}",
        "models": {situation.model: model},
        "backends": {
            backend: {
                "replicas": situation.servers,
                "max_in_flight": setting.max_in_flight or MOST_IN_FLIGHT,
                "max_queue_size": MOST_IN_FLIGHT,
            }
        },
        "tasks": {"simulated": {"timeout_ms": 60_000, "attempt_timeout_ms": 60_000}},
        "traffic": [
            {
                "name": part.priority,
                "priority": part.priority,
                "tenant": part.priority,
                "rows": part.rows,
                "slo_ms": slo_ms,
                **({"concurrency": part.callers} if part.callers else {"rate": part.rate}),
            }
            for part in situation.parts
        ],
        "duration_s": duration_s,
        "warmup_s": duration_s / 10,
    }


def _batching(situation: Situation) -> Mapping[str, Any]:
    found: dict[str, Any] = {"max_queue_delay_microseconds": situation.setting.delay_us}
    if situation.preferred:
        found["preferred_batch_size"] = list(situation.preferred)
    if situation.queue_timeout_us:
        found["default_queue_policy"] = {"default_timeout_microseconds": situation.queue_timeout_us}
    return found


def _duration_s(situation: Situation) -> float:
    """So long that there are enough requests, of those that count too."""
    watched = [part for part in situation.parts if part.priority == "interactive"] or situation.parts
    whole = sum(part.rate or _throughput(situation) for part in situation.parts)
    of_watched = sum(part.rate or _throughput(situation) for part in watched)
    wanted = max(REQUESTS / whole, WATCHED / of_watched)
    return min(max(1.0, wanted), MOST_REQUESTS / whole)


def _throughput(situation: Situation) -> float:
    """Requests a second of callers who ask again at once: as seen, else what full batches can give."""
    if situation.qps:
        return situation.qps
    rows = max(1, situation.setting.max_batch_size)
    each = max(1.0, situation.curve.mean_us(rows)) / 1e6
    return rows / each * situation.setting.instances * situation.servers


def neighbours(situation: Situation) -> Iterator[Setting]:
    """Settings that differ in one thing, and can be served."""
    now, preferred = situation.setting, max(situation.preferred, default=0)
    if now.max_batch_size and now.is_batching:
        for size in (now.max_batch_size * 2, now.max_batch_size // 2):
            if max(1, situation.least, preferred) <= size <= situation.largest:
                yield replace(now, max_batch_size=size)
        for delay_us in DELAYS_US:
            if delay_us != now.delay_us:
                yield replace(now, delay_us=delay_us)
    elif now.max_batch_size > 1 and situation.largest > 1:
        yield replace(now, is_batching=True, delay_us=0)
    yield replace(now, instances=now.instances + 1)
    if now.instances > 1:
        yield replace(now, instances=now.instances - 1)
    if situation.is_mixed:
        ahead = -(-BATCHES_AHEAD * now.instances * max(1, now.max_batch_size) // _rows(situation))
        each = max(1, ahead // situation.workers)
        if each * situation.workers < (now.max_in_flight or MOST_IN_FLIGHT):
            yield replace(now, max_in_flight=each * situation.workers)


def _rows(situation: Situation) -> int:
    """Of the requests that fill the server."""
    return max((part.rows for part in situation.parts if part.priority == "batch"), default=1)


@dataclass(frozen=True, slots=True)
class _Aim:
    """What makes a setting better than another."""

    name: str
    of_interactive: bool = False

    @classmethod
    def of(cls, situation: Situation, slo_ms: float) -> "_Aim":
        if slo_ms:
            return cls(f"requests within {slo_ms:g} ms")
        if situation.is_mixed:
            return cls("p99 of interactive requests", of_interactive=True)
        return cls("throughput" if situation.is_saturated else "p99")

    def gain(self, now: Outlook, then: Outlook) -> float:
        """How much better, 0.1 for a tenth; below 0 where it costs too much of something else."""
        keeps = then.rows_per_s >= KEEPS * now.rows_per_s and then.bulk >= KEEPS * now.bulk
        if self.name == "throughput":
            return then.rows_per_s / now.rows_per_s - 1 if then.p99_ms <= 1.1 * now.p99_ms else -1.0
        if not keeps:
            return -1.0
        if self.name.startswith("requests"):
            return then.good / now.good - 1 if now.good else (1.0 if then.good else 0.0)
        return 1 - then.p99_ms / now.p99_ms

    def words(self, now: Outlook, then: Outlook) -> str:
        """Both, side by side."""
        rows = f"{now.rows_per_s:,.1f} -> {then.rows_per_s:,.1f} rows/s"
        p99 = f"p99 {now.p99_ms:,.1f} -> {then.p99_ms:,.1f} ms"
        if self.of_interactive:
            return f"interactive {p99}, batch {now.bulk:,.1f} -> {then.bulk:,.1f} rows/s"
        good = f"{now.good:.1%} -> {then.good:.1%} in time, " if self.name.startswith("requests") else ""
        return f"{good}{p99}, {rows}"


def changes(before: Setting, after: Setting) -> str:
    """In the words of the files: `max_queue_delay_microseconds 5000 -> 0`."""
    told = []
    if not before.is_batching and after.is_batching:
        told.append("dynamic_batching { }")
    for name, field in (
        ("max_batch_size", "max_batch_size"),
        ("max_queue_delay_microseconds", "delay_us"),
        ("instance_group count", "instances"),
        ("max_in_flight", "max_in_flight"),
    ):
        old, new = getattr(before, field), getattr(after, field)
        if old != new:
            told.append(f"{name} {old} -> {new}")
    return ", ".join(told)


def _is_trusted(situation: Situation, now: Outlook) -> bool:
    """Whether the simulation of the setting as it is is anything like it."""
    pairs = [(situation.at_server_ms, now.at_server_ms)]
    if situation.is_saturated:
        pairs.append((situation.qps * _mean_rows(situation), now.rows_per_s))
    return all(not seen or (told > 0 and 1 / TRUST <= told / seen <= TRUST) for seen, told in pairs)


def _mean_rows(situation: Situation) -> float:
    """Of a request; all parts alike where one has no rate."""
    return sum(part.rows for part in situation.parts) / len(situation.parts)


def _told(situation: Situation, now: Outlook) -> tuple[str, ...]:
    lines = [f"as it is: {situation.setting}", f"traffic: {'; '.join(map(str, situation.parts))}"]
    if situation.at_server_ms:
        lines.append(
            f"time of a request at the server: seen {situation.at_server_ms:.1f} ms, simulated {now.at_server_ms:.1f} "
            "ms on the average"
        )
    if situation.curve.source:
        lines.append(f"times of batches: {situation.curve.source}")
    return tuple(lines)


def _none(situation: Situation, now: Outlook, because: str, told: tuple[str, ...]) -> Advice:
    return Advice(
        subject=situation.subject,
        because=because,
        setting=situation.setting,
        before=now,
        evidence=told,
        assumes=situation.assumes,
    )


def _change(
    situation: Situation,
    aim: _Aim,
    *,
    found: tuple[float, Setting, Outlook],
    now: Outlook,
    told: tuple[str, ...],
) -> Advice:
    gain, setting, then = found
    more = situation.assumes
    if setting.instances > situation.setting.instances and not situation.knows_more_instances:
        more += ("an instance more has cores, or a GPU, and memory of its own: nothing that was seen tells so",)
    return Advice(
        subject=situation.subject,
        because=changes(situation.setting, setting),
        setting=situation.setting,
        advised=setting,
        aim=aim.name,
        gain=gain,
        before=now,
        after=then,
        evidence=(*told, f"simulated, now -> then: {aim.words(now, then)}"),
        assumes=more,
    )
