"""How much can be borne: raise the load until the SLO breaks, then halve the gap between what held and what did not."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from gateway.tuning.report import Report
from gateway.tuning.slo import Slo

GROWTH: Final = 2.0
CLOSE: Final = 0.05  # the gap, of what held, at which the search ends
LEAST_RATE: Final = 0.1  # requests per second that are tried
MAX_STEPS: Final = 30  # no search needs them: ten doublings are a factor of a thousand, six halvings come close enough

Attempt = Callable[[float], Awaitable[Report]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One load that was tried."""

    load: float
    is_held: bool
    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The end of a search.

    Attributes:
        held / broke: the highest load that held the SLO and the lowest that did not; None where none did.
        steps: in the order in which they were tried.
    """

    held: Step | None
    broke: Step | None
    steps: tuple[Step, ...]


async def steps(
    attempt: Attempt, slo: Slo, *, start: float, is_whole: bool, most: float = float("inf")
) -> AsyncIterator[Step]:
    """Try loads until the answer is known to within `CLOSE`: doubling from `start`, or halving where that breaks.

    Args:
        attempt: offers a load; each of its classes has `slo.ms` as its `slo_ms`.
        slo: what must hold.
        start: the first load.
        is_whole: only whole numbers are loads (callers).
        most: no higher load is tried.
    """
    held: float | None = None
    broke: float | None = None
    load = min(start, most)
    for _ in range(MAX_STEPS):
        report = await attempt(load)
        step = Step(load=load, is_held=slo.is_held(report.whole), report=report)
        yield step
        held, broke = (load, broke) if step.is_held else (held, load)
        following = _following(held, broke, is_whole=is_whole, most=most)
        if following is None:
            return
        load = following


def found(tried: tuple[Step, ...]) -> Found:
    """What steps say together."""
    broke = min((one for one in tried if not one.is_held), key=lambda one: one.load, default=None)
    held = max(
        (one for one in tried if one.is_held and (broke is None or one.load < broke.load)),
        key=lambda one: one.load,
        default=None,
    )
    return Found(held=held, broke=broke, steps=tried)


def _following(held: float | None, broke: float | None, *, is_whole: bool, most: float) -> float | None:
    """The next load; None where enough is known."""
    if broke is None:
        assert held is not None  # noqa: S101 - one of the two was just set
        return None if held >= most else min(most, held * GROWTH)
    middle = broke / GROWTH if held is None else (held + broke) / 2
    if is_whole:
        middle = float(int(middle))
        return middle if middle >= 1 and middle not in (held, broke) else None
    if held is None:
        return middle if middle >= LEAST_RATE else None
    return middle if broke - held > CLOSE * held else None
