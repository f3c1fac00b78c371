"""One run: everything up, clients on, strike after strike, and then the judgement."""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.chaos import checker, end
from tests.chaos.checker import TIMEOUT_S, Finding
from tests.chaos.growth import Growth, Sample, growth
from tests.chaos.history import History, Struck, executions, line
from tests.chaos.schedule import Fault, Strike
from tests.chaos.traffic import Traffic
from tests.chaos.world import LIMITS, World, world
from tests.kit.serving import ADMIN_TOKEN

WARM_UP_S: Final = 3.0
SAMPLE_EVERY_S: Final = 5.0
CLOCK_MOVES_S: Final = 0.05  # more than its being put right bit by bit brings about between two samples
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_UNFORESEEN: Final = re.compile(r"Traceback|was never (retrieved|awaited)|Unclosed|destroyed but it is pending")


@dataclass(slots=True, kw_only=True)
class Round:
    """One strike as it went: its faults, and how long after their healing every kind was served again."""

    faults: tuple[Struck, ...]
    recovered_s: float


@dataclass(slots=True)
class Result:
    """All that the report tells."""

    seed: int
    history: History
    rounds: list[Round] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    lasted_s: float = 0.0


async def run(
    folder: Path,
    strikes: Iterable[Strike],
    *,
    seed: int,
    lasts_s: float,
    pause_s: float,
    say: Callable[[str], None],
) -> Result:
    """Make all `strikes`, or those that fit into `lasts_s`, with `pause_s` between them."""
    history = History(limits=dict(LIMITS))
    result = Result(seed, history)
    say("starting Redis, two Tritons, an LLM server, a gateway of two workers, a control plane ...")
    async with world(folder) as here, contextlib.AsyncExitStack() as stack:
        log = stack.enter_context((folder / "clients.jsonl").open("w"))
        traffic = Traffic(here.front.port, here.straight_port, here.admin_port, ADMIN_TOKEN, history, log, seed)
        samples: dict[str, list[Sample]] = {}
        began = time.monotonic()
        clients = asyncio.create_task(traffic.run())
        stack.callback(clients.cancel)  # where the run is broken off; else they have ended
        watching = asyncio.create_task(_watch(here, samples, result.findings))
        try:
            await asyncio.sleep(WARM_UP_S)
            _, late = await end.recovered(traffic, since=time.monotonic())
            result.findings += late
            for number, strike in enumerate(strikes, 1):
                if time.monotonic() > began + lasts_s:
                    break
                told = await _round(here, traffic, strike, result)
                result.rounds.append(told)
                log.writelines(line(one) + "\n" for one in told.faults)
                say(_told(number, told, history, result, time.monotonic() - began))
                await asyncio.sleep(pause_s)
        finally:
            traffic.stopping.set()
            watching.cancel()
        result.findings += await _ended(traffic, clients)
        result.findings += await end.at_rest(here, traffic)
        result.lasted_s = time.monotonic() - began
        history.executions += executions(here.execution_log)
        log.writelines(line(one) + "\n" for one in history.executions)
    result.findings += checker.check(history)
    result.findings += _unforeseen(folder)
    result.growths += [growth(name, found) for name, found in samples.items() if len(found) > 5]
    result.findings += [Finding(rule="flat", text=str(one)) for one in result.growths if not one.is_flat]
    return result


async def _round(here: World, traffic: Traffic, strike: Strike, result: Result) -> Round:
    """One strike, all of it healed, and the way back waited for."""
    faults = await asyncio.gather(*(_fault(here, fault, result) for fault in strike))
    result.history.struck += faults
    since = max(one.healed for one in faults)
    recovered_s, late = await end.recovered(traffic, since=since)
    names = " + ".join(one.name for one in faults)
    result.findings += [Finding(rule=one.rule, text=f"{names}: {one.text}") for one in late]
    return Round(faults=tuple(faults), recovered_s=recovered_s)


async def _fault(here: World, fault: Fault, result: Result) -> Struck:
    await asyncio.sleep(fault.after_s)
    part, began = here.parts[fault.part], time.monotonic()
    try:
        await part.strike(fault.action, fault.late_s)
        await asyncio.sleep(0 if fault.action == "restart" else fault.lasts_s)
        await part.heal(fault.action)
    except (OSError, AssertionError, RuntimeError) as error:  # a part that does not come back is told, not raised
        result.findings.append(Finding(rule="parts come back", text=f"{fault.action} {fault.part}: {error!r}"))
    return Struck(part=fault.part, action=fault.action, began=began, healed=time.monotonic())


async def _ended(traffic: Traffic, clients: asyncio.Task[None]) -> list[Finding]:
    """All that clients have begun ends by itself."""
    try:
        async with asyncio.timeout(TIMEOUT_S * 2 + end.GRACE_S):  # a sequence may have several steps to go
            await clients
    except TimeoutError:
        return [Finding(rule="nothing stuck", text=f"still under way: {sorted(traffic.in_flight)}")]
    return []


async def _watch(here: World, samples: dict[str, list[Sample]], findings: list[Finding]) -> None:
    """Memory and descriptors of the processes; and the machine's clock, by which Redis lets limits and pins end."""
    ahead_s = time.time() - time.monotonic()
    while True:
        moved_s, ahead_s = time.time() - time.monotonic() - ahead_s, time.time() - time.monotonic()
        if abs(moved_s) > CLOCK_MOVES_S:
            text = f"the machine's clock was moved by {moved_s:+.1f} s just before {time.monotonic():.1f}"
            findings.append(Finding(rule="the clock goes on", text=text))
        for name, pid in here.processes().items():
            with contextlib.suppress(OSError):
                samples.setdefault(name, []).append(_sample(pid))
        await asyncio.sleep(SAMPLE_EVERY_S)


def _sample(pid: int) -> Sample:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Sample(at=time.monotonic(), mib=pages * _PAGE / 2**20, descriptors=descriptors)


def _unforeseen(folder: Path) -> list[Finding]:
    """What processes of the gateway have logged and must not: exceptions that nobody took."""
    found = []
    for path in folder.glob("*.serve.log"), folder.glob("*.admin.log"):
        for log in path:
            lines = log.read_text(errors="replace").splitlines()
            found += [f"{log.name}: {text[:2000]}" for text in lines if _UNFORESEEN.search(text)]
    return [Finding(rule="no unforeseen exception", text=text) for text in found]


def _told(number: int, told: Round, history: History, result: Result, at_s: float) -> str:
    names = " + ".join(f"{one.name} {one.healed - one.began:.1f} s" for one in told.faults)
    counts = f"{len(history.ended)} requests, {len(result.findings)} findings so far"
    return f"[{at_s:5.0f} s] {number:3}. {names}: served again after {told.recovered_s:.1f} s ({counts})"
