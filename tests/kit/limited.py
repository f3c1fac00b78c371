"""A `Book` behind a caller's limits, with the clock in the test's hand."""

from dataclasses import dataclass, field

from gateway.core.admissions import Ask, Book, verdict_of
from gateway.core.rate_limit import counters, shared_out, spent_of, takes
from gateway.core.types import Caller, Limit, Priority, Verdict

SECOND, MINUTE, HOUR, DAY = 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000
NOW = 1_700_000_000_000_000  # 14 November 2023, 22:13:20 UTC


@dataclass
class Door:
    """Requests of one caller come in and end. `workers`: the limits are one worker's part."""

    limits: tuple[Limit, ...]
    now_us: int = NOW
    workers: int = 1
    book: Book = field(default_factory=lambda: Book(lease_us=None))
    count: int = 0
    asks: dict[int, Ask] = field(default_factory=dict)

    def enter(
        self,
        *,
        tokens: int = 1,
        nano_usd: int = 0,
        task: str = "t",
        model: str = "",
        priority: Priority = "interactive",
    ) -> Verdict:
        """One more request; `self.count` is its number."""
        self.count += 1
        caller = Caller(key_id="k", tenant="acme", limits=self.limits)
        taken = takes(counters(caller, task, model, priority), tokens=tokens, nano_usd=nano_usd)
        ask = Ask(id=f"w:{self.count}", owner="o", takes=shared_out(taken, self.workers))
        reply, _ = self.book.admit(ask, now_us=self.now_us)
        if reply.admitted:
            self.asks[self.count] = ask
        return verdict_of(ask, reply)

    def leave(self, number: int, *, tokens: int = 0, nano_usd: int = 0) -> None:
        """The request with this number has ended, and used up so much."""
        ask = self.asks.pop(number)
        self.book.settle("o", ask.id, spent_of(ask.takes, tokens=tokens, nano_usd=nano_usd), now_us=self.now_us)

    def many(self, number: int, **asked: int) -> int:
        """How many of so many at this moment are let in."""
        return sum(self.enter(**asked).allowed for _ in range(number))


def requests(amount: int = 3, per: str = "second", burst: int | None = None, **fields: str) -> Limit:
    return Limit(kind="requests", amount=amount, per=per, burst=amount if burst is None else burst, **fields)


def tokens(amount: int = 1000, per: str = "minute", burst: int | None = None, **fields: str) -> Limit:
    return Limit(kind="tokens", amount=amount, per=per, burst=amount if burst is None else burst, **fields)


def usd(nano_usd: int, per: str = "month", **fields: str) -> Limit:
    return Limit(kind="usd", amount=nano_usd, per=per, **fields)


def concurrent(amount: int = 2, **fields: str) -> Limit:
    return Limit(kind="concurrent", amount=amount, **fields)
