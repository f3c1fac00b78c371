"""Circuit breakers, one for each place, as a plain state machine that is given the time.

Places are of two kinds: a model on a replica, and the replica itself (model `*`), which hears of what concerns all its
models: that nobody answers there.

closed -> open after `FAILURES_TO_OPEN` blamed failures of requests, or of probes, in a row, or at once when a probe
finds nobody there or when a model's process has died; open -> half-open after `COOL_DOWN_US`: a single request may
try, and its outcome decides; open -> closed when a probe succeeds, if probes are what opened it, or if the backend was
found away, be it by a probe or by a request that met nobody at the server's address. Probes run every second, so a
returned backend is used again within that time. A backend that answers wrongly looks healthy to a probe: only a request
can close that breaker.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from gateway.core.errors import Fault, FaultKind
from gateway.core.types import ANY, Place

FAILURES_TO_OPEN = 3
COOL_DOWN_US = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """The state of one place. `failures` counts requests, `probe_failures` probes, each in a row.

    `dead_model` names the model whose process has died: only loading it again helps.
    """

    failures: int = 0
    probe_failures: int = 0
    open_until_us: int | None = None
    trial_until_us: int = 0
    reason: str = ""
    is_away: bool = False
    dead_model: str = ""

    def why_not(self, now_us: int) -> str | None:
        """None when a request may be sent now, else the reason."""
        if self.open_until_us is None:
            return None
        if now_us < self.open_until_us:
            return f"breaker open: {self.reason}"
        if now_us < self.trial_until_us:
            return "breaker half-open: a trial request is under way"
        return None

    def trying(self, now_us: int, *, within_us: int) -> "Breaker":
        """A request is being sent. In the half-open state it holds the only place while it may still begin."""
        if self.open_until_us is None:
            return self
        return replace(self, trial_until_us=now_us + within_us)

    def failed(self, now_us: int, *, fault: FaultKind, dead_model: str = "", is_server: bool = False) -> "Breaker":
        """A request failed, and that is the backend's fault; `is_server`: it found nobody at the address."""
        failures = FAILURES_TO_OPEN if fault is FaultKind.DEAD else self.failures + 1
        opens = failures >= FAILURES_TO_OPEN or self.open_until_us is not None
        open_until_us = now_us + COOL_DOWN_US if opens else None
        return replace(
            self,
            failures=failures,
            open_until_us=open_until_us,
            trial_until_us=0,
            reason=fault.value,
            is_away=self.is_away or is_server,
            dead_model=dead_model or self.dead_model,
        )

    def probe_failed(self, now_us: int, *, fault: FaultKind) -> "Breaker":
        """A probe failed; one that found nobody there opens without counting."""
        failures = self.probe_failures + 1
        is_away = self.is_away or fault in (FaultKind.UNAVAILABLE, FaultKind.UNREACHABLE)
        opens = is_away or failures >= FAILURES_TO_OPEN or self.open_until_us is not None
        open_until_us = now_us + COOL_DOWN_US if opens else None
        return replace(self, probe_failures=failures, open_until_us=open_until_us, is_away=is_away, reason=fault.value)

    def probe_succeeded(self) -> "Breaker":
        """The backend is there: that clears what probes had seen, and what requests saw while it was away."""
        if self.open_until_us is not None and (self.is_away or self.failures < FAILURES_TO_OPEN):
            return _CLOSED
        return replace(self, probe_failures=0, is_away=False)

    def began(self) -> "Breaker":
        """A request began to be answered: an open breaker closes, but one more failure opens it again."""
        if self.open_until_us is None:
            return self
        return Breaker(failures=FAILURES_TO_OPEN - 1)

    def released(self) -> "Breaker":
        """A trial ended without a verdict (the caller left, or its input was bad): the place is free again."""
        return replace(self, trial_until_us=0)


class BreakerBoard:
    """All breakers of a process that are not as new: the one mutable object where health is kept.

    While all is well it is empty, and costs a request nothing.
    """

    def __init__(self) -> None:
        self._breakers: dict[Place, Breaker] = {}
        self._cooling: dict[Place, int] = {}

    @property
    def is_quiet(self) -> bool:
        """Whether every place may be tried: nothing is known against any."""
        return not self._breakers and not self._cooling

    def of(self, place: Place) -> Breaker:
        """The breaker of a place; one never heard of is closed."""
        return self._breakers.get(place, _CLOSED)

    def trying(self, place: Place, *, now_us: int, within_us: int) -> None:
        """A request is being sent; it takes the only place of a half-open breaker."""
        for one in self._known(place):
            self._put(one, self.of(one).trying(now_us, within_us=within_us))

    def began(self, place: Place) -> None:
        """It began to answer, and rightly."""
        for one in self._known(place):
            self._put(one, self.of(one).began())

    def answered(self, place: Place) -> None:
        """It brought a whole answer: closed and clean."""
        for one in self._known(place):
            self._put(one, _CLOSED)

    def failed(self, place: Place, *, now_us: int, fault: Fault) -> None:
        """It failed, and that is the backend's fault: the model's there, or the whole server's."""
        place = server_of(place) if fault.is_server else place
        failed = self.of(place).failed(now_us, fault=fault.kind, dead_model=fault.dead_model, is_server=fault.is_server)
        self._put(place, failed)

    def healed(self, place: Place) -> None:
        """What was broken there has been made anew."""
        self._put(place, _CLOSED)

    def why_not(self, place: Place, now_us: int) -> str | None:
        """None when a request may be sent to `place` now, else the reason."""
        if self._cooling and self.cooling_us(place, now_us) is not None:
            return "it asked to wait"
        if not self._breakers:
            return None
        return self.of(server_of(place)).why_not(now_us) or self.of(place).why_not(now_us)

    def cool(self, place: Place, *, until_us: int) -> None:
        """It is full and said when to come back: until then no request is sent there."""
        self._cooling[place] = max(until_us, self._cooling.get(place, 0))

    def cooling_us(self, place: Place, now_us: int) -> int | None:
        """For how long `place` has still to be left alone; None where it may be called."""
        until_us = self._cooling.get(place)
        if until_us is None:
            return None
        if until_us <= now_us:
            del self._cooling[place]
            return None
        return until_us - now_us

    def shortest_cooling_us(self, refusals: Iterable[tuple[Place, str]], now_us: int) -> int | None:
        """How long until one of these may be called again, if any of them is left alone for having asked to wait."""
        waits = [self.cooling_us(place, now_us) for place, _ in refusals]
        return min((wait for wait in waits if wait is not None), default=None)

    def released(self, place: Place) -> None:
        """It ended without a verdict on the backend: the caller left, or its input was bad."""
        for one in self._known(place):
            self._put(one, self.of(one).released())

    def probed(self, place: Place, *, now_us: int, fault: FaultKind | None) -> None:
        """A health probe came back, well or with a fault that is the backend's."""
        breaker = self.of(place)
        if fault is None:
            self._put(place, breaker.probe_succeeded())
        else:
            self._put(place, breaker.probe_failed(now_us, fault=fault))

    def keep_only(self, places: Collection[Place], *, now_us: int) -> None:
        """Forget places that no rule names any more. What asked to wait is kept until then, if its server is named."""
        self._breakers = {place: breaker for place, breaker in self._breakers.items() if place in places}
        self._cooling = {
            place: until_us
            for place, until_us in self._cooling.items()
            if until_us > now_us and (place in places or server_of(place) in places)  # callers may name models
        }

    def all(self) -> Mapping[Place, Breaker]:
        """Every breaker that has something to say, for displays and metrics."""
        return dict(self._breakers)

    def _known(self, place: Place) -> tuple[Place, ...]:
        """The place and its server, as far as anything was ever heard of them."""
        if not self._breakers:
            return ()
        return tuple(one for one in (place, server_of(place)) if one in self._breakers)

    def _put(self, place: Place, breaker: Breaker) -> None:
        if breaker == _CLOSED:
            self._breakers.pop(place, None)
        else:
            self._breakers[place] = breaker


def server_of(place: Place) -> Place:
    """The replica that `place` is on, as a place of its own."""
    return Place(backend=place.backend, model=ANY, replica=place.replica)


_CLOSED = Breaker()
