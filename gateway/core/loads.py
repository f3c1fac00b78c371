"""What each place has to do now, how fast it begins to answer, and what it costs: the memory of the strategies.

One board for each process, given the time; it knows the requests of this process alone. Two figures need a word:

- **First token.** An exponentially weighted mean, by time as well as by count: a sample weighs `1 - exp(-dt / tau)`,
  `dt` since the last one, `tau` 10 s, but never less than a tenth, so that many at once are more than one. After 30 s
  without a sample the place counts as unmeasured: what it was like then is not what it is like now.
- **Share of a server.** An engine works on all its requests at once. So each is charged `dt / n` for every `dt` that
  `n` of them were there (processor sharing). The sum over all requests is the time in which the server had any.
  A virtual clock that runs at `1 / n` gives that in a few additions: a share is its reading at the end less that at
  the start.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final

from gateway.core.types import ANY, Place

TAU_US: Final = 10_000_000
LEAST_WEIGHT: Final = 0.1
STALE_US: Final = 30_000_000
SAMPLES: Final = 100  # of which the 95th percentile is the fifth from above
FEWEST_SAMPLES: Final = 20  # with fewer, the 95th percentile would be the slowest there was
USUAL_FOR_US: Final = 300_000_000  # how long what was usual is remembered
COST_DECAY: Final = 0.95  # of what was paid before, at each payment: the last twenty or so count
MAX_PLACES: Final = 4096  # callers may name models; more than that are not remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A place as it is now.

    Attributes:
        requests / tokens: in flight at its server, whichever the model; tokens are prompts and the most they ask for.
        own_requests: of those requests, the ones for this place's model.
        first_token_us: the mean time to the first token of streams; None where it is not known now.
        usual_first_token_us: 95 of 100 streams begin within that; None with fewer than 20 samples.
        usual_whole_us: 95 of 100 answers that come whole take no longer; None with fewer than 20 samples.
        nano_usd_per_token: what an output token has cost there; None where nothing was paid yet.
        since_sent_us: since the last request was sent there; None where there was none.
    """

    requests: int = 0
    tokens: int = 0
    own_requests: int = 0
    first_token_us: float | None = None
    usual_first_token_us: int | None = None
    usual_whole_us: int | None = None
    nano_usd_per_token: float | None = None
    since_sent_us: int | None = None

    @property
    def is_measured(self) -> bool:
        """Whether its time to the first token is known."""
        return self.first_token_us is not None


@dataclass(slots=True)
class _Server:
    """One that has requests now. `clock_us` is the virtual clock, read at `seen_us`."""

    requests: int = 0
    tokens: int = 0
    clock_us: float = 0.0
    seen_us: int = 0

    def tick(self, now_us: int) -> float:
        """The virtual clock at `now_us`."""
        passed_us = now_us - self.seen_us
        if passed_us > 0:
            self.seen_us = now_us
            if self.requests:
                self.clock_us += passed_us / self.requests
        return self.clock_us


@dataclass(slots=True)
class _Usual:
    """How long the last of one kind took, and which is the 95th percentile of that."""

    samples: deque[int] = field(default_factory=deque)
    in_order: list[int] = field(default_factory=list)
    added_us: int = 0

    def add(self, took_us: int, now_us: int) -> None:
        """One more."""
        if now_us - self.added_us > USUAL_FOR_US:
            self.samples.clear()
            self.in_order.clear()
        self.added_us = now_us
        if len(self.samples) == SAMPLES:
            del self.in_order[bisect_left(self.in_order, self.samples.popleft())]
        self.samples.append(took_us)
        insort(self.in_order, took_us)

    def us(self, now_us: int) -> int | None:
        """The percentile, by the nearest rank; None where too few are known, or none of late."""
        count = len(self.in_order)
        if count < FEWEST_SAMPLES or now_us - self.added_us > USUAL_FOR_US:
            return None
        return self.in_order[math.ceil(0.95 * count) - 1]


@dataclass(slots=True)
class _Record:
    """What is remembered of a place."""

    requests: int = 0
    sent_us: int = 0
    first_token_us: float = 0.0
    measured_us: int | None = None
    streams: _Usual = field(default_factory=_Usual)
    wholes: _Usual = field(default_factory=_Usual)
    nano_usd: float = 0.0
    paid_tokens: float = 0.0

    def measure(self, first_token_us: int, now_us: int) -> None:
        since_us = None if self.measured_us is None else now_us - self.measured_us
        if since_us is None or since_us > STALE_US:
            self.first_token_us = first_token_us
        else:
            weight = max(LEAST_WEIGHT, 1 - math.exp(-max(0, since_us) / TAU_US))
            self.first_token_us += weight * (first_token_us - self.first_token_us)
        self.measured_us = now_us
        self.streams.add(first_token_us, now_us)


@dataclass(slots=True, kw_only=True, eq=False)
class Sending:
    """A request at a place, from `sent` to `ended`; the board's own."""

    place: Place
    server: _Server
    record: _Record
    tokens: int
    sent_us: int
    clock_us: float
    has_begun: bool = False
    is_open: bool = True


class LoadBoard:
    """The loads and figures of all places of a process. Each `sent` is followed by one `ended`, however it ends."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, str], _Server] = {}
        self._records: dict[Place, _Record] = {}

    def sent(self, place: Place, *, tokens: int, now_us: int) -> Sending:
        """A request of so many tokens, prompt and answer, goes to `place`."""
        server = self._servers.get((place.backend, place.replica))
        if server is None:
            server = self._servers[place.backend, place.replica] = _Server(seen_us=now_us)
        clock_us = server.tick(now_us)
        tokens = max(0, tokens)
        server.requests += 1
        server.tokens += tokens
        record = self._record(place)
        record.requests += 1
        record.sent_us = now_us
        return Sending(place=place, server=server, record=record, tokens=tokens, sent_us=now_us, clock_us=clock_us)

    def began(self, sending: Sending, *, now_us: int, is_stream: bool) -> None:
        """Its first part has come, which may be the whole. Only a stream's tells how soon the place has a first token.

        Said again, it changes nothing.
        """
        if sending.has_begun or not sending.is_open:
            return
        sending.has_begun = True
        record = sending.record
        took_us = max(0, now_us - sending.sent_us)
        if is_stream:
            record.measure(took_us, now_us)
        else:
            record.wholes.add(took_us, now_us)

    def share(self, sending: Sending, *, now_us: int) -> int:
        """The request's share of its server's time so far, in microseconds; 0 once it has ended."""
        if not sending.is_open:
            return 0
        return round(sending.server.tick(now_us) - sending.clock_us)

    def ended(self, sending: Sending, *, now_us: int) -> int:
        """It has ended, whichever way; returns its share as `share` does. Said again, it changes nothing."""
        if not sending.is_open:
            return 0
        share_us = self.share(sending, now_us=now_us)
        sending.is_open = False
        server = sending.server
        server.requests -= 1
        server.tokens -= sending.tokens
        if not server.requests:  # an idle server's clock stands still: the next one may begin at 0
            del self._servers[sending.place.backend, sending.place.replica]
        sending.record.requests -= 1
        return share_us

    def paid(self, place: Place, *, nano_usd: int, tokens: int) -> None:
        """An answer of so many output tokens has cost that much there."""
        record = self._records.get(place)
        if record is None or tokens <= 0 or nano_usd < 0:
            return
        record.nano_usd = record.nano_usd * COST_DECAY + nano_usd
        record.paid_tokens = record.paid_tokens * COST_DECAY + tokens

    def standing(self, place: Place, *, now_us: int) -> Standing:
        """How `place` stands now."""
        server = self._servers.get((place.backend, place.replica))
        record = self._records.get(place)
        requests, tokens = (server.requests, server.tokens) if server else (0, 0)
        if record is None:
            return Standing(requests=requests, tokens=tokens)
        is_known = record.measured_us is not None and now_us - record.measured_us <= STALE_US
        return Standing(
            requests=requests,
            tokens=tokens,
            own_requests=record.requests,
            first_token_us=record.first_token_us if is_known else None,
            usual_first_token_us=record.streams.us(now_us),
            usual_whole_us=record.wholes.us(now_us),
            nano_usd_per_token=record.nano_usd / record.paid_tokens if record.paid_tokens else None,
            since_sent_us=max(0, now_us - record.sent_us),
        )

    def places(self) -> Collection[Place]:
        """Those of which something is remembered."""
        return tuple(self._records)

    def keep_only(self, places: Collection[Place]) -> None:
        """Forget all others, but for those that have requests now. The model `*` keeps every model of its server."""
        forgotten = [
            place
            for place, record in self._records.items()
            if not record.requests
            and place not in places
            and replace(place, model=ANY) not in places
            and replace(place, model=ANY, version="") not in places
        ]
        for place in forgotten:
            del self._records[place]

    def _record(self, place: Place) -> _Record:
        record = self._records.get(place)
        if record is None:
            if len(self._records) >= MAX_PLACES:
                self.keep_only(())
            record = self._records[place] = _Record()
        return record
