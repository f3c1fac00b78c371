"""Circuit breakers, one for each backend and model, as a plain state machine that is given the time.

closed -> open after `FAILURES_TO_OPEN` blamed failures in a row, or at once when a probe finds it away;
open -> half-open after `COOL_DOWN_US`: a single request may try, and its outcome decides;
open -> closed when a probe succeeds, if it opened because the backend was away. Probes run every second, so a
returned backend is used again within that time. A backend that answers wrongly looks healthy to a probe: only a
request can close that breaker.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gateway.core.errors import FaultKind

FAILURES_TO_OPEN = 3
COOL_DOWN_US = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """The state of one backend's model."""

    failures: int = 0
    open_until_us: int | None = None
    trial_until_us: int = 0
    reason: str = ""
    is_away: bool = False

    def why_not(self, now_us: int) -> str | None:
        """None when a request may be sent now, else the reason."""
        if self.open_until_us is None:
            return None
        if now_us < self.open_until_us:
            return f"breaker open: {self.reason}"
        if now_us < self.trial_until_us:
            return "breaker half-open: a trial request is under way"
        return None

    def trying(self, now_us: int, *, timeout_us: int) -> "Breaker":
        """A request is being sent. In the half-open state it holds the only place until its own time is up."""
        if self.open_until_us is None:
            return self
        return replace(self, trial_until_us=now_us + timeout_us)

    def succeeded(self) -> "Breaker":
        """An answer or a good probe: closed and clean."""
        return Breaker()

    def failed(self, now_us: int, *, fault: FaultKind, at_once: bool = False) -> "Breaker":
        """A blamed failure. `at_once` opens without counting (a probe that found nobody there)."""
        failures = self.failures + 1
        opens = at_once or failures >= FAILURES_TO_OPEN or self.open_until_us is not None
        return Breaker(
            failures=failures,
            open_until_us=now_us + COOL_DOWN_US if opens else None,
            reason=fault.value,
            is_away=fault is FaultKind.UNAVAILABLE,
        )

    def released(self) -> "Breaker":
        """A trial ended without a verdict (the caller left, or its input was bad): the place is free again."""
        return replace(self, trial_until_us=0)


class BreakerBoard:
    """All breakers of a process: the one mutable place where health is kept."""

    def __init__(self) -> None:
        self._breakers: dict[tuple[str, str], Breaker] = {}

    def of(self, backend: str, model: str) -> Breaker:
        """The breaker of a backend's model; one never heard of is closed."""
        return self._breakers.get((backend, model), _CLOSED)

    def trying(self, backend: str, model: str, *, now_us: int, timeout_us: int) -> None:
        """A request is being sent; it takes the only place of a half-open breaker."""
        self._put(backend, model, self.of(backend, model).trying(now_us, timeout_us=timeout_us))

    def ended(self, backend: str, model: str, *, now_us: int, answered: bool, fault: FaultKind | None) -> None:
        """It ended: with a whole answer, with a `fault` of the backend, or without a verdict on the backend.

        The last is so when the caller left or its input was bad.
        """
        breaker = self.of(backend, model)
        if answered:
            self._put(backend, model, breaker.succeeded())
        elif fault is not None:
            self._put(backend, model, breaker.failed(now_us, fault=fault))
        else:
            self._put(backend, model, breaker.released())

    def probed(self, backend: str, model: str, *, now_us: int, fault: FaultKind | None) -> None:
        """A health probe came back, well or with a fault."""
        breaker = self.of(backend, model)
        if fault is not None:
            self._put(backend, model, breaker.failed(now_us, fault=fault, at_once=fault is FaultKind.UNAVAILABLE))
        elif breaker.is_away:
            self._put(backend, model, breaker.succeeded())

    def all(self) -> Mapping[tuple[str, str], Breaker]:
        """Every breaker ever used, for displays and metrics."""
        return dict(self._breakers)

    def _put(self, backend: str, model: str, breaker: Breaker) -> None:
        if breaker != self.of(backend, model):
            self._breakers[(backend, model)] = breaker


_CLOSED = Breaker()
