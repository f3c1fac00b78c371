"""Rate limiting as arithmetic: the generic cell rate algorithm (GCRA), in integer microseconds.

This is the specification; `stores/lua/charge.lua` is the same arithmetic inside Redis, and a random-history
test proves them equal. Terms as in ITU-T I.371: the *theoretical arrival time* (`tat_us`) is when the bucket
would be empty of debt; a request costs one `emission_interval_us`; `burst` requests may come at once.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.core.types import Caller, Limit, Verdict

_PERIOD_NAMES = {1_000_000: "second", 60_000_000: "minute", 3_600_000_000: "hour", 86_400_000_000: "day"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """`cost` requests against one limit.

    Attributes:
        key: names the counter (without the store's prefix); two charges with one key share it.
        owner: whose counter it is. The charges of one admission have one owner, so that a sharded store can
            keep their counters in one place.
        emission_interval_us: times `burst` it must stay under 2**52 (142 years), where doubles are exact.
    """

    key: str
    owner: str = ""
    name: str
    emission_interval_us: int
    burst: int
    cost: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one counter says. `tat_us` is its new value if all charges pass (unchanged when refused)."""

    allowed: bool
    tat_us: int
    remaining: int
    reset_us: int
    retry_after_us: int


@functools.lru_cache(maxsize=10_000)
def charges(caller: Caller) -> tuple[Charge, ...]:
    """What one request of `caller` costs: one request against each of its key's limits."""
    return tuple(_charge(caller.key_id, limit) for limit in dict.fromkeys(caller.limits))


def _charge(key_id: str, limit: Limit) -> Charge:
    period = _PERIOD_NAMES.get(limit.period_us, f"{limit.period_us} us")
    return Charge(
        # All of the limit is in the key: two limits per minute are two counters; a changed limit starts anew.
        key=f"{key_id}:requests:{limit.requests}/{period}:{limit.burst}",
        owner=key_id,
        name=f"{limit.requests} requests per {period}",
        # Rounded up: a limit may be kept a little too strictly, never be overrun.
        emission_interval_us=-(-limit.period_us // limit.requests),
        burst=limit.burst,
    )


def decide(charge: Charge, *, tat_us: int | None, now_us: int) -> Outcome:
    """GCRA for one counter. `tat_us` None means a counter never used.

    Allowed when the new theoretical arrival time is at most `burst` intervals ahead of now. `remaining` is
    how many more single requests would pass at this instant; never negative. A `tat_us` further ahead than
    that comes from a clock that was set back, and is read as a bucket just used up: nobody waits longer than
    one window.
    """
    window_us = charge.emission_interval_us * charge.burst
    tat = min(max(now_us, tat_us if tat_us is not None else now_us), now_us + window_us)
    new_tat = tat + charge.emission_interval_us * charge.cost
    wait_us = new_tat - window_us - now_us
    allowed = wait_us <= 0
    kept = new_tat if allowed else tat
    return Outcome(
        allowed=allowed,
        tat_us=kept,
        remaining=max(0, (now_us + window_us - kept) // charge.emission_interval_us),
        reset_us=kept - now_us,
        retry_after_us=0 if allowed else wait_us,
    )


def decide_all(taken: Sequence[Charge], *, tats_us: Mapping[str, int], now_us: int) -> tuple[Outcome, ...]:
    """GCRA for one admission, in the order of `taken`; `tats_us` holds the counters that have been used.

    A counter that is charged twice is decided twice, each time on top of the charge before. The store writes
    the outcomes' `tat_us` only if all of them allow.
    """
    after_us: dict[str, int] = {}
    outcomes = []
    for charge in taken:
        tat_us = after_us.get(charge.key, tats_us.get(charge.key))
        outcome = decide(charge, tat_us=tat_us, now_us=now_us)
        after_us[charge.key] = outcome.tat_us
        outcomes.append(outcome)
    return tuple(outcomes)


def verdict(taken: Sequence[Charge], outcomes: Sequence[Outcome], *, degraded: bool = False) -> Verdict:
    """One verdict over all counters: refused if any refuses; it names the counter nearest to its end.

    `outcomes` are in the order of `taken`. With no charges everything is allowed and there is nothing to
    tell.
    """
    if not taken:
        return Verdict(allowed=True, degraded=degraded)
    pairs = list(zip(taken, outcomes, strict=True))
    charge, nearest = max(pairs, key=lambda p: (p[1].retry_after_us, -p[1].remaining))
    return Verdict(
        allowed=all(o.allowed for _, o in pairs),
        name=charge.name,
        limit=charge.burst,
        remaining=nearest.remaining,
        reset_us=nearest.reset_us,
        retry_after_us=nearest.retry_after_us,
        degraded=degraded,
    )
