"""What became of the copies that went to shadows: one copy's result, and the report that many of them add up to.

Similarities are kept as distances from 1 in millionths, in a histogram whose steps grow by a tenth
(`core.watching.figures.step_of`): what is said of the tenth that is least alike is at most a tenth of its distance too
low.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from gateway.core.cost import NANO_USD_PER_USD
from gateway.core.shadows.comparison import Comparison
from gateway.core.watching.figures import percentile_us, step_of

MOST_DISAGREEMENTS: Final = 20
MILLION: Final = 1_000_000
LARGEST: Final = 2**40
"""What one copy may add to a sum of times (twelve days) or of costs (1,099 USD): servers' own words have no other."""
_STEP: Final = "step:"


class Pair(NamedTuple):
    """Whose answers are held against each other: of `place`, as its rule names it, and of `shadow`."""

    task: str
    place: str
    shadow: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowResult:
    """What became of one copy. Nothing of a request's content is in it.

    Attributes:
        at_ms: Unix milliseconds.
        outcome: `skipped`: it was never sent, or was taken back to make room for a real request.
        failure: what failed, in one of the words of `FaultKind` or an error's code.
        comparison: None where none was made.
        real_us / shadow_us: how long each backend took.
        real_nano_usd / shadow_nano_usd: in 1e-9 US dollars; None where no price is known.
    """

    request_id: str
    rule: str
    pair: Pair
    at_ms: int
    outcome: Literal["answered", "failed", "skipped"]
    failure: str = ""
    comparison: Comparison | None = None
    real_us: int = 0
    shadow_us: int = 0
    real_nano_usd: int | None = None
    shadow_nano_usd: int | None = None


def measures(result: ShadowResult) -> Iterator[tuple[str, int]]:
    """What `result` adds to the counts of its pair."""
    if result.outcome == "skipped":
        yield "skipped", 1
        return
    yield "sent", 1
    yield "shadow_nano_usd", _bounded(result.shadow_nano_usd or 0)
    if result.outcome == "failed":
        yield "failed", 1
        return
    yield "answered", 1
    yield "real_us", _bounded(result.real_us)
    yield "shadow_us", _bounded(result.shadow_us)
    if result.real_nano_usd is not None and result.shadow_nano_usd is not None:
        yield "priced", 1
        yield "dearer_nano_usd", _bounded(result.shadow_nano_usd) - _bounded(result.real_nano_usd)
    comparison = result.comparison
    if comparison is None or comparison.agreed is None:
        return
    yield "compared", 1
    yield "agreed", int(comparison.agreed)
    if comparison.similarity is not None:
        distance = round((1 - comparison.similarity) * MILLION)
        yield "measured", 1
        yield "distance", distance
        yield f"{_STEP}{step_of(distance)}", 1


def disagreement(result: ShadowResult) -> dict[str, Any] | None:
    """What is remembered of two answers that did not agree; None where they did, or nobody knows."""
    comparison = result.comparison
    if comparison is None or comparison.agreed is not False:
        return None
    return {
        "request_id": result.request_id,
        "at_ms": result.at_ms,
        "similarity": None if comparison.similarity is None else round(comparison.similarity, 4),
        "what": comparison.what,
        "reason": comparison.reason,
    }


def document(
    rule: str,
    pair: Pair,
    counts: Mapping[str, int],
    *,
    since_ms: int,
    last_failure: str = "",
    disagreements: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The report on a pair, as plain values. Times in milliseconds, instants in Unix milliseconds, money in US dollars.

    Means are of copies that were answered, `agreement` is the share of those that were compared. `cost_delta_usd` is
    what all copies whose price and whose request's price are known cost more than their requests (less: negative).
    """
    steps = {int(name.removeprefix(_STEP)): n for name, n in counts.items() if name.startswith(_STEP)}
    answered, measured = counts.get("answered", 0), counts.get("measured", 0)
    furthest = percentile_us(steps, 0.9)
    real_ms, shadow_ms = (_mean(counts.get(f"{who}_us", 0) / 1000, answered) for who in ("real", "shadow"))
    return {
        "rule": rule,
        **pair._asdict(),
        "sent": counts.get("sent", 0),
        "compared": counts.get("compared", 0),
        "agreed": counts.get("agreed", 0),
        "agreement": _mean(counts.get("agreed", 0), counts.get("compared", 0)),
        "similarity_mean": _similarity(counts.get("distance", 0) / measured) if measured else None,
        "similarity_p10": None if furthest is None else _similarity(furthest),
        "failed": counts.get("failed", 0),
        "last_failure": last_failure or None,
        "skipped": counts.get("skipped", 0),
        "primary_ms_mean": real_ms,
        "shadow_ms_mean": shadow_ms,
        "latency_delta_ms": None if real_ms is None or shadow_ms is None else round(shadow_ms - real_ms, 3),
        "shadow_cost_usd": counts.get("shadow_nano_usd", 0) / NANO_USD_PER_USD,
        "cost_delta_usd": counts.get("dearer_nano_usd", 0) / NANO_USD_PER_USD if counts.get("priced") else None,
        "since_ms": since_ms,
        "disagreements": [dict(one) for one in disagreements],
    }


def _similarity(distance: float) -> float:
    return round(1 - distance / MILLION, 4)


def _mean(total: float, count: int) -> float | None:
    return round(total / count, 4) if count else None


def _bounded(told: int) -> int:
    return min(max(told, 0), LARGEST)
