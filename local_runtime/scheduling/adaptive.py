"""`adaptive`: our own batching rule. Nothing to tune: it learns what a batch costs and how fast company comes.

What it knows, all of it measured while serving:

- `L(b)`: how long a batch of b rows keeps an instance busy (`batch_curve`).
- `a`: the time from one arrival, or the end of a batch, to the next arrival (`arrivals`). The time during which nobody
  can come because all are being served is not in it.
- `P`: how many rows are in the system when it is fullest (`arrivals`), and `k`, how many batches ran at once.

What it decides. If callers come back at once, k instances that always run N of P rows finish

    min(k N, P) / (L(N) + a max(0, min(N, (k + 1) N - P)))  rows per microsecond:

while N rows run, P - k N wait for the next batch; what is missing then is waited for with an idle instance. `target` is
the N with the best such rate. With fixed costs f (`L(b) = f + m b`) and N = P this says: gather all if P a < f, else
let one half wait while the other runs; on a model whose larger batches are slower per row it finds the best size.
Where the best N that gathers all (k N >= P) and the best of the others come close to each other, the formula only says
which one to begin with: both are tried in turn and the faster one stays (`contest`).

With `target` rows or more in the queue, `target` rows are sent. With n < target rows, it waits only if the rows that
are missing are expected sooner than

    target (T(n) + T(s - n)) / s - L(target),

where `s` is this instance's share of P and `T(x)` the time of x rows in the best batches possible: what the executor
saves by one full batch, against sending n now and the others after them. (At least L(target) where gathering all is
the way that was found, or is being tried.) So nobody waits if all who may come are here (one caller alone never waits),
if the gap between callers is long, or if a larger batch is no faster. A wait ends at the latest after that time, or
once the next arrival is overdue (mean and deviation, as TCP's timer: RFC 6298); then P is what is there. Waits that end
this way make waiting less likely for a while.

Sizes not tried yet are tried upwards (powers of two, three runs each), as long as the size before was not clearly
slower per row. A size that has not run for a while is tried again, at a cost of at most 1/64 of the executor's time at
first and 1/256 later; one run ends that if it shows nothing new.

All this is thought over, and learned from, at most once in 1.5 ms as long as the question stays the same.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence

from local_runtime.scheduling.arrivals import Arrivals, Crowd
from local_runtime.scheduling.batch_curve import STALE_BATCHES, Curve, Known, bucket_of
from local_runtime.scheduling.contest import Contest
from local_runtime.scheduling.decisions import DispatchReason
from local_runtime.scheduling.sizing import Choice, Hold, QueueView, Send

# Weight of a new sample against the past: what waits in vain is forgotten as slowly.
_WEIGHT = 1 / 8
# Larger sizes are not tried behind one whose rate is less than this of the best.
_CLEARLY_WORSE = 0.8
# A larger batch must be so much faster per row: equal rates leave by the smaller one, whose rows are done sooner.
_BETTER = 1.02
# A stale size is tried again only if that costs less than this part of the time since the last trial.
_TRIAL_COST = 1 / 256
# The first trials may have met a machine that was busy with something else: the next ones may cost more.
_EARLY_RETRIALS = 2
_EARLY_TRIAL_COST = 1 / 64
# What was planned holds for so many batches; after the first few runs for less.
_PLAN_BATCHES = 64
_EARLY = 16
# For so long the same question gets the same answer, unthought and unlearned: both together take some 10 us, as long as
# some rows of a small model.
_SAME_ANSWER_US = 1_500
# A refusal to wait for want of trust brings it back by this much.
_FORGIVE = 1 / 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Aim:
    """What is best with so many rows in the system: the N that gathers all, the N that overlaps, and which of them."""

    gathering: int
    overlapping: int
    contest: Contest

    @property
    def target(self) -> int:
        return self.gathering if self.contest.gathers else self.overlapping


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
        self._send_one = Send(count=1, reason=DispatchReason.ADAPTIVE)
        self._curve = Curve()
        self._arrivals = Arrivals()
        self._crowd = Crowd()
        self._costs_us: list[float] = []
        self._best: list[int] = []
        self._trials: tuple[int, ...] = ()
        self._least_trial = 1
        self._question = (0, 0, 0, 0)
        self._answer = self._send_one
        self._is_repeat = False
        self._same_until_us = -1
        self._plan_again_at = 0
        self._last_trial_busy_us = 0
        self._hold_began_us: int | None = None
        self._hold_ends_us = 0.0
        self._hold_target = 0
        self._contests: dict[int, Contest] = {}
        self._aims: dict[int, _Aim] = {}
        self._best_of: dict[int, int] = {}
        self._aim: _Aim | None = None
        self._target = 0
        self._trust = 1.0
        self._waste_us = 0.0

    def arrived(self, *, rows: int, now_us: int) -> None:
        """A request has been queued."""
        if self._max_batch_size > 1:
            self._arrivals.arrived(rows, now_us)

    def finished(self, *, rows: int, compute_us: int, now_us: int) -> None:
        """A batch has ended: learn its time."""
        if self._max_batch_size == 1:
            return
        if self._is_repeat:
            self._arrivals.skip(now_us)
            self._crowd.ended = rows / self._arrivals.rows
            return
        self._arrivals.finished(now_us)
        self._crowd.finished(rows / self._arrivals.rows)
        self._curve.learn(rows, max(1, compute_us))
        aim = self._aim
        if aim is not None and aim.contest.is_testing and aim.contest.ended(rows=rows, now_us=now_us):
            self._target = aim.target

    def choose(self, view: QueueView, now_us: int) -> Choice:
        """Send the best size, or hold for company that is expected soon enough to pay."""
        if self._max_batch_size == 1:
            return self._send_one
        arrivals, crowd = self._arrivals, self._crowd
        question = (view.waiting, len(view.prefix_rows), view.prefix_rows[-1], view.running)
        if now_us < self._same_until_us and question == self._question:
            self._is_repeat = True
            crowd.running_batches = 1
            return self._answer
        self._is_repeat = False
        self._same_until_us = -1
        self._question = question
        here = view.waiting + view.running
        is_arrival = arrivals.came > 0
        if is_arrival:
            arrivals.look()
        crowd.seen(here, running=view.running, is_arrival=is_arrival)
        if not self._curve.batches:
            return self._send(view.prefix_rows, rows=0)
        if self._hold_began_us is not None and view.prefix_rows[-1] < self._hold_target and not view.is_stopped:
            until_us = min(self._hold_ends_us, arrivals.overdue_us())
            if until_us > now_us:
                return Hold(until_us=math.ceil(until_us))
            self._held_in_vain(here, now_us)
        if self._curve.batches >= self._plan_again_at:
            self._plan()
        return self._choose(view, now_us)

    def _choose(self, view: QueueView, now_us: int) -> Choice:
        prefix_rows, rows_each = view.prefix_rows, self._arrivals.rows
        rows = prefix_rows[-1]
        everything = rows + (view.waiting - len(prefix_rows)) * rows_each
        population = max(everything, (self._crowd.requests - view.running) * rows_each)
        in_all = int(population + view.running * rows_each)
        aim = self._aims.get(in_all)
        if aim is None or aim is not self._aim:
            aim = self._take_aim(in_all, now_us)
        contest = aim.contest
        if rows >= self._least_trial and not contest.is_testing:
            trial = self._trial(prefix_rows, now_us - view.oldest_enqueued_us)
            if trial:
                return self._send(prefix_rows, rows=trial)
        contest.test_if_due(now_us)
        target = self._target
        is_waited_for = self._hold_began_us is not None
        if rows < target:
            if population > everything and not view.is_stopped:
                until_us = self._hold_until(view, now_us, target=target, population=population)
                if until_us > now_us:
                    return Hold(until_us=math.ceil(until_us))
                if contest.gathers:
                    self._end_test(now_us)
            target = self._best_of.get(rows) or self._best_size(rows)
        if self._latency_target_us < math.inf:
            target = self._timely(target, everything, now_us - view.oldest_enqueued_us)
        elif rows <= target and rows < self._least_trial and not (view.running or is_waited_for or contest.is_testing):
            self._same_until_us = now_us + _SAME_ANSWER_US
        self._answer = self._send(prefix_rows, rows=target)
        return self._answer

    def _plan(self) -> None:
        """Look at the curve again: times and best sizes, and which sizes to try."""
        curve = self._curve
        curve.refresh()
        self._plan_again_at = curve.batches + min(_PLAN_BATCHES, curve.batches // _EARLY)
        self._costs_us = [curve.us(size) for size in self._sizes]
        best, self._best = 0, []
        for place, size in enumerate(self._sizes):
            if size * self._costs_us[best] > _BETTER * self._sizes[best] * self._costs_us[place]:
                best = place
            self._best.append(best)
        self._trials = self._worth_trying()
        self._least_trial = min(self._trials, default=self._max_batch_size + 1)
        self._aims.clear()
        self._best_of.clear()

    def _worth_trying(self) -> tuple[int, ...]:
        """Sizes to try, in this order."""
        curve = self._curve
        fastest = curve.fastest()
        fastest_rate = fastest.rows / curve.us(fastest.rows)
        busy_us = curve.busy_us - self._last_trial_busy_us
        fresh: list[int] = []
        stale: list[tuple[int, int]] = []
        below: Known | None = None
        for size in self._doublings:
            known = curve.known(size)
            if known is None or not known.is_believed:
                # It takes at least as long as the size below; beyond the fastest size it is hardly faster per row.
                hoped = size if below is None or size < fastest.rows else below.rows
                if below is None or hoped >= _CLEARLY_WORSE * fastest_rate * curve.us(below.rows):
                    fresh.append(size)
                    continue
            else:
                below = known
                if known.trials:
                    fresh.append(size)
            last, retrials = (known.last, known.retrials) if known else (0, _EARLY_RETRIALS)
            excess_us = curve.us(size) - size / fastest_rate
            share = _TRIAL_COST if retrials >= _EARLY_RETRIALS else _EARLY_TRIAL_COST
            if curve.batches - last >= STALE_BATCHES and excess_us <= share * busy_us:
                stale.append((last, size))
        return (*fresh, *(size for _, size in sorted(stale)))

    def _trial(self, prefix_rows: Sequence[int], age_us: int) -> int:
        """A size to try now: one that can be made of what waits, within the latency target; 0 for none."""
        for size in self._trials:
            count = bisect.bisect_right(prefix_rows, size)
            is_possible = count and bucket_of(prefix_rows[count - 1]) == bucket_of(size)
            if is_possible and age_us + self._curve.us(size) <= self._latency_target_us:
                self._plan_again_at = 0
                self._last_trial_busy_us = self._curve.busy_us
                return size
        return 0

    def _take_aim(self, population: int, now_us: int) -> _Aim:
        """From now on there are so many rows in the system."""
        aim = self._aims.get(population)
        if aim is None:
            aim = self._aims[population] = self._new_aim(population)
        if self._aim is not None and self._aim.contest is not aim.contest:
            self._end_test(now_us)
        self._aim = aim
        self._target = aim.target
        return aim

    def _new_aim(self, population: int) -> _Aim:
        """The best N of either way if so many rows are in the system, and how the two compare."""
        instances = self._crowd.instances
        cap = min(self._max_batch_size, max(1, population))
        sizes = {min(cap, math.ceil(population / parts)) for parts in (instances, instances + 1) if population}
        sizes.update(size for size in self._sizes if size < cap)
        gathering, overlapping = (0.0, 1), (0.0, 1)
        at_best = 0.0
        for size in sorted(sizes | {cap}):
            us = self._curve.us(size)
            missing = min(size, (instances + 1) * size - population)
            idle_us = self._arrivals.round_us(missing) if missing > 0 else 0.0
            rate = min(instances * size, population) / (us + idle_us)
            if instances * size < population:
                overlapping = (rate, size) if rate > _BETTER * overlapping[0] else overlapping
            elif rate > _BETTER * gathering[0]:
                gathering = (rate, size)
                at_best = rate * (us + idle_us) / us
        contest = self._contests.setdefault(bucket_of(max(1, population)), Contest())
        over = 1 / overlapping[0] if overlapping[0] else math.inf
        known = self._curve.known(gathering[1])
        is_stale = known is None or self._curve.batches - known.last >= STALE_BATCHES
        contest.rated(gathering[0] * over, at_best=at_best * over, is_stale=is_stale, population=population)
        return _Aim(gathering=gathering[1], overlapping=overlapping[1], contest=contest)

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
        if self._aim is not None and self._aim.contest.gathers and self._aim.contest.is_open:
            saved_us = max(saved_us, arrivals.round_us(target) + cost_us)
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

    def _held_in_vain(self, here: int, now_us: int) -> None:
        self._crowd.is_only(here)
        self._trust -= self._trust * _WEIGHT
        self._waste_us += _WEIGHT * (now_us - (self._hold_began_us or 0) - self._waste_us)
        self._hold_began_us = None
        if self._aim is not None and self._aim.contest.gathers:
            self._end_test(now_us)

    def _end_test(self, now_us: int) -> None:
        """The callers are not those that the test began with."""
        if self._aim is not None and self._aim.contest.is_testing:
            self._aim.contest.stop(now_us)
            self._target = self._aim.target

    def _best_size(self, rows: int) -> int:
        """Of up to so many rows, how many to send."""
        place = self._best[bisect.bisect_right(self._sizes, rows) - 1]
        best = self._sizes[place]
        if best < rows and rows * self._costs_us[place] > _BETTER * best * self._curve.us(rows):
            best = rows
        self._best_of[rows] = best
        return best

    def _timely(self, best: int, everything: float, age_us: int) -> int:
        """The same or less, where the oldest has waited so long and all these rows are to be served."""
        best_us = self._curve.us(best)
        left_us = self._latency_target_us - age_us
        if best_us <= left_us or everything * best_us / best > self._latency_target_us:
            return best
        fitting = [size for size, us in zip(self._sizes, self._costs_us, strict=True) if size <= best and us <= left_us]
        return fitting[-1] if fitting else best

    def _send(self, prefix_rows: Sequence[int], *, rows: int) -> Send:
        """Send as many requests as have up to so many rows together, at least one."""
        if self._hold_began_us is not None:
            self._trust += (1 - self._trust) * _WEIGHT
            self._hold_began_us = None
        self._crowd.sent()
        count = len(prefix_rows) if rows >= prefix_rows[-1] else bisect.bisect_right(prefix_rows, rows)
        return Send(count=count, reason=DispatchReason.ADAPTIVE) if count > 1 else self._send_one
