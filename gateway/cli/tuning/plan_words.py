"""What `gateway plan` found, in words, tables and JSON."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from gateway.cli.show import add, fields, figure, percent, show, table
from gateway.cli.terminal import say
from gateway.tuning.planning import FULLEST, Candidate, Found, Outcome, Point, Setting
from gateway.tuning.planning_worlds import MOST_REQUESTS, Situation, is_cut
from gateway.tuning.simulation.outcome import NOTES
from gateway.tuning.slo import Slo

FORM: Final = "capacity-plan/1"
_SHOWN: Final = 8  # settings


def plan_document(found: Found, situation: Situation, *, headroom: float, seeds: Sequence[int]) -> dict[str, Any]:
    """For programs. What is infinite, because it was never answered, is null."""
    return {
        "form": FORM,
        "slo": _slo_words(situation),
        "model": situation.model,
        "backend": situation.backend,
        "seeds": list(seeds),
        "runs": found.runs,
        "chosen": _point(found.chosen, situation, headroom),
        "config_pbtxt": config_lines(found.chosen.setting) if found.chosen else [],
        "one_less": _point(found.below, situation, headroom),
        "settings": [_point(one, situation, headroom) for one in found.settings],
        "front": [_point(one, situation, headroom) for one in found.front],
        "closest": _point(found.closest, situation, headroom),
        "why": why_none(found, situation) if found.chosen is None else "",
        "ruled_out": [
            {"setting": asdict(one.setting), "least_replicas": one.least, "impossible": one.impossible}
            for one in found.ruled_out
        ],
        "notes": list(_notes(found, situation, headroom=headroom, seeds=seeds)),
    }


def show_plan(found: Found, situation: Situation, *, headroom: float, seeds: Sequence[int]) -> None:
    """The plan, what it rests on, and what else there was."""
    chosen = found.chosen
    if chosen is None:
        say(f"no setting holds {_slo_words(situation)}: {why_none(found, situation)}")
    else:
        worst = chosen.worst
        show(
            fields(
                {
                    "plan": f"{so_many(chosen.replicas)} of '{situation.backend}', {setting_words(chosen.setting)}",
                    "cost": _cost_words(chosen.replicas, situation, headroom),
                    f"{_slo_words(situation)}": f"{_ms(worst.latency_ms)} in the worst of {len(seeds)} runs",
                    "p50 / p99": f"{_ms(worst.p50_ms)} / {_ms(worst.p99_ms)}",
                    "goodput": f"{_rate(worst.goodput)} requests/s, {percent(worst.good)} of what came within the SLO",
                    "busy": f"{percent(worst.busy)} of the instances' time, {worst.mean_batch:.1f} rows a batch",
                }
            )
        )
        say(f"\nconfig.pbtxt of '{situation.model}':")
        for line in config_lines(chosen.setting):
            say(f"  {line}")
    if found.settings:
        show(_table(found.settings[:_SHOWN], "fewest replicas of each setting", situation, headroom))
    if len(found.front) > 1:
        show(_table(found.front, "lower latency for more replicas, of what was run", situation, headroom))
    for note in _notes(found, situation, headroom=headroom, seeds=seeds):
        say(f"note: {note}")


def setting_words(setting: Setting) -> str:
    """In a line."""
    preferred = f", preferred_batch_size {setting.preferred_batch_size[0]}" if setting.preferred_batch_size else ""
    return (
        f"max_batch_size {setting.max_batch_size}, max_queue_delay_microseconds "
        f"{setting.max_queue_delay_microseconds}{preferred}, instance_group.count {setting.count}"
    )


def config_lines(setting: Setting) -> list[str]:
    """Of a `config.pbtxt`, in place of those that it has."""
    preferred = "".join(f" preferred_batch_size: [ {size} ]" for size in setting.preferred_batch_size)
    return [
        f"max_batch_size: {setting.max_batch_size}",
        f"dynamic_batching {{ max_queue_delay_microseconds: {setting.max_queue_delay_microseconds}{preferred} }}",
        f"instance_group [ {{ count: {setting.count} }} ]",
    ]


def why_none(found: Found, situation: Situation) -> str:
    """Which comes closest, and what is in its way; that computing alone is too long for the others."""
    closest = found.closest
    if closest is None:
        return _why_ruled_out(found.ruled_out, situation)
    worst = closest.worst
    if math.isinf(worst.latency_ms):
        told = f"{percent(worst.good)} of the requests had a right answer in time"
    else:
        told = f"p{situation.percent:g} is {_ms(worst.latency_ms)}"
    return (
        f"the closest is {setting_words(closest.setting)} on {so_many(closest.replicas)}, where {told}: on average "
        f"{_ms(worst.queue_ms)} waiting, max_queue_delay included, and {_ms(worst.compute_ms)} computing"
    )


def _why_ruled_out(ruled_out: Sequence[Candidate], situation: Situation) -> str:
    possible = [one for one in ruled_out if not one.impossible]
    if possible:
        best = min(possible, key=lambda one: one.least)
        return (
            f"{_rate(situation.rows_per_s)} rows/s need {so_many(best.least)} at least, by the curve, with "
            f"{setting_words(best.setting)}: more than --max-replicas"
        )
    best = ruled_out[0]
    return f"{best.impossible} with {setting_words(best.setting)}, and with no other setting less than the SLO"


def _table(points: Sequence[Point], title: str, situation: Situation, headroom: float) -> Any:
    right = ("replicas", "USD/h", "max batch", "delay us", "count", "p50 ms", "p99 ms", "busy", "mean batch")
    made = table(*right, "preferred", "simulated", title=title, right=right)
    for one in points:
        setting, worst = one.setting, one.worst
        hourly = _costs(one.replicas, situation, headroom)[0]
        add(
            made,
            one.replicas,
            None if hourly is None else f"{hourly:,.2f}",
            setting.max_batch_size,
            setting.max_queue_delay_microseconds,
            setting.count,
            f"{worst.p50_ms:.1f}",
            f"{worst.p99_ms:.1f}",
            percent(worst.busy),
            f"{worst.mean_batch:.1f}",
            ", ".join(map(str, setting.preferred_batch_size)),
            so_many(worst.replicas),
        )
    return made


def _costs(replicas: int, situation: Situation, headroom: float) -> tuple[float | None, float | None]:
    """USD per hour, and per million requests of the rate without headroom; None without a price, or without a rate."""
    each = float((situation.document["backends"][situation.backend] or {}).get("usd_per_hour", 0.0))
    if not each:
        return None, None
    hourly = each * replicas
    return hourly, hourly / (situation.rate / (1 + headroom) * 3600) * 1e6 if situation.rate else None


def so_many(count: int) -> str:
    """Replicas, in words."""
    return "1 replica" if count == 1 else f"{count} replicas"


def _cost_words(replicas: int, situation: Situation, headroom: float) -> str:
    hourly, million = _costs(replicas, situation, headroom)
    if hourly is None:
        return ""
    return f"{hourly:,.2f} USD/h" + ("" if million is None else f", {million:,.4g} USD per million requests")


def _point(point: Point | None, situation: Situation, headroom: float) -> dict[str, Any] | None:
    if point is None:
        return None
    hourly, million = _costs(point.replicas, situation, headroom)
    return {
        "setting": asdict(point.setting),
        "replicas": point.replicas,
        "holds": point.holds,
        "usd_per_hour": hourly,
        "usd_per_million_requests": million,
        "runs": [_outcome(one) for one in point.outcomes],
    }


def _outcome(one: Outcome) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and math.isinf(value) else value for name, value in asdict(one).items()
    }


def _slo_words(situation: Situation) -> str:
    return str(Slo(ms=situation.slo_ms, percent=situation.percent))


def _rate(per_s: float) -> str:
    """Whole where it is large; a request an hour is not none."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"  # noqa: PLR2004 - three digits either way


def _ms(value: float) -> str:
    return "no answer" if math.isinf(value) else figure(value, "ms")


def _notes(found: Found, situation: Situation, *, headroom: float, seeds: Sequence[int]) -> Iterator[str]:
    """What a reader has to know before he believes it."""
    yield f"{found.runs} runs"
    if situation.rate:
        more = f", {percent(headroom)} above the traffic asked about" if headroom else ""
        yield f"held at {_rate(situation.rate)} requests/s{more}"
    if situation.survive:
        yield f"with {situation.survive} of the replicas dead all the time"
    yield f"never planned: more than {percent(FULLEST)} of what the replicas can compute at most"
    unrun = [one for one in found.ruled_out if not one.impossible]
    if unrun and found.chosen is not None:
        least = min(one.least for one in unrun)
        yield f"settings never run, for by the curve they need {so_many(least)} or more: {len(unrun)}"
    impossible = [one for one in found.ruled_out if one.impossible]
    if impossible and found.chosen is not None:
        yield f"settings never run, for by the curve computing alone is longer than the SLO: {len(impossible)}"
    if found.chosen is not None:
        yield from _checks(found, found.chosen, seeds)
        if is_cut(situation, found.chosen.setting, found.chosen.replicas):
            yield f"no run was long enough for queues of so large batches to settle: {MOST_REQUESTS:,} requests at most"
        yield from _curve_notes(found.chosen.setting, situation)
    yield from NOTES


def _checks(found: Found, chosen: Point, seeds: Sequence[int]) -> Iterator[str]:
    worst = chosen.worst
    if worst.replicas == chosen.replicas:
        told = "the one replica" if chosen.replicas == 1 else f"all {chosen.replicas} replicas"
    else:
        told = f"{worst.replicas} replicas and their share of the traffic in place of {chosen.replicas}"
    yield f"checked with {told}, {worst.requests:,} requests counted for each of the seeds {', '.join(map(str, seeds))}"
    if found.scaled is not None and found.scaled.worst.replicas != worst.replicas:
        part = found.scaled.worst
        yield f"with {part.replicas} replicas in place of them the search saw a p99 of {_ms(part.p99_ms)}"
    if found.below is not None:
        unmet = found.below.worst
        yield f"on one replica less the SLO is not held: p99 {_ms(unmet.p99_ms)}, {percent(unmet.good)} in time"
    else:
        yield "one replica less is ruled out by the curve alone"


def _curve_notes(setting: Setting, situation: Situation) -> Iterator[str]:
    curve = situation.curve
    if setting.count > 1 and max(curve.slowdown, default=1) < setting.count:
        yield (
            f"the curve does not say how instances beside each other slow down: {setting.count} are taken to compute "
            f"{'as if alone' if not curve.slowdown else 'as the most that were measured'}; sweep instance_group.count"
        )
    if setting.max_batch_size > max(curve.compute_us):
        yield f"batches above {max(curve.compute_us)} rows were not measured: the curve goes on along a straight line"
