"""`L(b)` of `adaptive`: how long a batch of b rows takes, learned while serving."""

import bisect
import dataclasses

# A size that has not run for so many batches is tried again rather than believed.
STALE_BATCHES = 64
# Runs of a size before its time is believed: the fastest of the first ones, later the middle one.
_TRIAL_RUNS = 3
# Weight of a new sample against the past: follows a drift within some ten samples.
_WEIGHT = 1 / 8
# The time of a size follows slowly, so that a busy moment of the machine is not held against the size that ran.
_PACE_WEIGHT = 1 / 4
_SIZE_WEIGHT = 1 / 24
# Batches that go on to take so many times what they took: it is another model, or machine, now. Then it follows fast.
_ANOTHER = 2.5
# One slow run counts at most as so many usual ones.
_OUTLIER = 3.0
# A trial's first run that takes at least this part of the known time has shown nothing new.
_NO_FASTER = 0.95


def bucket_of(rows: int) -> int:
    """Two buckets for each doubling: 1, 2, 3, 4-5, 6-7, 8-11, 12-15, 16-23, ..."""
    octave = rows.bit_length() - 1
    return 2 * octave + (rows >> max(0, octave - 1) & 1 if octave else 0)


@dataclasses.dataclass(slots=True, kw_only=True)
class Known:
    """Batches of about the same size: typical rows and time, and the number of the last one.

    `trials` are the times of one row in the runs of a trial that is going on; `retrials` counts later ones in vain.
    """

    rows: float
    us: float
    last: int
    is_believed: bool = False
    retrials: int = 0
    trials: list[float] = dataclasses.field(default_factory=list)


class Curve:
    """`L(b)`: typical batch time by rows, between the measured sizes a straight line.

    `_pace` is the time that recent batches took, as a multiple of what was known: when something slows the whole
    machine for a while, a size that is tried meanwhile is compared fairly.
    """

    def __init__(self) -> None:
        self.batches = 0  # all that have been learned
        self.busy_us = 0
        self._pace = 1.0
        self._known: dict[int, Known] = {}
        self._by_rows: dict[int, Known] = {}
        self._points: list[Known] = []
        self._rows: list[float] = []
        self._us: list[float] = []

    def learn(self, rows: int, us: int) -> None:
        """A batch of so many rows took so long."""
        self.batches += 1
        self.busy_us += us
        known = self._by_rows.get(rows)
        if known is None:
            fresh = Known(rows=rows, us=us / self._pace, last=0)
            known = self._by_rows[rows] = self._known.setdefault(bucket_of(rows), fresh)
        is_trial = not known.is_believed or known.trials or self.batches - known.last >= STALE_BATCHES
        known.last = self.batches
        if is_trial:
            self._learn_trial(known, rows, us / self._pace)
            return
        surprise = min(_OUTLIER, us * known.rows / (rows * known.us))
        pace = self._pace = self._pace + _PACE_WEIGHT * (surprise - self._pace)
        weight = _SIZE_WEIGHT if 1 / _ANOTHER < pace < _ANOTHER else _WEIGHT
        per_row = known.us / known.rows * (1 + weight * (surprise - 1))
        known.rows += _WEIGHT * (rows - known.rows)
        known.us = per_row * known.rows

    def _learn_trial(self, known: Known, rows: int, us: float) -> None:
        """One run of a trial. A later trial ends with its first run if that was no faster than known."""
        known.trials.append(us / rows)
        if known.is_believed:
            if len(known.trials) == 1 and us / rows >= _NO_FASTER * known.us / known.rows:
                known.us += _WEIGHT * (us / rows * known.rows - known.us)
                known.retrials += 1
                known.trials.clear()
                return
            if len(known.trials) < _TRIAL_RUNS:
                return
        # The first runs of a size are slow for reasons of their own (TorchScript optimizes in the first two).
        per_row = sorted(known.trials)[len(known.trials) // 2] if known.is_believed else min(known.trials)
        known.rows, known.us = rows, per_row * rows
        if len(known.trials) == _TRIAL_RUNS:
            known.trials.clear()
            known.is_believed = True

    def known(self, rows: int) -> Known | None:
        """What was measured at about this size."""
        return self._known.get(bucket_of(rows))

    def fastest(self) -> Known:
        """The size of the best rate, at the last `refresh`."""
        return max(self._points, key=lambda point: point.rows / point.us)

    def us(self, rows: float) -> float:
        """Expected time, by what was known at the last `refresh`.

        Hopeful beyond what was measured: smaller batches have no fixed cost, larger ones go on as the last two.
        """
        points, times_us = self._rows, self._us
        place = bisect.bisect_left(points, rows)
        if place == 0:
            return times_us[0] * rows / points[0]
        if len(points) == 1:
            return times_us[0]
        place = min(place, len(points) - 1)
        low, high = points[place - 1], points[place]
        slope = (times_us[place] - times_us[place - 1]) / (high - low)
        return times_us[place] + (max(0.0, slope) if rows > high else slope) * (rows - high)

    def refresh(self) -> None:
        """Draw the line through the sizes with enough runs; before there is any, through what there is."""
        believed = [known for known in self._known.values() if known.is_believed]
        self._points = sorted(believed or self._known.values(), key=lambda point: point.rows)
        self._rows = [point.rows for point in self._points]
        self._us = [point.us for point in self._points]
