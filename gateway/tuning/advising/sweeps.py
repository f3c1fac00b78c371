"""The folder of a sweep -> what it measured of the setting that was found, and of the one that was best. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.tuning.advising.search import changes
from gateway.tuning.advising.situation import ENOUGH, LEAST_GAIN, Advice, Outlook, Part, Setting, Situation
from gateway.tuning.curves import LatencyCurve
from gateway.tuning.report import ClassReport, Report, parse_report

FORM: Final = "sweep/1"
_RATE: Final = (
    "requests come by chance (Poisson), as many as --rate says",
    "the time between caller and server is the sweep's",
)


class SweepFault(ValueError):
    """A file that no sweep has written; the text says what is wrong with it."""


def measured(sweep: Mapping[str, Any]) -> Advice:
    """What the sweep's own runs say. Raises `SweepFault`."""
    if sweep.get("form") != FORM:
        raise SweepFault(f"sweep.json: form: must be '{FORM}', not {sweep.get('form')!r}")
    try:
        return _measured(sweep)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise SweepFault(f"sweep.json: not what a sweep writes: {error!r}") from error


def _measured(sweep: Mapping[str, Any]) -> Advice:
    found, chosen = (sweep["runs"][sweep[name]] for name in ("found", "chosen"))
    before, after = setting_of(found), setting_of(chosen)
    subject = str(sweep["model"])
    evidence = tuple(
        f"{name}: {words}, {_figures(run)}"
        for name, run, words in (("as found", found, before), ("best", chosen, after))
    )
    evidence += (f"measured on {sweep['place']}, {len(sweep['runs'])} runs of {sweep['cells']} possible",)
    if found["setting"] == chosen["setting"]:
        return Advice(subject=subject, because="nothing that was measured was better", evidence=evidence)
    if found["load"] != chosen["load"]:
        because = f"the setting as found was not measured at the load of the best one ({_load(chosen)})"
        return Advice(subject=subject, because=because, evidence=evidence)
    few = min(_requests(found), _requests(chosen))
    if few < ENOUGH:
        because = f"a run had {few} requests: {ENOUGH} are needed; sweep with longer runs"
        return Advice(subject=subject, because=because, evidence=evidence)
    old, new = _whole(found), _whole(chosen)
    gain = new.goodput / old.goodput - 1 if old.goodput else float("inf")
    if gain < LEAST_GAIN:
        because = f"the best one measured answers {gain:+.0%} more: less than {LEAST_GAIN:.0%} is not worth it"
        return Advice(subject=subject, because=because, evidence=evidence)
    p99_ms = float((sweep["goal"] or {}).get("p99_ms") or 0)
    return Advice(
        subject=subject,
        because=changes(before, after) or "batching as the sweep's config.pbtxt has it",
        setting=before,
        advised=after,
        aim=f"right answers per second{f' within {p99_ms:g} ms' if p99_ms else ''}",
        gain=gain,
        before=_outlook(old),
        after=_outlook(new),
        evidence=evidence,
        assumes=(f"your traffic is like the sweep's: {_load(chosen)}",),
    )


def at_rate(sweep: Mapping[str, Any], curve: LatencyCurve, *, rate: float) -> Situation:
    """The setting that was found, at another traffic, for the simulator. Raises `SweepFault`."""
    try:
        found = sweep["runs"][sweep["found"]]
        if found["setting"]["batching"] == "adaptive":
            raise SweepFault(
                "sweep.json: the setting as found batches adaptively: the runtime finds the delay by itself"
            )
        setting = setting_of(found)
        preferred = tuple(int(rows) for rows in found["setting"]["preferred"])
        model = str(sweep["model"])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise SweepFault(f"sweep.json: not what a sweep writes: {error!r}") from error
    return Situation(
        backend="",
        model=model,
        setting=setting,
        curve=curve,
        parts=(Part(priority="interactive", rate=rate),),
        knows_more_instances=bool(curve.slowdown),
        largest=max(curve.compute_us),
        preferred=preferred,
        assumes=_RATE,
    )


def setting_of(run: Mapping[str, Any]) -> Setting:
    """Of a run in `sweep.json`."""
    given = run["setting"]
    return Setting(
        max_batch_size=int(given["max_batch_size"]),
        delay_us=int(given["delay_us"]),
        instances=int(given["count"]),
        is_batching=given["batching"] != "none",
    )


def is_plain(sweep: Mapping[str, Any]) -> bool:
    """Whether the best setting differs from the one that was found in what a `Setting` has, and in nothing else."""
    old, new = (sweep["runs"][sweep[name]]["setting"] for name in ("found", "chosen"))
    return "adaptive" not in (old["batching"], new["batching"]) and old["preferred"] == new["preferred"]


def _report(run: Mapping[str, Any]) -> Report:
    if run["report"] is None:
        raise ValueError(f"a run failed: {run['error']}")
    return parse_report(run["report"])


def _whole(run: Mapping[str, Any]) -> ClassReport:
    return _report(run).whole


def _requests(run: Mapping[str, Any]) -> int:
    return _whole(run).sent


def _figures(run: Mapping[str, Any]) -> str:
    whole = _whole(run)
    p99 = f"p99 {whole.latency.p99:,.1f} ms" if whole.latency else "no p99"
    servers: Sequence[Any] = _report(run).servers
    batch = f", mean batch {servers[0].mean_batch:.1f}" if servers else ""
    return f"{whole.goodput:,.1f} right answers/s at {_load(run)}, {p99}{batch}"


def _load(run: Mapping[str, Any]) -> str:
    load = run["load"]
    return f"{load['rate']:g}/s" if load.get("rate") else f"{load['concurrency']} in flight"


def _outlook(whole: ClassReport) -> Outlook:
    return Outlook(
        p99_ms=whole.latency.p99 if whole.latency else float("inf"),
        rows_per_s=whole.rows_per_s,
        good=whole.goodput / whole.qps if whole.qps else 0.0,
    )
