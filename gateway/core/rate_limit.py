"""What a request takes of which limits, and what a limit says of its state. Pure; `core.admissions` keeps the counters.

Four kinds of limits in three forms:

- *rate* (`requests`, `tokens`): the generic cell rate algorithm (ITU-T I.371) in integer microseconds. The counter is
  the *theoretical arrival time* (tat): when the bucket would be whole again. A request costs its share of the period,
  `burst` may come at once.
- *budget* (`usd`): what was spent in a calendar day or month (UTC), in 1e-9 dollars.
- *places* (`concurrent`): how many requests are under way.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from gateway.core.types import Caller, Limit, LimitState, Priority, Verdict

PERIODS_US: Final = {"second": 1_000_000, "minute": 60_000_000, "hour": 3_600_000_000, "day": 86_400_000_000}
UNITS: Final = {"requests": "requests", "tokens": "tokens", "usd": "USD", "concurrent": "requests at once"}
ANY: Final = "*"
_NANO: Final = 1_000_000_000

Form = Literal["rate", "budget", "places"]
FORMS: Final[dict[str, Form]] = {"requests": "rate", "tokens": "rate", "usd": "budget", "concurrent": "places"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """What one request takes of one counter, all in the counter's own unit.

    Attributes:
        key: names the counter, without the store's prefix.
        cost: of a rate microseconds of its tat, of a budget nano-USD, of places 1.
        bound: the most there may be: of a rate the window in microseconds (under 2**52, where doubles are exact).
        is_held: it is given back, or put right, when the request ends.
    """

    key: str
    limit: Limit
    cost: int
    bound: int
    is_held: bool

    @property
    def form(self) -> Form:
        """How its counter counts."""
        return FORMS[self.limit.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one counter said.

    Attributes:
        value: a rate's tat, a budget's spent, the places taken; with this request if it passed, else without.
        until_us: of a budget, the end of its period.
    """

    passed: bool
    value: int
    until_us: int = 0


@functools.lru_cache(maxsize=10_000)
def limits_for(caller: Caller, task: str, model: str, priority: Priority) -> tuple[Limit, ...]:
    """The caller's limits that count such a request, each once."""
    return tuple(
        limit
        for limit in dict.fromkeys(caller.limits)
        if limit.task in (ANY, task) and limit.model in (ANY, model) and limit.priority in (ANY, priority)
    )


def takes(caller: Caller, limits: Sequence[Limit], *, tokens: int, nano_usd: int) -> tuple[Take, ...]:
    """What a request takes of `limits`, where it is expected to use up so many tokens and so much money."""
    return tuple(_take(caller, limit, {"tokens": tokens, "usd": nano_usd}.get(limit.kind, 1)) for limit in limits)


@functools.lru_cache(maxsize=50_000)
def _take(caller: Caller, limit: Limit, amount: int) -> Take:
    return Take(
        key=_counter(caller, limit),
        limit=limit,
        cost=cost_of(limit, amount),
        bound=_bound(limit),
        is_held=limit.kind != "requests",
    )


def cost_of(limit: Limit, amount: int) -> int:
    """`amount` requests, tokens, nano-USD or places in the unit of the limit's counter.

    Rounded up: a limit may be kept a little too strictly, never be overrun.
    """
    return -(-amount * PERIODS_US[limit.per] // limit.amount) if FORMS[limit.kind] == "rate" else amount


def _bound(limit: Limit) -> int:
    if limit.kind == "requests":
        return limit.burst * cost_of(limit, 1)  # so that `burst` whole requests pass, whatever is rounded
    return cost_of(limit, limit.burst) if limit.kind == "tokens" else limit.amount


def _counter(caller: Caller, limit: Limit) -> str:
    """All of the limit is in it: a changed limit starts anew."""
    whose = {"key": f"key:{caller.key_id}", "tenant": f"tenant:{caller.tenant}", "all": "all"}[limit.shared_by]
    scope = ":".join(f"{name}={value}" for name, value in _scope(limit))
    return f"{whose}:{limit.kind}:{limit.amount}/{limit.per}:{limit.burst}" + (f":{scope}" if scope else "")


def _scope(limit: Limit) -> list[tuple[str, str]]:
    named = (("task", limit.task), ("model", limit.model), ("priority", limit.priority))
    return [(name, value) for name, value in named if value != ANY]


def shared_out(taken: Sequence[Take], workers: int) -> tuple[Take, ...]:
    """The same for one of `workers` that cannot ask each other: each has its part of every limit, at least one request.

    A request that would not pass a whole limit does not pass here either.
    """
    return tuple(_part(take, max(1, workers)) for take in taken)


def _part(take: Take, workers: int) -> Take:
    if take.cost > take.bound:
        return take
    if take.form == "rate":
        return replace(take, cost=min(take.cost * workers, take.bound))
    return replace(take, bound=max(take.cost, take.bound // workers))


# --- what counters say ---------------------------------------------------------------------------


def verdict(taken: Sequence[Take], rows: Sequence[Row], *, now_us: int, degraded: bool = False) -> Verdict:
    """One verdict over all counters: refused if any refuses. `rows` are in the order of `taken`."""
    states = tuple(_state(take, row, now_us) for take, row in zip(taken, rows, strict=True))
    refused = [state for state in states if state.is_refused]
    if not refused:
        return Verdict(allowed=True, states=states, degraded=degraded)
    return Verdict(
        allowed=False,
        states=states,
        refused_by=max(refused, key=lambda state: (state.is_hopeless, state.retry_after_us)),
        degraded=degraded,
    )


def _state(take: Take, row: Row, now_us: int) -> LimitState:
    limit, is_hopeless = take.limit, take.cost > take.bound
    if take.form == "rate":
        left_us, period_us = now_us + take.bound - row.value, PERIODS_US[limit.per]
        unit_us = cost_of(limit, 1)
        whole = left_us // unit_us if limit.kind == "requests" else left_us * limit.amount // period_us
        remaining, reset_us = whole, max(0, row.value - now_us)
        retry_after_us = max(row.value, now_us) + take.cost - take.bound - now_us
    elif take.form == "budget":
        remaining, reset_us = take.bound - row.value, row.until_us - now_us
        retry_after_us = reset_us
    else:
        remaining, reset_us = take.bound - row.value, 0
        retry_after_us = 0  # when one of the others ends, which nobody knows
    return LimitState(
        limit=limit,
        remaining=max(0, remaining),
        reset_us=reset_us,
        is_refused=not row.passed,
        is_hopeless=is_hopeless,
        retry_after_us=0 if row.passed else retry_after_us,
    )


def name_of(limit: Limit) -> str:
    """As a caller would call it: `60 requests per minute`, `10 USD per month for the task general_llm`."""
    amount = f"{limit.amount / _NANO:g}" if limit.kind == "usd" else str(limit.amount)
    period = f" per {limit.per}" if limit.per else ""
    whose = {"key": "", "tenant": " of the tenant", "all": " of all callers"}[limit.shared_by]
    scope = "".join(f" for the {name} {value}" for name, value in _scope(limit))
    return f"{amount} {UNITS[limit.kind]}{period}{whose}{scope}"


# --- calendar periods ----------------------------------------------------------------------------


def boundaries_us(per: str, now_us: int) -> tuple[int, int, int]:
    """The beginning and the end of the day or month (UTC) at `now_us` (Unix microseconds), and the end of the next.

    A store takes the first of them that lies after its own clock's time, so that clocks may differ a little.
    """
    now = datetime.fromtimestamp(now_us // 1_000_000, UTC)
    begin = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if per == "month":
        begin = begin.replace(day=1)
        ends = [begin, *(_months_after(begin, n) for n in (1, 2))]
    else:
        ends = [begin + timedelta(days=n) for n in range(3)]
    first, second, third = (int(end.timestamp()) * 1_000_000 for end in ends)
    return first, second, third


def _months_after(begin: datetime, months: int) -> datetime:
    years, month = divmod(begin.month - 1 + months, 12)
    return begin.replace(year=begin.year + years, month=month + 1)
