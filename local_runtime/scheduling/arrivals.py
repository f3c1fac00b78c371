"""`a`, `P` and `k` of `adaptive`: when the next requests are to be expected, and how many there can be."""

import math

# Weight of a new sample against the past: follows a drift within some ten samples.
_WEIGHT = 1 / 8
# Nobody is overdue sooner than this: an event loop's turn with some callers takes as long.
_LEAST_GRACE_US = 20
# The peak is that of the last one to two of these many batches.
_PEAK_BATCHES = 16


class _Interval:
    """A time that comes again and again: its usual length and how much that varies."""

    def __init__(self) -> None:
        self.mean_us = math.inf
        self._deviation_us = 0.0

    @property
    def longest_us(self) -> float:
        """What takes longer is overdue."""
        return self.mean_us + max(6 * self._deviation_us, 2 * self.mean_us, _LEAST_GRACE_US)

    def learn(self, us: float) -> None:
        mean_us = self.mean_us
        if mean_us == math.inf:
            self.mean_us, self._deviation_us = us, us / 2
            return
        # A pause says little about what comes within a burst; 100 us let the mean grow from nothing.
        error_us = min(us - mean_us, 3 * mean_us + 100)
        self.mean_us = mean_us + _WEIGHT * error_us
        self._deviation_us += _WEIGHT * ((error_us if error_us > 0 else -error_us) - self._deviation_us)


class Arrivals:
    """When the next requests are to be expected. `came` counts those since the last look; a look costs more."""

    def __init__(self) -> None:
        self.rows = 1.0
        self.came = 0
        self._came_rows = 0
        self._first_us = 0
        self._latest_us = 0
        self._seen_us: int | None = None
        self._is_after_batch = False
        self._after_batch = _Interval()
        self._after_arrival = _Interval()

    def arrived(self, rows: int, now_us: int) -> None:
        """A request has come; cheap, as this happens more often than all else."""
        if not self.came:
            self._first_us = now_us
        self.came += 1
        self._came_rows += rows
        self._latest_us = now_us

    def look(self) -> None:
        """Learn from those who came, at least one, since the last look."""
        came, first_us, latest_us = self.came, self._first_us, self._latest_us
        if self._came_rows != came * self.rows:
            self.rows += _WEIGHT * (self._came_rows / came - self.rows)
        if self._seen_us is not None:
            (self._after_batch if self._is_after_batch else self._after_arrival).learn(first_us - self._seen_us)
        if came > 1:
            self._after_arrival.learn((latest_us - first_us) / (came - 1))
        self._seen_us = latest_us
        self._is_after_batch = False
        self.came = self._came_rows = 0

    def skip(self, now_us: int) -> None:
        """A batch has ended; learn nothing from those who came since the last look."""
        self.came = self._came_rows = 0
        self._is_after_batch = True
        self._seen_us = now_us

    def finished(self, now_us: int) -> None:
        """A batch has ended."""
        if self.came:
            self.look()
        self._is_after_batch = True
        self._seen_us = now_us

    def wait_us(self, rows: float) -> float:
        """How long so many rows, more than none, will be in coming from now on."""
        return self._next.mean_us + self._more_us(rows)

    def round_us(self, rows: float) -> float:
        """How long so many rows, more than none, are in coming after the end of a batch."""
        return self._after_batch.mean_us + self._more_us(rows)

    def overdue_us(self) -> float:
        """When the next request is overdue."""
        return (self._seen_us or 0) + self._next.longest_us

    @property
    def _next(self) -> _Interval:
        return self._after_batch if self._is_after_batch else self._after_arrival

    def _more_us(self, rows: float) -> float:
        """After the first of them."""
        requests = rows / self.rows - 1
        return requests * self._after_arrival.mean_us if requests > 0 else 0.0


class Crowd:
    """`P` and `k`: the most requests in the system and the most batches at once, of late.

    Until the next arrival those that `ended` last are still counted: who has been answered may be about to come again.
    """

    def __init__(self) -> None:
        self.requests = 1
        self.instances = 1
        self.running_batches = 0
        self.ended = 0.0
        self._earlier = (0.0, 1)
        self._recent_requests = 0.0
        self._recent_instances = 1
        self._batches = 0

    def finished(self, requests: float) -> None:
        """So many requests have been answered: `ended`."""
        self.ended = requests
        if self.running_batches:
            self.running_batches -= 1
        self._batches += 1
        if self._batches == _PEAK_BATCHES:
            self._batches = 0
            self._earlier = (self._recent_requests, self._recent_instances)
            self._recent_requests, self._recent_instances = 0.0, 1
            self._sum_up()

    def seen(self, here: int, *, running: int, is_arrival: bool) -> None:
        """So many requests wait or run, of which so many run; `is_arrival`: some have come since the last batch."""
        if not running:
            self.running_batches = 0
        if not is_arrival:
            here += round(self.ended)
        self.ended = 0.0
        if here > self._recent_requests:
            self._recent_requests = here
            self._sum_up()

    def sent(self) -> None:
        """A batch has left."""
        self.running_batches += 1
        if self.running_batches > self._recent_instances:
            self._recent_instances = self.running_batches
            self._sum_up()

    def is_only(self, here: int) -> None:
        """Nobody else comes, as a wait in vain has shown."""
        self._earlier = (0.0, self._earlier[1])
        self._recent_requests = here
        self._sum_up()

    def _sum_up(self) -> None:
        self.requests = max(1, round(max(self._earlier[0], self._recent_requests)))
        self.instances = max(self._earlier[1], self._recent_instances)
