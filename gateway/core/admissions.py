"""Admissions: what requests hold of limits and queues, taken all or none, and given back whichever way they end.

`Book` is the specification on dicts; `stores/lua/admissions.lua` is the same inside Redis, with Redis's own clock, and
random histories prove them equal. One process may use a `Book` as it is.

An admission takes of every counter that its request touches, and a ticket of its ordering key's queue. What is *held*
(reserved tokens and money, places, the ticket) is given back by `settle`, with what was really used up put in its
stead; where a worker dies, or cannot reach the store, its lease runs out, and the next who comes gives everything back.
So nothing stays taken, and nothing is given back twice.

A queue is the tickets under one ordering key, in their order. The first one has its *turn*: to be sent (`serial`), or
to be answered (`release`). Its leaving, however it comes, gives the turn to the next.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final

from gateway.core.errors import (
    DeadlineExceeded,
    GatewayError,
    OrderingQueueFull,
    OrderingUnavailable,
    RateLimited,
)
from gateway.core.rate_limit import Row, Take, boundaries_us, name_of, verdict
from gateway.core.rules.policies import OnStoreDown
from gateway.core.types import Verdict
from gateway.core.values import quick_value

LEASE_US: Final = 10_000_000
RENEW_US: Final = 3_000_000  # three times within a lease
NEVER_US: Final = 2**52
SWEPT_AT_ONCE: Final = 16  # leases that have run out, given back with each admission
SWEPT_BY_RENEWAL: Final = 256  # and with each renewal: all that a worker held that has died, within a lease or so
MAX_NUMBERS: Final = 100_000
DEBT_WINDOWS: Final = 2
"""A request may use up more than was reserved: the debt of a rate is remembered up to one window beyond a used-up one.
It also bounds what a clock that was set back can do: nobody waits longer than two windows."""


@quick_value
class Wanted:
    """What a request wants to be admitted with, before a store has given it an id.

    Attributes:
        ordering_key: of the tenant; empty where the request has none.
        queue_bound: how many may be under way and wait under one ordering key.
        on_store_down: what decides limits where the store is out of reach: the worker alone (`local`), nobody (`open`,
            all pass), or all are refused (`closed`).
        orders_alone: there, this worker's requests are put in order among themselves; else they are refused.
    """

    tenant: str
    takes: tuple[Take, ...] = ()
    ordering_key: str = ""
    queue_bound: int = 0
    on_store_down: OnStoreDown = "local"
    orders_alone: bool = False


@quick_value
class Ask:
    """What a request asks to be admitted with.

    Attributes:
        id: of the admission, `<worker>:<number>`; never used twice.
        owner: everything of one owner lies in one slot of a Redis Cluster: the tenant, or one for all.
        queue: the ordering key's name; empty where it has none.
        queue_bound: how many may be under way and wait there.
    """

    id: str
    owner: str
    takes: tuple[Take, ...] = ()
    queue: str = ""
    queue_bound: int = 0


@quick_value
class Reply:
    """What the book said. Refused: nothing was taken.

    Attributes:
        now_us: the book's clock, in Unix microseconds.
        rows: of each take, in their order.
        ticket: from 1, in the order of admission under one ordering key; 0 where there is none.
        ahead: how many are before it.
        is_queue_full: the queue has no room; the takes may have passed.
    """

    admitted: bool
    now_us: int
    rows: tuple[Row, ...] = ()
    ticket: int = 0
    ahead: int = 0
    is_queue_full: bool = False


class Standing(IntEnum):
    """How an admission stands, as `renew` says it."""

    GONE = 0  # settled, or its lease has run out
    HELD = 1
    FIRST = 2  # held, and it is its turn


@dataclass(slots=True, kw_only=True)
class _Open:
    """An admission that is under way. `untils_us`: of each budget, the end of its period at that time."""

    until_us: int
    held: tuple[Take, ...]
    untils_us: tuple[int, ...]
    queue: str


@dataclass(slots=True)
class _Owner:
    """The counters of one owner."""

    tats_us: dict[str, int] = field(default_factory=dict)
    spent: dict[str, tuple[int, int]] = field(default_factory=dict)  # how much, and until when it counts
    places: dict[str, int] = field(default_factory=dict)
    open: dict[str, _Open] = field(default_factory=dict)
    queues: dict[str, OrderedDict[str, int]] = field(default_factory=dict)  # tickets by admission, in their order
    numbers: dict[str, int] = field(default_factory=dict)


class Book:
    """All counters of one process. `now_us` is Unix time in microseconds."""

    def __init__(self, lease_us: int | None = LEASE_US) -> None:
        """`lease_us` None: an admission is held until it is settled, as in a process that cannot outlive itself."""
        self._lease_us = NEVER_US if lease_us is None else lease_us
        self._owners: dict[str, _Owner] = {}

    def admit(self, ask: Ask, *, now_us: int) -> tuple[Reply, tuple[str, ...]]:
        """Take everything, or nothing. Also returns the admissions whose turn has come meanwhile.

        A counter that is taken of twice counts twice, each time on top of the take before. One that is under way with
        this id already, as after an ask whose answer was lost, keeps what it has, its place in the order above all.
        """
        own = self._owners.setdefault(ask.owner, _Owner())
        woken = self._sweep(own, now_us)
        if ask.id in own.open:
            return self._again(own, ask, now_us), woken
        rows, after = [], dict[str, Row]()
        for take in ask.takes:
            before = after.get(take.key)
            value, until_us = (before.value, before.until_us) if before else _stored(own, take, now_us)
            row = after[take.key] = row_of(take, value, until_us, now_us)
            rows.append(row)
        is_full = bool(ask.queue) and len(own.queues.get(ask.queue, ())) >= ask.queue_bound
        if is_full or not all(row.passed for row in rows):
            return Reply(admitted=False, now_us=now_us, rows=tuple(rows), is_queue_full=is_full), woken
        for take in ask.takes:
            _store(own, take, after[take.key], now_us)
        held = tuple([take for take in ask.takes if take.is_held])
        ticket = 0
        if ask.queue:
            ticket = own.numbers[ask.queue] = own.numbers.pop(ask.queue, 0) + 1  # put behind the others: the newest
            own.queues.setdefault(ask.queue, OrderedDict())[ask.id] = ticket
        if held or ask.queue:
            untils_us = tuple(after[take.key].until_us for take in held)
            own.open[ask.id] = _Open(until_us=now_us + self._lease_us, held=held, untils_us=untils_us, queue=ask.queue)
        ahead = len(own.queues[ask.queue]) - 1 if ask.queue else 0
        return Reply(admitted=True, now_us=now_us, rows=tuple(rows), ticket=ticket, ahead=ahead), woken

    def _again(self, own: _Owner, ask: Ask, now_us: int) -> Reply:
        """What is said of one that is under way."""
        own.open[ask.id].until_us = now_us + self._lease_us
        stored = [_stored(own, take, now_us) for take in ask.takes]
        rows = tuple([Row(passed=True, value=value, until_us=until_us) for value, until_us in stored])
        line = own.queues.get(ask.queue, OrderedDict())
        ahead = list(line).index(ask.id) if ask.queue else 0
        return Reply(admitted=True, now_us=now_us, rows=rows, ticket=line.get(ask.id, 0), ahead=ahead)

    def settle(self, owner: str, admission: str, spent: Sequence[int], *, now_us: int) -> tuple[str, ...]:
        """It has ended: `spent` is put in the stead of each held take's cost, in their order.

        Nothing happens where it is gone already. Returns the admission whose turn has come, if one has.
        """
        own = self._owners.setdefault(owner, _Owner())
        return self._give_back(own, admission, spent, now_us)

    def renew(
        self, owner: str, admissions: Sequence[str], *, now_us: int
    ) -> tuple[tuple[Standing, ...], tuple[str, ...]]:
        """Keep them for another lease; how each stands, and the admissions whose turn has come meanwhile."""
        own = self._owners.setdefault(owner, _Owner())
        for one in admissions:
            if one in own.open:
                own.open[one].until_us = now_us + self._lease_us
        woken = self._sweep(own, now_us, at_once=SWEPT_BY_RENEWAL)
        return tuple(_standing(own, one) for one in admissions), woken

    def is_first(self, owner: str, admission: str) -> bool:
        """Whether it has its turn."""
        own = self._owners.get(owner)
        return own is not None and _standing(own, admission) is Standing.FIRST

    def forget(self, now_us: int, *, max_numbers: int = MAX_NUMBERS) -> None:
        """Drop counters that say the same as none, and the oldest ticket numbers of queues where nobody is."""
        for own in self._owners.values():
            own.tats_us = {key: tat_us for key, tat_us in own.tats_us.items() if tat_us > now_us}
            own.spent = {key: spent for key, spent in own.spent.items() if spent[1] > now_us}
            too_many = max(0, len(own.numbers) - max_numbers)
            for queue in [one for one in own.numbers if one not in own.queues][:too_many] if too_many else ():
                del own.numbers[queue]

    def _sweep(self, own: _Owner, now_us: int, *, at_once: int = SWEPT_AT_ONCE) -> tuple[str, ...]:
        names = [] if self._lease_us == NEVER_US else _late(own, now_us)[:at_once]
        woken: list[str] = []
        for name in names:
            woken += self._give_back(own, name, [0] * len(own.open[name].held), now_us)
        return tuple(one for one in woken if one in own.open)

    def _give_back(self, own: _Owner, admission: str, spent: Sequence[int], now_us: int) -> tuple[str, ...]:
        one = own.open.pop(admission, None)
        if one is None:
            return ()
        for take, until_us, cost in zip(one.held, one.untils_us, spent, strict=True):
            _put_right(own, take, until_us, cost, now_us)
        return _leave(own, one.queue, admission)


def _late(own: _Owner, now_us: int) -> list[str]:
    """Whose lease has run out, the oldest first."""
    return [
        name for _, name in sorted((one.until_us, name) for name, one in own.open.items() if one.until_us <= now_us)
    ]


def _leave(own: _Owner, queue: str, admission: str) -> tuple[str, ...]:
    """It leaves its queue; the next one, where that has its turn now."""
    line = own.queues.get(queue)
    if not line or admission not in line:
        return ()
    was_first = next(iter(line)) == admission
    del line[admission]
    if not line:
        del own.queues[queue]
        return ()
    return (next(iter(line)),) if was_first else ()


def _standing(own: _Owner, admission: str) -> Standing:
    one = own.open.get(admission)
    if one is None:
        return Standing.GONE
    is_first = bool(one.queue) and next(iter(own.queues[one.queue])) == admission
    return Standing.FIRST if is_first else Standing.HELD


def verdict_of(ask: Ask, reply: Reply) -> Verdict:
    """What a reply means for the caller."""
    told = verdict(ask.takes, reply.rows, now_us=reply.now_us, admitted=reply.admitted, ticket=reply.ticket or None)
    return replace(told, is_queue_full=True) if reply.is_queue_full and told.refused_by is None else told


def refusal(told: Verdict) -> GatewayError:
    """The error for a request that was not admitted."""
    hit = told.refused_by
    if hit is None:
        return OrderingQueueFull("too many requests with this ordering key are under way", field="x-ordering-key")
    name = name_of(hit.limit)
    if hit.is_hopeless:
        error = RateLimited(f"limit reached: {name}; this request alone asks for more than it ever gives at once")
    else:
        error = RateLimited(f"limit reached: {name}", retry_after_us=hit.retry_after_us or None)
    error.should_retry = not hit.is_hopeless and hit.limit.kind != "usd"
    return error


def turn_late() -> GatewayError:
    """Its turn under its ordering key did not come in time."""
    return DeadlineExceeded("its turn under its ordering key did not come in time")


def turn_lost() -> GatewayError:
    """Its place under its ordering key is gone: another may have its turn."""
    return OrderingUnavailable("the place under its ordering key was lost: send it again")


# --- one counter ---------------------------------------------------------------------------------


def _stored(own: _Owner, take: Take, now_us: int) -> tuple[int, int]:
    """What the counter says now; of a budget, also the end of its period."""
    if take.form == "rate":
        tat_us, most_us = own.tats_us.get(take.key, now_us), now_us + DEBT_WINDOWS * take.bound
        if tat_us > most_us:  # the clock was set back: kept so, or who comes again when told would be told the same
            tat_us = own.tats_us[take.key] = most_us
        return max(now_us, tat_us), 0
    if take.form == "places":
        return own.places.get(take.key, 0), 0
    end_us = next(one for one in boundaries_us(take.limit.per, now_us) if one > now_us)
    spent, until_us = own.spent.get(take.key, (0, end_us))
    return spent if until_us == end_us else 0, end_us


def row_of(take: Take, value: int, until_us: int, now_us: int) -> Row:
    """A counter after `take`, if it passes; else as it was. What takes nothing passes, whatever others have taken."""
    bound = take.bound + now_us if take.form == "rate" else take.bound
    passed = take.cost == 0 or value + take.cost <= bound
    return Row(passed=passed, value=value + take.cost if passed else value, until_us=until_us)


def _store(own: _Owner, take: Take, row: Row, now_us: int) -> None:
    """Keep a counter's new value; one that says the same as none is not kept."""
    if take.form == "rate":
        _keep(own.tats_us, take.key, row.value, nothing=now_us)
    elif take.form == "places":
        _keep(own.places, take.key, row.value, nothing=0)
    elif row.value > 0:
        own.spent[take.key] = (row.value, row.until_us)
    else:
        own.spent.pop(take.key, None)


def _put_right(own: _Owner, take: Take, until_us: int, cost: int, now_us: int) -> None:
    """`cost` in the stead of what `take` took; of places, the place is given back."""
    if take.form == "rate":
        value = max(now_us, own.tats_us.get(take.key, now_us)) + cost - take.cost  # one that has passed counts as none
        _keep(own.tats_us, take.key, min(value, now_us + DEBT_WINDOWS * take.bound), nothing=now_us)
    elif take.form == "places":
        _keep(own.places, take.key, own.places.get(take.key, 0) - take.cost, nothing=0)
    else:
        spent, counts_until_us = own.spent.get(take.key, (0, until_us))
        if counts_until_us == until_us:
            _store(own, take, Row(passed=True, value=spent + cost - take.cost, until_us=until_us), now_us)


def _keep(counters: dict[str, int], key: str, value: int, *, nothing: int) -> None:
    if value > nothing:
        counters[key] = value
    else:
        counters.pop(key, None)
