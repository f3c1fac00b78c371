"""`gateway load`, but for its words: the plan of a measurement, carried out."""

import asyncio
import contextlib
import ipaddress
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from gateway.tuning.load import finding, runner, targets
from gateway.tuning.load.asks import address
from gateway.tuning.load.finding import Found, Step
from gateway.tuning.load.outcomes import NEVER_REACHED
from gateway.tuning.load.runner import GRACE_S, OnProgress, Watch
from gateway.tuning.load.statistics import GatewayStatistics, Statistics, TritonStatistics
from gateway.tuning.load.targets import CONNECTIONS, Clients
from gateway.tuning.load.traffic_file import Part
from gateway.tuning.report import Report
from gateway.tuning.slo import Slo
from gateway.tuning.traffic import TrafficClass

FORM: Final = "load-search/1"
_OTHER_FILES: Final = 256  # beside connections
UNSEEN: Final = "nothing is known of batches and queues: no --ops-url of a gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be measured. Lengths are in seconds; `ops_url` may be empty; `setting` is for readers."""

    parts: Sequence[Part]
    duration_s: float
    warmup_s: float = 0.0
    grace_s: float = GRACE_S
    seed: int = 0
    connections: int = CONNECTIONS
    ops_url: str = ""
    setting: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def hosts(self) -> set[str]:
        """Whom it asks."""
        return {
            part.ask.triton.rpartition(":")[0].strip("[]") if part.ask.triton else address(part.ask.url).host
            for part in self.parts
        }


async def measure(plan: Plan, *, on_progress: OnProgress | None = None) -> Report:
    """One run; Ctrl-C ends it early. Raises `AskError` where nobody can be asked."""
    _allow_files(plan.connections)
    with _stopped_by_hand() as stop:
        return await _measured(plan, title=_title(plan.parts), on_progress=on_progress, stop=stop)


async def find(
    plan: Plan, slo: Slo, *, on_progress: OnProgress | None = None, on_step: Callable[[Step], None]
) -> Found:
    """The highest load that holds `slo`, beginning at the plan's own; Ctrl-C ends the search. Raises `AskError`.

    The plan has one part, with a rate or callers.
    """
    _allow_files(plan.connections)
    (part,) = plan.parts
    is_whole = not part.traffic.is_open
    tried: list[Step] = []
    with _stopped_by_hand() as stop:

        async def attempt(load: float) -> Report:
            traffic = with_load(part.traffic, load)
            of_load = replace(plan, parts=(replace(part, traffic=replace(traffic, slo_ms=slo.ms)),))
            return await _measured(
                of_load, title=load_words(load, is_whole=is_whole), on_progress=on_progress, stop=stop
            )

        start = float(part.traffic.concurrency or part.traffic.rate)
        async for step in finding.steps(attempt, slo, start=start, is_whole=is_whole):
            if stop.is_set():
                break  # half a step says nothing
            tried.append(step)
            on_step(step)
            if is_unreached(step.report):
                break
    return finding.found(tuple(tried))


def with_load(traffic: TrafficClass, load: float) -> TrafficClass:
    """The class with another rate, or number of callers."""
    return replace(traffic, rate=load) if traffic.is_open else replace(traffic, concurrency=int(load))


def load_words(load: float, *, is_whole: bool) -> str:
    """A load for readers."""
    if not is_whole:
        return f"{load:g} requests/s"
    return "1 caller" if load == 1 else f"{load:g} callers"


def step_words(step: Step, slo: Slo, *, is_whole: bool) -> str:
    """A step in one line."""
    whole = step.report.whole
    word = "held" if step.is_held else "not held"
    return (
        f"{load_words(step.load, is_whole=is_whole)}: {slo} {word}: {slo.share(whole) * 100:.2f} % in time, "
        f"{whole.goodput:,.1f}/s"
    )


def found_words(found: Found, slo: Slo, *, is_whole: bool) -> str:
    """The end of a search in one line."""
    if found.held is None:
        tried = f"; {load_words(found.broke.load, is_whole=is_whole)} did not" if found.broke else ""
        return f"no load was found that holds {slo}{tried}"
    beyond = f"; {load_words(found.broke.load, is_whole=is_whole)} did not" if found.broke else ""
    held = found.held
    return (
        f"{load_words(held.load, is_whole=is_whole)} held {slo} ({held.report.whole.goodput:,.1f}/s in time){beyond}; "
        f"{len(found.steps)} steps"
    )


def found_json(found: Found, slo: Slo, *, is_whole: bool) -> dict[str, Any]:
    """The end of a search for programs."""
    return {
        "form": FORM,
        "slo": {"ms": slo.ms, "percent": slo.percent},
        "unit": "callers" if is_whole else "requests_per_second",
        "held": found.held.load if found.held else None,
        "broke": found.broke.load if found.broke else None,
        "steps": [
            {"load": step.load, "is_held": step.is_held, "report": step.report.as_json()} for step in found.steps
        ],
    }


def is_unreached(report: Report) -> bool:
    """Whether no request found anybody."""
    return bool(report.whole.codes) and NEVER_REACHED.issuperset(report.whole.codes)


def is_loopback(host: str) -> bool:
    """Whether it is this machine, by its name alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _measured(plan: Plan, *, title: str, on_progress: OnProgress | None, stop: asyncio.Event) -> Report:
    classes = [part.traffic for part in plan.parts]
    async with targets.clients(connections=plan.connections) as clients:
        asked = [await clients.target(part.ask, part.traffic, seed=plan.seed) for part in plan.parts]
        statistics = _statistics(plan, clients)
        report = await runner.run(
            asked,
            classes,
            duration_s=plan.duration_s,
            warmup_s=plan.warmup_s,
            seed=plan.seed,
            grace_s=plan.grace_s,
            watch=Watch(statistics=statistics, on_progress=on_progress, stop=stop),
        )
        notes = [*report.notes]
        if statistics is None:
            notes.append(UNSEEN)
        if clients.waited:
            notes.append(
                f"{clients.waited} requests waited for one of {plan.connections} connections (--connections): "
                "that is in their latencies"
            )
    whole = replace(report.whole, name=classes[0].name) if len(classes) == 1 else report.whole
    setting = {**_words(plan), **plan.setting, **report.setting}
    return replace(report, title=title, setting=setting, notes=tuple(notes), whole=whole)


def _statistics(plan: Plan, clients: Clients) -> Statistics | None:
    """The server's own where it is asked straight, else what the gateway tells of all of them."""
    addresses = {part.ask.triton for part in plan.parts}
    if len(addresses) == 1 and (triton := addresses.pop()):
        return TritonStatistics(clients, triton)
    return GatewayStatistics(plan.ops_url) if plan.ops_url else None


def _title(parts: Sequence[Part]) -> str:
    return f"load: {parts[0].ask}" if len(parts) == 1 else f"load: {', '.join(part.traffic.name for part in parts)}"


def _words(plan: Plan) -> dict[str, str]:
    told = {part.traffic.name: f"{_traffic_words(part.traffic)}; {part.ask}" for part in plan.parts}
    return {**told, "time": f"{plan.duration_s:g} s, after {plan.warmup_s:g} s of warm-up; seed {plan.seed}"}


def _traffic_words(one: TrafficClass) -> str:
    if one.trace:
        how = f"{len(one.trace):,} recorded instants" + (
            f" at {one.speed:g} times their speed" if one.speed != 1 else ""
        )
    elif one.is_open:
        ramp = f" rising to {one.ramp_to:g}" if one.ramp_to > one.rate else f" falling to {one.ramp_to:g}"
        how = f"{one.rate:g}{ramp if one.ramp_to else ''} requests/s, {one.arrivals}"
    else:
        how = load_words(one.concurrency, is_whole=True) + (
            f" with {one.think_ms:g} ms of thought" if one.think_ms else ""
        )
    rows = f", {one.rows} rows each" if one.rows > 1 else ""
    slo = f", SLO {one.slo_ms:g} ms" if one.slo_ms else ""
    return f"{how}{rows}, {one.priority}{slo}"


def _allow_files(connections: int) -> None:
    """As many open files as connections need, where the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


@contextlib.contextmanager
def _stopped_by_hand() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C sets, where signals can be had: in the main thread."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_signal_handler(signal.SIGINT, stop.set)
    except (ValueError, RuntimeError):
        yield stop
        return
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
