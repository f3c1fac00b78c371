"""Who waits for a free place at a server, and who is next: interactive before batch, tenants by the work that they had.

Within a priority it is start-time fair queueing (Goyal, Vin and Cheng, 1996), with the virtual time of each tenant
charged when its request is sent and corrected when that has ended, as the virtual token counter does (Sheng et al.,
2024):

- A tenant's virtual time is the work that it was served; whose is the smallest goes next, its oldest request first.
- Who comes after a pause begins at the virtual time of the one sent last: nobody saves up a claim while away. So of two
  tenants that always wait, neither has had more than the other by more than one request of each.
- A full line loses the newest request of the tenant that has the most of its places (buffer stealing, as in McKenney's
  stochastic fairness queueing, 1990). Places and not work are counted there, as places are what it has run out of: a
  tenant with one large request must not lose it to another's flood of small ones.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Generic, TypeVar

from gateway.core.types import Priority, TensorPayload

FEWEST_STAYS: Final = 8  # before that, nothing is foretold
STAY_WEIGHT: Final = 1 / 16  # of the newest stay in the mean: the last sixteen or so count
MOST_AWAY: Final = 1024  # tenants of which none waits that are remembered for what they still owe
MOST_WEIGHED: Final = 64  # tenants that a forecast looks at: they stand for the others
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Stays:
    """How long requests stay at a server, from being sent to having ended: a mean in which the last ones count most."""

    count: int = 0
    mean_us: float = 0.0

    def with_one(self, stayed_us: int) -> "Stays":
        """One more has left."""
        weight = max(STAY_WEIGHT, 1 / (self.count + 1))  # plain at first
        return Stays(self.count + 1, self.mean_us + weight * (max(0, stayed_us) - self.mean_us))


def expected_wait_us(stays: Stays, *, ahead: int, max_in_flight: int) -> int | None:
    """How long one waits at a full server behind `ahead` others; None while too few have been seen to tell.

    Of `max_in_flight` requests that each stay for `stays.mean_us`, one leaves every `mean_us / max_in_flight`; it is
    the newcomer's turn after `ahead + 1` of them. Who comes later and goes before it all the same is not foreseen.
    """
    if stays.count < FEWEST_STAYS:
        return None
    return int((ahead + 1) * stays.mean_us / max_in_flight)


def items_of(payload: TensorPayload) -> int:
    """How many items a tensor request has: its inputs' first dimension, if all have the same; else it counts as one.

    What a model without a batch dimension has there counts all the same: the gateway does not ask for it here.
    """
    firsts = {tensor.shape[0] if tensor.shape else 1 for tensor in payload.inputs}
    return max(1, *firsts) if len(firsts) == 1 else 1


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter(Generic[_Item]):
    """One in line.

    Attributes:
        work: what it is expected to take, at least 1; in the unit of its server (tokens, or items).
        account: its tenant's, from its turn until it has ended.
    """

    item: _Item
    tenant: str
    priority: Priority
    work: int
    number: int
    account: "_Tenant[_Item] | None" = None


class WaitingLine(Generic[_Item]):
    """A bounded line; a step costs no more than a search among the tenants that wait, however many requests do."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._count = 0
        self._by_priority: dict[Priority, _FairLine[_Item]] = {"interactive": _FairLine(), "batch": _FairLine()}

    def __len__(self) -> int:
        return sum(map(len, self._by_priority.values()))

    def ahead_of(self, tenant: str, priority: Priority) -> int:
        """About how many go before a newcomer."""
        interactive, own = self._by_priority["interactive"], self._by_priority[priority]
        return own.ahead_of(tenant) + (len(interactive) if own is not interactive else 0)

    def join(
        self, item: _Item, *, tenant: str, priority: Priority, work: int
    ) -> tuple[Waiter[_Item], Waiter[_Item] | None]:
        """Take a place; returns it, and whom it put out: where the line is full, one that waited, or the newcomer.

        An interactive newcomer puts out a batch request. Where it finds none, and for a batch newcomer, it is one of
        the newcomer's own priority, of a tenant that has at least two places more.
        """
        self._count += 1
        waiter = Waiter(item=item, tenant=tenant, priority=priority, work=max(1, work), number=self._count)
        own, put_out = self._by_priority[priority], None
        if len(self) >= self._bound:
            shed_from = self._shed_from(tenant, priority)
            if shed_from is None:
                return waiter, waiter
            put_out = shed_from.put_out()
        own.join(waiter)
        return waiter, put_out

    def has_room(self, tenant: str, priority: Priority) -> bool:
        """Whether such a newcomer would have a place, be it another's."""
        return len(self) < self._bound or self._shed_from(tenant, priority) is not None

    def _shed_from(self, tenant: str, priority: Priority) -> "_FairLine[_Item] | None":
        """Of which line a newcomer puts one out, as the whole is full; None: it is the one to go."""
        own, batch = self._by_priority[priority], self._by_priority["batch"]
        shed_from = batch if len(batch) else own
        return None if shed_from is own and own.most_places <= own.places_of(tenant) + 1 else shed_from

    def leave(self, waiter: Waiter[_Item]) -> None:
        """Give up a place, if it is still held."""
        self._by_priority[waiter.priority].leave(waiter)

    def next(self) -> Waiter[_Item] | None:
        """Whose turn it is; it leaves the line. None where nobody waits."""
        for line in self._by_priority.values():
            if len(line):
                return line.next()
        return None

    def ended(self, waiter: Waiter[_Item], took: int | None = None) -> None:
        """One whose turn had come has ended, and took so much in the end, where that is known. Else nothing happens."""
        self._by_priority[waiter.priority].ended(waiter, took)


@dataclass(slots=True)
class _Tenant(Generic[_Item]):
    """A tenant's account.

    Attributes:
        at: its virtual time.
        waiting: its requests, in order of arrival; `work` of all of them.
        sent: its requests that have had their turn and have not ended.
        rank: where it stands among the tenants: by virtual time, then by the arrival of its first request.
    """

    name: str
    at: int
    work: int = 0
    sent: int = 0
    waiting: OrderedDict[int, Waiter[_Item]] = field(default_factory=OrderedDict)
    rank: tuple[int, int] = (0, 0)


class _FairLine(Generic[_Item]):
    """Those of one priority."""

    def __init__(self) -> None:
        self._count = 0
        self._now = 0  # virtual time: of the one whose turn came last
        self._tenants: dict[str, _Tenant[_Item]] = {}  # of which requests wait
        self._away: dict[str, _Tenant[_Item]] = {}  # others of which some are sent, or whose time was later than `_now`
        self._ranks: list[tuple[int, int]] = []  # sorted; the second number is of a request, so that no two are equal
        self._by_rank: dict[int, _Tenant[_Item]] = {}
        self._by_places: dict[int, OrderedDict[str, None]] = {}  # last those that grew last
        self.most_places = 0

    def __len__(self) -> int:
        return self._count

    def places_of(self, tenant: str) -> int:
        """How many of it wait."""
        found = self._tenants.get(tenant)
        return len(found.waiting) if found else 0

    def ahead_of(self, tenant: str) -> int:
        own = self._tenants.get(tenant)
        away = self._away.get(tenant)
        at = own.at + own.work if own else max(self._now, away.at if away else 0)
        others = len(self._tenants) - (own is not None)
        weighed, ahead = 0, 0
        for other in islice(self._tenants.values(), MOST_WEIGHED):
            if other is not own:
                weighed += 1
                if other.at <= at:
                    places = len(other.waiting)
                    ahead += min(places, (at - other.at) * places // other.work + 1)
        if weighed:
            ahead = ahead * others // weighed
        return ahead + (len(own.waiting) if own else 0)

    def join(self, waiter: Waiter[_Item]) -> None:
        tenant = self._tenants.get(waiter.tenant)
        if tenant is None:
            tenant = self._away.pop(waiter.tenant, None) or _Tenant(waiter.tenant, 0)
            tenant.at = max(tenant.at, self._now)
            self._tenants[waiter.tenant] = tenant
        tenant.waiting[waiter.number] = waiter
        self._changed(tenant, places=1, work=waiter.work)

    def leave(self, waiter: Waiter[_Item]) -> None:
        tenant = self._tenants.get(waiter.tenant)
        if tenant is not None and tenant.waiting.pop(waiter.number, None) is not None:
            self._changed(tenant, places=-1, work=-waiter.work)

    def next(self) -> Waiter[_Item]:
        tenant = self._by_rank[self._ranks[0][1]]
        _, waiter = tenant.waiting.popitem(last=False)
        waiter.account = tenant
        tenant.sent += 1
        self._now = max(self._now, tenant.at)
        tenant.at += waiter.work
        self._changed(tenant, places=-1, work=-waiter.work)
        return waiter

    def put_out(self) -> Waiter[_Item]:
        """The newest of the tenant with the most places; of several such, of the one that grew last."""
        tenant = self._tenants[next(reversed(self._by_places[self.most_places]))]
        _, waiter = tenant.waiting.popitem()
        self._changed(tenant, places=-1, work=-waiter.work)
        return waiter

    def ended(self, waiter: Waiter[_Item], took: int | None) -> None:
        tenant, waiter.account = waiter.account, None
        if tenant is None:
            return
        tenant.sent -= 1
        if took is not None:
            tenant.at += took - waiter.work
        if tenant.waiting:
            self._rank(tenant)
        elif self._away.get(tenant.name) is tenant and not self._is_owing(tenant):
            del self._away[tenant.name]

    def _changed(self, tenant: _Tenant[_Item], *, places: int, work: int) -> None:
        """`tenant` has so many places more or less, for so much work."""
        self._count += places
        tenant.work += work
        has = len(tenant.waiting)
        had = has - places
        if had:
            del self._by_places[had][tenant.name]
            if not self._by_places[had]:
                del self._by_places[had]
        if has:
            alike = self._by_places.setdefault(has, OrderedDict())
            alike[tenant.name] = None
            alike.move_to_end(tenant.name, last=places > 0)
        if has > self.most_places or (had == self.most_places and had not in self._by_places):
            self.most_places = has
        self._rank(tenant)
        if not has:
            del self._tenants[tenant.name]
            if self._is_owing(tenant):
                self._keep(tenant)

    def _rank(self, tenant: _Tenant[_Item]) -> None:
        """Put `tenant` where it belongs now, or nowhere if none of it waits."""
        if tenant.rank[1]:
            del self._ranks[bisect_left(self._ranks, tenant.rank)]
            del self._by_rank[tenant.rank[1]]
        first = next(iter(tenant.waiting), 0)  # the first number is 1
        tenant.rank = (tenant.at, first)
        if first:
            insort(self._ranks, tenant.rank)
            self._by_rank[first] = tenant

    def _is_owing(self, tenant: _Tenant[_Item]) -> bool:
        """Whether there is more to know of one that does not wait than that it has no claim."""
        return tenant.sent > 0 or tenant.at > self._now

    def _keep(self, tenant: _Tenant[_Item]) -> None:
        self._away[tenant.name] = tenant
        if len(self._away) > MOST_AWAY:
            self._away = {name: its for name, its in self._away.items() if self._is_owing(its)}
            for name in list(islice(self._away, max(0, len(self._away) - MOST_AWAY // 2))):  # the longest away
                del self._away[name]
