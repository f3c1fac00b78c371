"""Gather or overlap: `adaptive` has two ways to serve callers that come back, and finds the faster one by running both.

To gather is to let nobody run before all are here; to overlap is to run some while the others come. The curve alone
cannot choose: callers that are served while a batch runs may slow it (they share the process and the machine with it),
and how long a batch takes is mostly seen in one of the two ways. So both run in turns, each for a few batches, and what
counts is rows by time from batch end to batch end, whatever the time went into.
"""

# A test: so many rounds of both ways, each way until all callers have been served so many times.
_ROUNDS = 3
_SERVED = 6
# The other way must be so much faster in most rounds: equal ones stay as they are. It is clearly slower below this.
_BETTER = 1.02
_CLEARLY_SLOWER = 0.85
# After a test so many times its length without one; doubled by each one that changed nothing. A test may be spent up to
# 2/3 on a way that is half as fast, which costs 1/96 of the time at first and soon next to nothing.
_PAUSE = 32
_LONGEST_PAUSE = 2048
# Outside of these odds the curve alone decides. (It knows nothing of batches slowed by callers, which speaks against
# overlapping only: if it says that gathering is faster, it is.)
_OPEN_ODDS = (0.4, 1.25)
# Odds from an old measurement are doubted above this.
_DOUBTED = 0.7
# The next test comes sooner once the curve rates the two ways so differently from the last one.
_OTHER_ODDS = 1.5


class Contest:
    """What is known of the two ways for one number of callers.

    `gathers`: the way in force; `is_open`: the curve alone does not decide; `test_at_us`: no test before.
    """

    def __init__(self) -> None:
        self.gathers = False
        self.is_open = False
        self.is_testing = False
        self.test_at_us = 0
        self._favours_gathering: bool | None = None
        self._population = 1
        self._odds = 1.0
        self._at_least = _CLEARLY_SLOWER
        self._tested_odds = 1.0
        self._pause = _PAUSE
        self._began_us = 0
        self._ended_us = 0
        self._window_began_us: int | None = None
        self._rows = 0
        self._rates: list[float] = []

    def rated(self, odds: float, *, at_best: float, is_stale: bool, population: int) -> None:
        """With so many rows in the system, the curve says that gathering is `odds` times as fast as overlapping.

        It is `at_best` times as fast if what callers do while a batch runs takes as much from it as an idle instance
        would have lost, as if all shared one thread. `is_stale`: batches that gather have not run of late, and cannot
        be tried while others overlap, so that a bad first measurement would hold for ever.
        """
        self._population = population
        self._odds = odds
        low, high = _OPEN_ODDS
        is_likely = at_best > _BETTER
        self.is_open = low < odds < high and (is_likely or (is_stale and odds > _DOUBTED))
        # Where the curve gives gathering no chance, the first round has to show that the curve is wrong.
        self._at_least = _CLEARLY_SLOWER if is_likely else _BETTER
        if not self.is_open or self._favours_gathering is None:
            self._favours_gathering = odds > _BETTER
        if not self.is_open:
            self.is_testing = False
        if self._pause > _PAUSE and not 1 / _OTHER_ODDS < odds / self._tested_odds < _OTHER_ODDS:
            self._tested_odds = odds
            self.test_at_us = self._ended_us + _PAUSE * (self._ended_us - self._began_us)
            self._pause = _PAUSE
        if not self.is_testing:
            self.gathers = self._favours_gathering

    def test_if_due(self, now_us: int) -> None:
        """Begin a test if it is time for one."""
        if now_us >= self.test_at_us and self.is_open and not self.is_testing:
            self.is_testing = True
            self._began_us = now_us
            self._window_began_us = None
            self._rates.clear()

    def ended(self, *, rows: int, now_us: int) -> bool:
        """A batch of the test has ended. Whether another way is in force now, or the test is over."""
        if self._window_began_us is None:  # this batch had still to do with the other way
            self._window_began_us, self._rows = now_us, 0
            return False
        self._rows += rows
        if self._rows < _SERVED * self._population:
            return False
        self._rates.append(self._rows / max(1, now_us - self._window_began_us))
        self._window_began_us = None
        is_over = len(self._rates) == 2 * _ROUNDS
        if len(self._rates) % 2 == 0:
            is_over = is_over or self._rates[-1] < self._at_least * self._rates[-2]
        if not is_over:
            self.gathers = not self.gathers
            return True
        wins = sum(other > _BETTER * one for one, other in zip(self._rates[::2], self._rates[1::2], strict=True))
        if 2 * wins > _ROUNDS:
            self._favours_gathering = not self._favours_gathering
            self._pause = _PAUSE
        self.stop(now_us)
        return True

    def stop(self, now_us: int) -> None:
        """End the test, at its end or before."""
        self.is_testing = False
        self.gathers = bool(self._favours_gathering)
        self._tested_odds = self._odds
        self._ended_us = now_us
        self.test_at_us = now_us + self._pause * (now_us - self._began_us)
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
