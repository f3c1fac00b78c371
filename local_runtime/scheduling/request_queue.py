"""The waiting requests of one model in the order in which they run: Triton's priorities and queue policies.

Order: priority level (1 first); within a level as they came, those whose timeout ran out under DELAY behind the others.
Source: triton-inference-server/core `src/scheduler_utils.cc` (PriorityQueue) and `ModelQueuePolicy` in
`model_config.proto`. Unlike Triton, timeouts are seen when they end, not when a search for a batch meets them.
"""

import bisect
import dataclasses
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator

from local_runtime.repository.model_config import DynamicBatching, QueuePolicy, TimeoutAction
from local_runtime.scheduling.decisions import Admission, Dropped, DropReason, QueuedRequest

# Alarms of requests that have left may outnumber those of waiting ones by so many before they are swept.
_ALARM_SLACK = 64


@dataclasses.dataclass(slots=True, eq=False)
class _Level:
    """One priority level's requests by id, oldest first."""

    number: int
    policy: QueuePolicy
    waiting: OrderedDict[int, QueuedRequest] = dataclasses.field(default_factory=OrderedDict)
    delayed: OrderedDict[int, QueuedRequest] = dataclasses.field(default_factory=OrderedDict)

    def has(self, request_id: int) -> bool:
        return request_id in self.waiting or request_id in self.delayed

    def remove(self, request_id: int) -> bool:
        """Whether it was there."""
        removed = self.waiting.pop(request_id, None) or self.delayed.pop(request_id, None)
        return removed is not None

    def is_full(self) -> bool:
        return 0 < self.policy.max_queue_size <= len(self.waiting) + len(self.delayed)

    def timeout_us(self, request: QueuedRequest) -> int:
        """How long the request may wait; 0 for ever. A request can only shorten what the policy allows."""
        timeout_us = self.policy.default_timeout_microseconds
        if self.policy.allow_timeout_override and 0 < request.timeout_us < timeout_us:
            return request.timeout_us
        return timeout_us


class _Alarms:
    """Instants at which something happens to waiting requests, earliest first; equal ones as they were set."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, _Level]] = []
        self._set_so_far = 0

    def set(self, at_us: int, request_id: int, level: _Level, *, waiting: int) -> None:
        """`waiting` is the length of the queue: requests leave it without a search for their alarms."""
        if len(self._heap) > 2 * waiting + _ALARM_SLACK:
            self._heap = [alarm for alarm in self._heap if alarm[3].has(alarm[2])]
            heapq.heapify(self._heap)
        self._set_so_far += 1
        heapq.heappush(self._heap, (at_us, self._set_so_far, request_id, level))

    def is_due(self, now_us: int) -> bool:
        """Whether an instant has come, if only that of a request that has left."""
        return bool(self._heap) and self._heap[0][0] <= now_us

    def due(self, now_us: int) -> Iterator[tuple[int, _Level]]:
        """The requests still waiting whose instant has come; each is told once."""
        while self._heap and self._heap[0][0] <= now_us:
            _, _, request_id, level = heapq.heappop(self._heap)
            if level.has(request_id):
                yield request_id, level

    def next_us(self) -> int | None:
        """When the next one comes; None if there is none."""
        while self._heap and not self._heap[0][3].has(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def clear(self) -> None:
        self._heap.clear()


@dataclasses.dataclass(slots=True, kw_only=True)
class Front:
    """The longest start of the queue that may run as one batch. The queue's own: read it, do not keep it.

    Args:
        prefix_rows: rows of its first 1, 2, ... requests together.
        batch_key: that of all its requests.
        oldest_enqueued_us: when the longest waiting of them came.
        is_stopped: whether a request waits behind it that does not fit or has another `batch_key`.
    """

    prefix_rows: list[int] = dataclasses.field(default_factory=list)
    batch_key: Hashable = None
    oldest_enqueued_us: int = 0
    is_stopped: bool = False

    def extend(self, requests: Iterable[QueuedRequest], *, max_rows: int) -> None:
        """Take in the requests that follow, as far as they may join. The first one of all always may."""
        prefix_rows = self.prefix_rows
        rows = prefix_rows[-1] if prefix_rows else 0
        for request in requests:
            rows += request.rows
            if not prefix_rows:
                self.batch_key = request.batch_key
                self.oldest_enqueued_us = request.enqueued_us
            elif rows > max_rows or request.batch_key != self.batch_key:
                self.is_stopped = True
                return
            elif request.enqueued_us < self.oldest_enqueued_us:
                self.oldest_enqueued_us = request.enqueued_us
            prefix_rows.append(rows)


class RequestQueue:
    """Takes requests in, drops them when their time is over, and gives them out in order.

    Args:
        config: for its priorities and queue policies.
        max_rows: of one batch; 0 keeps every request alone.
        max_queue_size: requests that may wait in all levels together; 0 means without limit.
    """

    def __init__(self, config: DynamicBatching, *, max_rows: int, max_queue_size: int) -> None:
        self._config = config
        self._max_rows = max_rows
        self._max_queue_size = max_queue_size
        self._priority_levels = config.priority_levels
        self._default_level = config.default_priority_level if config.priority_levels else 0
        # Levels come into being with their first request (a config may allow 2**32 of them); `_levels` is in order.
        self._by_number: dict[int, _Level] = {}
        self._levels: list[_Level] = []
        self._length = 0
        self._timeouts = _Alarms()
        self._deadlines = _Alarms()
        # What was found at the front, as long as it holds: a queue that is asked at every arrival must not look at
        # the same requests again and again.
        self._front: Front | None = None

    @property
    def can_reject(self) -> bool:
        """Whether requests can be dropped for a queue timeout."""
        policies = [self._config.default_queue_policy]
        if self._priority_levels:
            policies += self._config.priority_queue_policy.values()
        return any(
            policy.timeout_action is TimeoutAction.REJECT and policy.default_timeout_microseconds > 0
            for policy in policies
        )

    def __len__(self) -> int:
        """Requests waiting, those included whose time is over until `expire` drops them."""
        return self._length

    def add(self, request: QueuedRequest) -> Admission:
        """Queue the request behind its level's others, unless its level or the whole queue is full."""
        if 0 < self._max_queue_size <= self._length:
            return Admission.QUEUE_FULL
        level = self._level_of(request)
        if level.is_full():
            return Admission.QUEUE_FULL
        level.waiting[request.id] = request
        self._length += 1
        if self._front is not None:
            self._update_front(request, level)
        timeout_us = level.timeout_us(request)
        if timeout_us:
            self._timeouts.set(request.enqueued_us + timeout_us, request.id, level, waiting=self._length)
        if request.deadline_us is not None:
            self._deadlines.set(request.deadline_us, request.id, level, waiting=self._length)
        return Admission.ACCEPTED

    def cancel(self, request_id: int) -> bool:
        """Remove a waiting request; False if it is not waiting (any more)."""
        return any(self._remove(request_id, level) for level in self._levels)

    def expire(self, now_us: int) -> tuple[Dropped, ...]:
        """Drop the requests whose deadline or timeout has come; put behind those that DELAY keeps."""
        if not (self._deadlines.is_due(now_us) or self._timeouts.is_due(now_us)):
            return ()
        dropped = []
        for request_id, level in self._deadlines.due(now_us):
            self._remove(request_id, level)
            dropped.append(Dropped(id=request_id, reason=DropReason.DEADLINE))
        for request_id, level in self._timeouts.due(now_us):
            if level.policy.timeout_action is TimeoutAction.DELAY:
                level.delayed[request_id] = level.waiting.pop(request_id)
                self._front = None
            else:
                self._remove(request_id, level)
                dropped.append(Dropped(id=request_id, reason=DropReason.QUEUE_TIMEOUT))
        return tuple(dropped)

    def next_timeout_us(self) -> int | None:
        """When `expire` will next act on a queue timeout; None if on none."""
        return self._timeouts.next_us()

    def front(self) -> Front:
        """What may run together now. The queue must not be empty."""
        if self._front is None:
            self._front = Front()
            self._front.extend(self._in_order(), max_rows=self._max_rows)
        return self._front

    def take(self, count: int) -> tuple[int, ...]:
        """Give out the first `count` requests (at least so many wait): their ids in order."""
        ids: list[int] = []
        for requests in self._parts():
            here = min(count - len(ids), len(requests))
            ids.extend(requests.popitem(last=False)[0] for _ in range(here))
            if len(ids) == count:
                break
        self._length -= count
        self._front = None
        return tuple(ids)

    def drain(self) -> tuple[int, ...]:
        """Give out all that waits."""
        self._timeouts.clear()
        self._deadlines.clear()
        return self.take(self._length)

    def _level_of(self, request: QueuedRequest) -> _Level:
        number = request.priority if 0 < request.priority <= self._priority_levels else self._default_level
        level = self._by_number.get(number)
        if level is None:
            policy = self._config.default_queue_policy
            if self._priority_levels:
                policy = self._config.priority_queue_policy.get(number, policy)
            level = self._by_number[number] = _Level(number, policy)
            bisect.insort(self._levels, level, key=lambda other: other.number)
        return level

    def _update_front(self, request: QueuedRequest, level: _Level) -> None:
        """A request was added: the front goes on to it if it is the last of all, and is to be sought anew if not."""
        if self._front is None or level is not self._levels[-1] or level.delayed:
            self._front = None
        elif not self._front.is_stopped:
            self._front.extend((request,), max_rows=self._max_rows)

    def _remove(self, request_id: int, level: _Level) -> bool:
        is_removed = level.remove(request_id)
        if is_removed:
            self._length -= 1
            self._front = None
        return is_removed

    def _parts(self) -> Iterator[OrderedDict[int, QueuedRequest]]:
        for level in self._levels:
            yield level.waiting
            yield level.delayed

    def _in_order(self) -> Iterator[QueuedRequest]:
        return itertools.chain.from_iterable(part.values() for part in self._parts())
