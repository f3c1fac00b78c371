"""`adaptive`: our own batching rule. Nothing to tune: it learns what a batch costs and how fast company comes.

What it knows, all of it measured while serving:

- `L(b)`: how long a batch of b rows keeps an instance busy (`_Curve`).
- `a`: the time from one arrival, or the end of a batch, to the next arrival (`_Gaps`). The time during which nobody
  can come because all are being served is not in it.
- `P`: how many rows are in the system when it is fullest (`_Crowd`), and `k`, how many batches ran at once.

What it decides. If callers come back at once, k instances that always run N of P rows finish

    min(k N, P) / (L(N) + a max(0, min(N, (k + 1) N - P)))  rows per microsecond:

while N rows run, P - k N wait for the next batch; what is missing then is waited for with an idle instance. `target` is
the N with the best such rate. With fixed costs f (`L(b) = f + m b`) and N = P this says: gather all if P a < f, else
let one half wait while the other runs; on a model whose larger batches are slower per row it finds the best size.
With `target` rows or more in the queue, `target` rows are sent. With n < target rows, it waits only if the rows that
are missing are expected sooner than

    target (T(n) + T(s - n)) / s - L(target),

where `s` is this instance's share of P and `T(x)` the time of x rows in the best batches possible: what the executor
saves by one full batch, against sending n now and the others after them. So nobody waits if all who may come are here
(one caller alone never waits), if the gap between callers is long, or if a larger batch is no faster. A wait ends at
the latest after that time, or once the next arrival is overdue (mean + 4 deviations, as TCP's timer: RFC 6298); then P
is what is there. Waits that end this way make waiting less likely for a while.

Sizes not tried yet are tried upwards (powers of two), as long as the size before was not clearly slower per row;
later each is tried again now and then, at a cost of at most 1/256 of the executor's time.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence

from local_runtime.scheduling.decisions import DispatchReason
from local_runtime.scheduling.sizing import Choice, Hold, QueueView, Send

# Runs of a size before its time is believed. The first ones are slow for reasons of their own (TorchScript optimizes
# in the first two), so the fastest of them counts.
_TRIAL_RUNS = 3
# Weight of a new sample against the past: follows a drift within some ten batches.
_WEIGHT = 1 / 8
# One slow run counts at most as twice the usual, so that an outlier moves the estimate by an eighth.
_OUTLIER = 2.0
# Larger sizes are not tried behind one whose rate is less than this of the best.
_CLEARLY_WORSE = 0.8
# A larger batch must be so much faster per row: equal rates leave by the smaller one, whose rows are done sooner.
_BETTER = 1.02
# A size is tried again after so many batches, and only if that costs less than this part of the time since.
_STALE_BATCHES = 64
_TRIAL_COST = 1 / 256
# The peak is that of the last one to two of these many batches.
_PEAK_BATCHES = 16
# What was planned holds for so many batches; after the first few runs for less.
_PLAN_BATCHES = 64
_EARLY = 16
# With a single caller there is nothing to choose: only each so many batches is learned from, to save its time.
_ALONE_LEARNS = 8
# A refusal to wait for want of trust brings it back by this much.
_FORGIVE = 1 / 64


def _bucket(rows: int) -> int:
    """Two buckets for each doubling: 1, 2, 3, 4-5, 6-7, 8-11, 12-15, 16-23, ..."""
    octave = rows.bit_length() - 1
    return 2 * octave + (rows >> max(0, octave - 1) & 1 if octave else 0)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Known:
    """Batches of about the same size: typical rows and time, how many were run, and the last one's number."""

    rows: float
    us: float
    runs: int
    last: int


class _Curve:
    """`L(b)`: typical batch time by rows, between the measured sizes a straight line."""

    def __init__(self) -> None:
        self.batches = 0  # all that have been learned
        self.busy_us = 0
        self._known: dict[int, _Known] = {}
        self._points: list[_Known] = []

    def learn(self, rows: int, us: int) -> None:
        """A batch of so many rows took so long."""
        self.batches += 1
        self.busy_us += us
        bucket = _bucket(rows)
        known = self._known.get(bucket)
        if known is None:
            self._known[bucket] = _Known(rows=rows, us=us, runs=1, last=self.batches)
            self._sort()
            return
        known.runs += 1
        known.last = self.batches
        if known.runs <= _TRIAL_RUNS:
            if us * known.rows < known.us * rows:
                known.rows, known.us = rows, us
            if known.runs == _TRIAL_RUNS:
                self._sort()
            return
        known.us += _WEIGHT * (min(us, _OUTLIER * known.us * rows / known.rows) - known.us)
        known.rows += _WEIGHT * (rows - known.rows)

    def known(self, rows: int) -> _Known | None:
        """What was measured at about this size."""
        return self._known.get(_bucket(rows))

    def fastest(self) -> _Known:
        """The size of the best rate."""
        return max(self._points, key=lambda point: point.rows / point.us)

    def us(self, rows: float) -> float:
        """Expected time.

        Hopeful beyond what was measured: smaller batches have no fixed cost, larger ones go on as the last two.
        """
        points = self._points
        place = bisect.bisect_left(points, rows, key=lambda point: point.rows)
        if place == 0:
            return points[0].us * rows / points[0].rows
        if len(points) == 1:
            return points[0].us
        place = min(place, len(points) - 1)
        low, high = points[place - 1], points[place]
        slope = (high.us - low.us) / (high.rows - low.rows)
        if rows > high.rows:
            return high.us + max(0.0, slope) * (rows - high.rows)
        return low.us + slope * (rows - low.rows)

    def _sort(self) -> None:
        """The line goes through the sizes with enough runs; before there is any, through what there is."""
        believed = [known for known in self._known.values() if known.runs >= _TRIAL_RUNS]
        self._points = sorted(believed or self._known.values(), key=lambda point: point.rows)


class _Interval:
    """A time that comes again and again: its usual length and how much that varies."""

    def __init__(self) -> None:
        self.mean_us = math.inf
        self._deviation_us = 0.0

    @property
    def longest_us(self) -> float:
        """What takes longer is overdue."""
        return self.mean_us + max(6 * self._deviation_us, 2 * self.mean_us)

    def learn(self, us: float) -> None:
        if self.mean_us == math.inf:
            self.mean_us, self._deviation_us = us, us / 2
            return
        # A pause says little about what comes within a burst; 100 us let the mean grow from nothing.
        error_us = min(us, 4 * self.mean_us + 100) - self.mean_us
        self._deviation_us += _WEIGHT * (abs(error_us) - self._deviation_us)
        self.mean_us += _WEIGHT * error_us


class _Arrivals:
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
        if not self.came:
            self._first_us = now_us
        self.came += 1
        self._came_rows += rows
        self._latest_us = now_us

    def look(self) -> None:
        """Learn from those who came, at least one, since the last look."""
        came = self.came
        self.rows += _WEIGHT * (self._came_rows / came - self.rows)
        if self._seen_us is not None:
            self._next.learn(float(max(0, self._first_us - self._seen_us)))
        if came > 1:
            self._after_arrival.learn((self._latest_us - self._first_us) / (came - 1))
        self._seen_us = self._latest_us
        self._is_after_batch = False
        self.came = self._came_rows = 0

    def finished(self, now_us: int) -> None:
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


class _Crowd:
    """`P` and `k`: the most requests in the system and the most batches at once, of late."""

    def __init__(self) -> None:
        self.requests = 1
        self.instances = 1
        self.running_batches = 0
        self._ended = 0.0
        self._earlier = (0.0, 1)
        self._recent_requests = 0.0
        self._recent_instances = 1
        self._batches = 0

    def finished(self, requests: float) -> None:
        """Until the next arrival these are still counted: who has been answered may be about to come again."""
        self._ended = requests
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
            here += round(self._ended)
        self._ended = 0.0
        if here > self._recent_requests:
            self._recent_requests = here
            self._sum_up()

    def sent(self) -> None:
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


class AdaptiveSizing:
    """Chooses batch sizes by what it has learned; see the module's text for the rule.

    Args:
        max_batch_size: most rows of a batch, at least 1.
        latency_target_us: the oldest request's wait and its batch together stay below this where a batch small
            enough exists and the queue can be worked off within it; otherwise the fastest way is taken.
    """

    def __init__(self, *, max_batch_size: int, latency_target_us: int | None) -> None:
        self._max_batch_size = max_batch_size
        self._latency_target_us = math.inf if latency_target_us is None else latency_target_us
        octaves = range(max_batch_size.bit_length())
        self._doublings = [1 << octave for octave in octaves]
        sizes = {1 << octave for octave in octaves} | {3 << octave for octave in octaves} | {max_batch_size}
        self._sizes = sorted(size for size in sizes if size <= max_batch_size)
        self._curve = _Curve()
        self._arrivals = _Arrivals()
        self._crowd = _Crowd()
        self._costs_us: list[float] = []
        self._best: list[int] = []
        self._trials: tuple[int, ...] = ()
        self._least_trial = 1
        self._alone = 0
        self._planned_at = -1
        self._last_trial_busy_us = 0
        self._hold_began_us: int | None = None
        self._hold_ends_us = 0.0
        self._hold_target = 0
        self._targets: dict[float, int] = {}
        self._send_one = Send(count=1, reason=DispatchReason.ADAPTIVE)
        self._trust = 1.0
        self._waste_us = 0.0

    def arrived(self, *, rows: int, now_us: int) -> None:
        """A request has been queued."""
        if self._max_batch_size > 1:
            self._arrivals.arrived(rows, now_us)

    def finished(self, *, rows: int, compute_us: int, now_us: int) -> None:
        """A batch has ended: learn its time."""
        if self._max_batch_size == 1 or (self._crowd.requests == 1 and self._alone % _ALONE_LEARNS):
            return
        self._arrivals.finished(now_us)
        self._crowd.finished(rows / self._arrivals.rows)
        self._curve.learn(rows, max(1, compute_us))

    def choose(self, view: QueueView, now_us: int) -> Choice:
        """Send the best size, or hold for company that is expected soon enough to pay."""
        if self._max_batch_size == 1:
            return self._send_one
        arrivals, crowd = self._arrivals, self._crowd
        here = view.waiting + view.running
        is_arrival = arrivals.came > 0
        if is_arrival and here == crowd.requests == 1:
            self._alone += 1
            arrivals.came = 0
            crowd.running_batches = 1
            return self._send_one
        if is_arrival:
            arrivals.look()
        crowd.seen(here, running=view.running, is_arrival=is_arrival)
        if not self._curve.batches:
            return self._send(view.prefix_rows, rows=0)
        if self._hold_began_us is not None and view.prefix_rows[-1] < self._hold_target and not view.is_stopped:
            until_us = min(self._hold_ends_us, arrivals.overdue_us())
            if until_us > now_us:
                return Hold(until_us=math.ceil(until_us))
            self._held_in_vain(here, now_us - self._hold_began_us)
        self._plan()
        return self._choose(view, now_us)

    def _choose(self, view: QueueView, now_us: int) -> Choice:
        prefix_rows, rows_each = view.prefix_rows, self._arrivals.rows
        rows = prefix_rows[-1]
        age_us = now_us - view.oldest_enqueued_us
        trial = self._trial(prefix_rows, age_us) if rows >= self._least_trial else 0
        if trial:
            return self._send(prefix_rows, rows=trial)
        everything = rows + (view.waiting - len(prefix_rows)) * rows_each
        population = max(everything, (self._crowd.requests - view.running) * rows_each)
        target = self._target(population + view.running * rows_each)
        if rows < target and population > everything and not view.is_stopped:
            until_us = self._hold_until(view, now_us, target=target, population=population)
            if until_us > now_us:
                return Hold(until_us=math.ceil(until_us))
        return self._send(prefix_rows, rows=self._size(min(rows, target), everything, age_us))

    def _plan(self) -> None:
        """Look at the curve again: times and best sizes, and which sizes to try."""
        curve = self._curve
        if self._planned_at >= 0 and curve.batches - self._planned_at < min(_PLAN_BATCHES, curve.batches // _EARLY):
            return
        self._planned_at = curve.batches
        self._costs_us = [curve.us(size) for size in self._sizes]
        best, self._best = 0, []
        for place, size in enumerate(self._sizes):
            if size * self._costs_us[best] > _BETTER * self._sizes[best] * self._costs_us[place]:
                best = place
            self._best.append(best)
        self._trials = self._worth_trying()
        self._least_trial = min(self._trials, default=self._max_batch_size + 1)
        self._targets.clear()

    def _worth_trying(self) -> tuple[int, ...]:
        """Sizes to try, in this order."""
        curve = self._curve
        fastest = curve.fastest()
        fastest_rate = fastest.rows / fastest.us
        allowance_us = _TRIAL_COST * (curve.busy_us - self._last_trial_busy_us)
        fresh: list[int] = []
        stale: list[tuple[int, int]] = []
        below: _Known | None = None
        for size in self._doublings:
            known = curve.known(size)
            if known is None or known.runs < _TRIAL_RUNS:
                # It takes at least as long as the size below; beyond the fastest size it is hardly faster per row.
                if (
                    below is None
                    or (size if size < fastest.rows else below.rows) >= _CLEARLY_WORSE * fastest_rate * below.us
                ):
                    fresh.append(size)
                    continue
            else:
                below = known
            if curve.us(size) - size / fastest_rate <= allowance_us:
                last = known.last if known else 0
                if curve.batches - last >= _STALE_BATCHES:
                    stale.append((last, size))
        return (*fresh, *(size for _, size in sorted(stale)))

    def _trial(self, prefix_rows: Sequence[int], age_us: int) -> int:
        """A size to try now: one that can be made of what waits, within the latency target; 0 for none."""
        for size in self._trials:
            count = bisect.bisect_right(prefix_rows, size)
            is_possible = count and _bucket(prefix_rows[count - 1]) == _bucket(size)
            if is_possible and age_us + self._curve.us(size) <= self._latency_target_us:
                self._planned_at = -1
                self._last_trial_busy_us = self._curve.busy_us
                return size
        return 0

    def _target(self, population: float) -> int:
        """The N of the best rate if so many rows are in the system."""
        known = self._targets.get(population)
        if known is not None:
            return known
        instances = self._crowd.instances
        cap = min(self._max_batch_size, max(1, int(population)))
        half = min(cap, math.ceil(population / (instances + 1)))
        options = dict(zip(self._sizes, self._costs_us, strict=True))
        options.update((size, self._curve.us(size)) for size in (half, cap) if size not in options)
        target, best = 1, 0.0
        for size in sorted(size for size in options if size <= cap):
            us = options[size]
            missing = min(size, (instances + 1) * size - population)
            idle_us = self._arrivals.round_us(missing) if missing > 0 else 0.0
            rate = min(instances * size, population) / (us + idle_us)
            if rate > _BETTER * best:
                target, best = size, rate
        self._targets[population] = target
        return target

    def _time_us(self, rows: float) -> float:
        """`T(x)`: the time of so many rows in the best batches that they allow."""
        if rows < 1:
            return 0.0
        place = self._best[bisect.bisect_right(self._sizes, rows) - 1]
        each_us = self._costs_us[place] / self._sizes[place]
        if rows <= self._max_batch_size:
            each_us = min(each_us, self._curve.us(rows) / rows)
        return rows * each_us

    def _hold_until(self, view: QueueView, now_us: int, *, target: int, population: float) -> float:
        """When to stop to wait for `target` rows: not later than now if waiting does not pay."""
        arrivals = self._arrivals
        rows = view.prefix_rows[-1]
        share = max(rows, population / max(1, self._crowd.instances - self._crowd.running_batches))
        target = min(target, int(share))
        if target <= rows:
            return now_us
        cost_us = self._curve.us(target)
        saved_us = target * (self._time_us(rows) + self._time_us(share - rows)) / share - cost_us
        gain_us = saved_us - arrivals.wait_us(target - rows)
        if gain_us <= 0:
            return now_us
        if self._trust * gain_us <= (1 - self._trust) * self._waste_us:
            self._trust += (1 - self._trust) * _FORGIVE
            return now_us
        self._hold_ends_us = min(now_us + saved_us, view.oldest_enqueued_us + self._latency_target_us - cost_us)
        until_us = min(self._hold_ends_us, arrivals.overdue_us())
        if until_us > now_us:
            self._hold_began_us, self._hold_target = now_us, target
        return until_us

    def _held_in_vain(self, here: int, waited_us: int) -> None:
        self._crowd.is_only(here)
        self._trust -= self._trust * _WEIGHT
        self._waste_us += _WEIGHT * (waited_us - self._waste_us)
        self._hold_began_us = None

    def _size(self, rows: int, everything: float, age_us: int) -> int:
        """Of up to so many rows, how many to send."""
        sizes, costs_us = self._sizes, self._costs_us
        place = self._best[bisect.bisect_right(sizes, rows) - 1]
        best, best_us = sizes[place], costs_us[place]
        if best < rows:
            us = self._curve.us(rows)
            if rows * best_us > _BETTER * best * us:
                best, best_us = rows, us
        left_us = self._latency_target_us - age_us
        if best_us <= left_us or everything * best_us / best > self._latency_target_us:
            return best
        fitting = [size for size, us in zip(sizes, costs_us, strict=True) if size <= best and us <= left_us]
        return fitting[-1] if fitting else best

    def _send(self, prefix_rows: Sequence[int], *, rows: int) -> Send:
        """Send as many requests as have up to so many rows together, at least one."""
        if self._hold_began_us is not None:
            self._trust += (1 - self._trust) * _WEIGHT
            self._hold_began_us = None
        self._crowd.sent()
        count = bisect.bisect_right(prefix_rows, rows)
        return Send(count=count, reason=DispatchReason.ADAPTIVE) if count > 1 else self._send_one
