"""The gate before each server: so many requests in flight, so many waiting, the rest are refused at once.

Triton's own queue bounds and priorities cost it stalls of half a second (decision 0010), and what waits here can still
be taken back when its caller leaves. Who cannot have its turn in time is refused at once, so that another place can be
tried while there is time for it. One gate for each backend and process.

No place is kept free for interactive requests, nor is batch bound to a share of them: whoever leaves makes room, and
interactive ones go first, so that one waits for a single request to end and not for the batch. A place that is kept
free would cost capacity whenever there is only batch to do. Of one priority, tenants share by work (`core.waiting`).
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from gateway.core.errors import BackendError, Fault, FaultKind
from gateway.core.types import Priority
from gateway.core.waiting import Stays, Waiter, WaitingLine, expected_wait_us

_TOO_MANY: Final = "too many requests wait for this server"
MAX_REPLICAS: Final = 256  # whose stays are remembered; addresses come and go
_Turn = asyncio.Future[bool]
Waited = Waiter[_Turn]
"""What `Gate.enter` gives to one that had to wait."""


class Gate:
    """Bounds per replica: `max_in_flight` requests sent and not answered, `max_queue_size` waiting to be sent."""

    def __init__(self, *, max_in_flight: int, max_queue_size: int) -> None:
        self._max_in_flight = max_in_flight
        self._max_queue_size = max_queue_size
        self._in_flight: dict[str, int] = {}
        self._lines: dict[str, WaitingLine[_Turn]] = {}
        self._stays: dict[str, Stays] = {}

    def load(self, replica: str) -> int:
        """Requests sent and waiting."""
        line = self._lines.get(replica)
        return self._in_flight.get(replica, 0) + (len(line) if line else 0)

    def has_room(self, replica: str) -> bool:
        """Whether a request to `replica` would be sent at once."""
        return self._in_flight.get(replica, 0) < self._max_in_flight

    def waiting(self) -> Mapping[str, int]:
        """Requests that wait, by replica."""
        return {replica: len(line) for replica, line in self._lines.items() if len(line)}

    def enters(self, replica: str) -> bool:
        """Take a free place at `replica`, where there is one; whether there was. `leave` must follow then."""
        in_flight = self._in_flight.get(replica, 0)
        if in_flight >= self._max_in_flight:
            return False
        self._in_flight[replica] = in_flight + 1
        return True

    def refusal(self, replica: str, *, tenant: str, priority: Priority, within_us: int) -> BackendError | None:
        """What `enter` would raise at once for such a request, without its making; None where it would not."""
        if self.has_room(replica):
            return None
        try:
            line = self._line_in_time(replica, tenant, priority, within_us)
        except BackendError as refused:
            return refused
        return None if line.has_room(tenant, priority) else _overloaded(_TOO_MANY)

    async def enter(
        self, replica: str, *, tenant: str, priority: Priority, within_us: int, work: Callable[[], int]
    ) -> Waited | None:
        """Return when a request may be sent to `replica`: None where it did not have to wait. `leave` must follow.

        `work` is what it is expected to take, in a unit of the backend's (tokens, or items), and is asked only of those
        that have to wait: while there are free places, nothing is to be shared.

        Raises `BackendError` OVERLOADED where too many wait already, where its turn is not expected within `within_us`
        (at once, with when it is), and where it did not come in time.
        """
        if self.enters(replica):
            return None
        line = self._line_in_time(replica, tenant, priority, within_us)
        turn: _Turn = asyncio.get_running_loop().create_future()
        waiter, put_out = line.join(turn, tenant=tenant, priority=priority, work=work())
        if put_out is not None and not put_out.item.done():
            put_out.item.set_result(False)
        try:
            async with asyncio.timeout(within_us / 1e6):
                has_turn = await turn
        except BaseException as ended:
            line.leave(waiter)
            if turn.done() and not turn.cancelled() and turn.result():
                self.leave(replica, waited=waiter, took=0)  # its turn had just come: it is the next one's
            else:
                line.ended(waiter, 0)
            if isinstance(ended, TimeoutError):
                raise _overloaded("its turn did not come in time") from None
            raise
        if not has_turn:
            raise _overloaded(_TOO_MANY)
        return waiter

    def _line_in_time(self, replica: str, tenant: str, priority: Priority, within_us: int) -> WaitingLine[_Turn]:
        """The line of a full server, for one who is likely to have its turn within `within_us`."""
        line = self._lines.get(replica)
        stays = self._stays.get(replica)
        if stays is not None:
            ahead = line.ahead_of(tenant, priority) if line else 0
            wait_us = expected_wait_us(stays, ahead=ahead, max_in_flight=self._max_in_flight)
            if wait_us is not None and wait_us > within_us:
                why = f"its turn is expected in {wait_us / 1e6:.3f} s, and it may wait for {within_us / 1e6:.3f} s"
                raise _overloaded(why, retry_after_us=wait_us)
        if line is None:
            line = self._lines[replica] = WaitingLine(self._max_queue_size)
        return line

    def leave(
        self, replica: str, *, stayed_us: int | None = None, waited: Waited | None = None, took: int | None = None
    ) -> None:
        """A request has been answered, or given up: the next one in line has its place.

        `stayed_us`: how long it was there since its turn; the waits of those that come are foretold from it.
        `waited`, `took`: what `enter` gave it, and the work that it took in the end, where that is known.
        """
        if stayed_us is not None:
            self._remember(replica, stayed_us)
        line = self._lines.get(replica)
        if line is not None and waited is not None:
            line.ended(waited, took)
        while line and (waiter := line.next()) is not None:
            if not waiter.item.done():
                waiter.item.set_result(True)
                return
        left = self._in_flight[replica] - 1
        if left:
            self._in_flight[replica] = left
            return
        del self._in_flight[replica]
        if line is not None:  # an idle server owes nobody
            del self._lines[replica]

    def _remember(self, replica: str, stayed_us: int) -> None:
        stays = self._stays.get(replica)
        if stays is None:
            stays = Stays()
            if len(self._stays) >= MAX_REPLICAS:
                del self._stays[next(iter(self._stays))]
        self._stays[replica] = stays.with_one(stayed_us)


def _overloaded(why: str, *, retry_after_us: int | None = None) -> BackendError:
    return BackendError(Fault(kind=FaultKind.OVERLOADED, message=why, retry_after_us=retry_after_us))
