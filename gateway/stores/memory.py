"""The ports on dicts: for one process, for tests, and for the time when Redis is out of reach."""

from collections.abc import Sequence

from gateway.core.errors import SequencesUnavailable
from gateway.core.rules import RuleSet
from gateway.core.sequences import Pin, Pins
from gateway.core.types import Place
from gateway.ports import Clock

MAX_KEYS = 100_000  # about 15 MB of counters
_FIRST_SWEEP = 1024


class MemoryRuleSource:
    """`RuleSource` for one process: the set that it was given last."""

    def __init__(self, rules: RuleSet) -> None:
        self._rules = rules

    def current(self) -> RuleSet:
        """See `ports.RuleSource`."""
        return self._rules

    def replace(self, rules: RuleSet) -> None:
        """Put another set in force, whole."""
        self._rules = rules


class MemorySequenceStore:
    """`SequenceStore` for one process: another worker would not know where a sequence lives.

    Holds at most `max_keys` pins and numbers; beyond it no sequence can be started until some have ended. With 0 it
    refuses all: for several workers that share no Redis.
    """

    def __init__(self, clock: Clock, *, max_keys: int = MAX_KEYS) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._pins = Pins()
        self._sweep_at = min(_FIRST_SWEEP, max_keys)

    async def find(self, owner: str, *, for_us: int) -> Pin | None:
        """See `ports.SequenceStore`."""
        return self._pins.find(owner, for_us=for_us, now_us=self._clock())

    async def pin(self, owner: str, place: Place, numbers: Sequence[int], *, idle_us: int, for_us: int) -> int | None:
        """See `ports.SequenceStore`."""
        now_us = self._clock()
        if len(self._pins) >= self._sweep_at:
            self._pins.sweep(now_us)
            self._sweep_at = min(max(_FIRST_SWEEP, 2 * len(self._pins)), self._max_keys)
            if len(self._pins) >= self._max_keys:
                raise SequencesUnavailable(
                    "too many sequences are alive" if self._max_keys else "several workers need Redis for sequences"
                )
        return self._pins.pin(owner, place, numbers, idle_us=idle_us, for_us=for_us, now_us=now_us)

    async def lose(self, owner: str, pin: Pin) -> None:
        """See `ports.SequenceStore`."""
        self._pins.lose(owner, pin, now_us=self._clock())

    async def end(self, owner: str, pin: Pin) -> None:
        """See `ports.SequenceStore`."""
        self._pins.end(owner, pin, now_us=self._clock())
