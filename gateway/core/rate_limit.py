"""What a request takes of which limits, and what a limit says of its state. Pure; `core.admissions` keeps the counters.

Four kinds of limits in three forms:

- *rate* (`requests`, `tokens`): the generic cell rate algorithm (ITU-T I.371) in integer microseconds. The counter is
  the *theoretical arrival time* (tat): when the bucket would be whole again. A request costs its share of the period,
  `burst` may come at once.
- *budget* (`usd`): what was spent in a calendar day or month (UTC), in 1e-9 dollars.
- *places* (`concurrent`): how many requests are under way.
"""

import functools
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple

from gateway.core.cost import NANO_USD_PER_USD
from gateway.core.types import ANY, Caller, Limit, LimitState, Priority, Verdict

PERIODS_US: Final = {"second": 1_000_000, "minute": 60_000_000, "hour": 3_600_000_000, "day": 86_400_000_000}
UNITS: Final = {"requests": "requests", "tokens": "tokens", "usd": "USD", "concurrent": "requests at once"}
MOST: Final = 2**51
"""No cost is above it, so that sums are exact in doubles; it is more than any limit gives (71 years, 2 million USD)."""
MOST_OF: Final = {"requests": 10**9, "tokens": 10**12, "usd": 10**6 * NANO_USD_PER_USD, "concurrent": 10**6}
"""The largest limit of each kind; of money in 1e-9 dollars. No burst is above that of tokens."""
MAX_WINDOW_US: Final = 10 * 365 * PERIODS_US["day"]  # far below 2^52, up to which Redis's Lua counts exactly

Form = Literal["rate", "budget", "places"]
FORMS: Final[dict[str, Form]] = {"requests": "rate", "tokens": "rate", "usd": "budget", "concurrent": "places"}
PERIODS: Final[dict[Form, tuple[str, ...]]] = {"rate": tuple(PERIODS_US), "budget": ("day", "month"), "places": ("",)}


class Take(NamedTuple):
    """What one request takes of one counter, all in the counter's own unit.

    Attributes:
        key: names the counter, without the store's prefix.
        cost: of a rate microseconds of its tat, of a budget nano-USD, of places 1.
        bound: the most there may be: of a rate the window in microseconds (under 2**52, where doubles are exact).
        is_held: it is given back, or put right, when the request ends.
        parts: of a rate, among how many workers it is shared out (`shared_out`): a unit costs so many times as much.
    """

    key: str
    limit: Limit
    cost: int
    bound: int
    is_held: bool
    parts: int = 1

    @property
    def form(self) -> Form:
        """How its counter counts."""
        return FORMS[self.limit.kind]


class Row(NamedTuple):
    """What one counter said.

    Attributes:
        value: a rate's tat, a budget's spent, the places taken; with this request if it passed, else without.
        until_us: of a budget, the end of its period.
    """

    passed: bool
    value: int
    until_us: int = 0


def is_sound(limit: Limit) -> bool:
    """Whether its numbers fit together and can be counted exactly; the names in it are others' concern."""
    form = FORMS.get(limit.kind)
    if form is None or not 1 <= limit.amount <= MOST_OF[limit.kind] or limit.per not in PERIODS[form]:
        return False
    if form != "rate":
        return limit.burst == 0
    window_us = PERIODS_US[limit.per] * limit.burst // limit.amount
    return 1 <= limit.burst <= MOST_OF["tokens"] and window_us <= MAX_WINDOW_US


def counters(
    caller: Caller, task: str, model: str, priority: Priority, of_rule: tuple[Limit, ...] = ()
) -> tuple[Take, ...]:
    """What such a request takes at least, of each counter that counts it of the caller's limits and its rule's."""
    if not caller.limits and not of_rule:
        return ()
    taken = []
    for take in _smallest(caller, of_rule):
        limit = take.limit
        if limit.task in (ANY, task) and limit.model in (ANY, model) and limit.priority in (ANY, priority):
            taken.append(take)
    return tuple(taken)


def takes(counted: Sequence[Take], *, tokens: int, nano_usd: int) -> tuple[Take, ...]:
    """What a request takes of `counters` that is expected to use up so many tokens and so much money."""
    amounts = {"tokens": tokens, "usd": nano_usd}
    return tuple(
        [
            Take(
                take.key,
                take.limit,
                cost_of(take.limit, amounts[take.limit.kind]),
                take.bound,
                take.is_held,
                take.parts,
            )
            if take.limit.kind in amounts
            else take
            for take in counted
        ]
    )


@functools.lru_cache(maxsize=10_000)
def _smallest(caller: Caller, of_rule: tuple[Limit, ...]) -> tuple[Take, ...]:
    """What any request takes of all the counters. Of two limits on one counter the stricter one stands."""
    found: dict[str, Limit] = {}
    for limit in (*caller.limits, *of_rule):
        key = _counter(caller, limit)
        if key not in found or limit.amount < found[key].amount:
            found[key] = limit
    return tuple(
        Take(key=key, limit=limit, cost=cost_of(limit, 1), bound=_bound(limit), is_held=limit.kind != "requests")
        for key, limit in found.items()
    )


def cost_of(limit: Limit, amount: int) -> int:
    """`amount` requests, tokens, nano-USD or places in the unit of the limit's counter.

    Rounded up: a limit may be kept a little too strictly, never be overrun.
    """
    if FORMS[limit.kind] == "rate":
        amount = -(-amount * PERIODS_US[limit.per] // limit.amount)
    return min(amount, MOST)


def _bound(limit: Limit) -> int:
    if limit.kind == "requests":
        return limit.burst * cost_of(limit, 1)  # so that `burst` whole requests pass, whatever is rounded
    return cost_of(limit, limit.burst) if limit.kind == "tokens" else limit.amount


def _counter(caller: Caller, limit: Limit) -> str:
    """The name of a limit's counter.

    A rate's has all of the limit in it: another rate starts anew. What was spent or is under way counts on where the
    amount is changed.
    """
    names = {"key": caller.key_id, "tenant": caller.tenant, "token": caller.token_id}
    whose = "all" if limit.shared_by == "all" else f"{limit.shared_by}:{names[limit.shared_by]}"
    scope = ":".join(f"{name}={value}" for name, value in _scope(limit))
    counts = f"{limit.amount}/{limit.per}:{limit.burst}" if FORMS[limit.kind] == "rate" else limit.per
    return f"{whose}:{limit.kind}:{counts}" + (f":{scope}" if scope else "")


def _scope(limit: Limit) -> list[tuple[str, str]]:
    named = (("task", limit.task), ("model", limit.model), ("priority", limit.priority), ("rule", limit.rule or ANY))
    return [(name, value) for name, value in named if value != ANY]


def shared_out(taken: Sequence[Take], workers: int) -> tuple[Take, ...]:
    """The same for one of `workers` that cannot ask each other: each has its part of every limit.

    That is one request at least, however much it takes; what would not pass a whole limit does not pass here either.
    """
    return tuple([_part(take, workers) for take in taken]) if workers > 1 else tuple(taken)


def _part(take: Take, workers: int) -> Take:
    if take.cost > take.bound:
        return take
    if take.form == "rate":
        cost = take.cost * workers
        return take._replace(cost=cost, bound=max(cost, take.bound), parts=workers)
    return take._replace(bound=max(take.cost, take.bound // workers))


def spent_of(taken: Iterable[Take], *, tokens: int, nano_usd: int) -> list[int]:
    """What a request has really used up, in the units of those of its takes that are held; no places any more."""
    used = {"tokens": tokens, "usd": nano_usd, "concurrent": 0}
    return [cost_of(take.limit, used[take.limit.kind]) * take.parts for take in taken if take.is_held]


# --- what counters say ---------------------------------------------------------------------------


def verdict(
    taken: Sequence[Take], rows: Sequence[Row], *, now_us: int, admitted: bool, ticket: int | None = None
) -> Verdict:
    """One verdict over all counters. `rows` are in the order of `taken`; of one not `admitted` nothing was taken."""
    if not admitted:
        both = zip(taken, rows, strict=True)
        rows = [row._replace(value=row.value - take.cost) if row.passed else row for take, row in both]
    states = tuple([_state(take, row, now_us) for take, row in zip(taken, rows, strict=True)])
    if admitted:
        return Verdict(allowed=True, states=states, ticket=ticket)
    refused = [state for state in states if state.is_refused]
    longest = max(refused, key=lambda state: (state.is_hopeless, state.retry_after_us), default=None)
    return Verdict(allowed=False, states=states, refused_by=longest)


def _state(take: Take, row: Row, now_us: int) -> LimitState:
    _, limit, cost, bound, _, parts = take
    passed, value, until_us = row
    kind, reset_us, retry_after_us = limit.kind, 0, 0
    if kind in ("requests", "tokens"):
        left_us, period_us = (now_us + bound - value) // parts, PERIODS_US[limit.per]
        remaining = (
            left_us // -(-period_us // limit.amount) if kind == "requests" else left_us * limit.amount // period_us
        )
        reset_us = value - now_us if value > now_us else 0
        retry_after_us = reset_us + cost - bound
    else:
        remaining = bound - value
        if kind == "usd":
            reset_us = retry_after_us = until_us - now_us
    remaining = max(remaining, 0)
    if passed:
        return LimitState(limit, remaining, reset_us)
    if cost > bound:
        return LimitState(limit, remaining, reset_us, is_refused=True, is_hopeless=True)
    return LimitState(limit, remaining, reset_us, is_refused=True, retry_after_us=retry_after_us)


@functools.lru_cache(maxsize=10_000)
def name_of(limit: Limit) -> str:
    """As a caller would call it: `60 requests per minute`, `10 USD per month for the task general_llm`.

    A rate that lets fewer, or more, come at once says so: who is refused sooner than it seems to promise knows why.
    """
    amount = f"{limit.amount / NANO_USD_PER_USD:g}" if limit.kind == "usd" else str(limit.amount)
    period = f" per {limit.per}" if limit.per else ""
    whose = {"key": "", "tenant": " of the tenant", "all": " of all callers", "token": " of the token"}[limit.shared_by]
    scope = "".join(f" for the {name} {value}" for name, value in _scope(limit))
    at_once = f", {limit.burst} at once" if limit.burst not in (0, limit.amount) else ""
    return f"{amount} {UNITS[limit.kind]}{period}{at_once}{whose}{scope}"


# --- calendar periods ----------------------------------------------------------------------------


def boundaries_us(per: str, now_us: int) -> tuple[int, int, int]:
    """The beginning and the end of the day or month (UTC) at `now_us` (Unix microseconds), and the end of the next.

    A store takes the first of them that lies after its own clock's time, so that clocks may differ a little.
    """
    return _boundaries_us(per, now_us // PERIODS_US["day"])


@functools.lru_cache(maxsize=16)
def _boundaries_us(per: str, day: int) -> tuple[int, int, int]:
    begin = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day)
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
