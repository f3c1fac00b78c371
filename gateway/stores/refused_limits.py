"""Limits that have just refused, remembered for a moment: a flood of one caller's requests asks Redis no more of them.

Only limits of requests refuse from memory: nothing is given back of them, so what they have refused once they refuse
until the instant that their counter tells. What others have taken meanwhile only puts that off. Tokens, money and
places are given back, and are always asked for.

Nothing is believed for longer than `BELIEVED_S`: whoever sets counters back by hand, or a Redis that has lost them, is
heard of within that time. A limit that is changed has another counter, of which nothing is remembered.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from gateway.core.admissions import Ask, Reply, row_of
from gateway.core.rate_limit import Take, verdict
from gateway.core.types import Verdict

BELIEVED_S: Final = 0.25
MOST: Final = 1000  # counters that are remembered; beyond it all is forgotten


class _Refused(NamedTuple):
    """One refusal. Redis's clock said `now_us` between the instants `asked_s` and `answered_s` of ours.

    Attributes:
        values: of each counter that was asked for, what it said without the request, and the end of its period.
    """

    now_us: int
    asked_s: float
    answered_s: float
    values: dict[str, tuple[int, int]]


class RefusedLimits:
    """Those of one worker. `now_s`: the event loop's clock, but not as of the beginning of its turn."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self.kept: dict[tuple[str, str], _Refused] = {}  # empty, but while there are refusals

    def remember(self, ask: Ask, reply: Reply, asked_s: float) -> None:
        """Redis has refused what it was asked at `asked_s`, by the event loop's clock, or later."""
        spent = [
            take.key
            for take, row in zip(ask.takes, reply.rows, strict=True)
            if not row.passed and take.limit.kind == "requests"
        ]
        if not spent:
            return
        values = {
            take.key: (row.value - take.cost if row.passed else row.value, row.until_us)
            for take, row in zip(ask.takes, reply.rows, strict=True)
        }
        refused = _Refused(reply.now_us, asked_s, self._now_s(), values)
        for key in spent:
            if len(self.kept) >= MOST:
                self.kept.clear()
            self.kept[ask.owner, key] = refused

    def verdict(self, ask: Ask) -> Verdict | None:
        """What Redis would say to a request that it would refuse for certain; None where it has to be asked."""
        for take in ask.takes:
            name = (ask.owner, take.key)
            refused = self.kept.get(name)
            if refused is None:
                continue
            now_s = self._now_s()
            latest_us = refused.now_us + math.ceil((now_s - refused.asked_s) * 1e6)  # that Redis's clock can be by now
            value, _ = refused.values[take.key]
            if now_s - refused.asked_s <= BELIEVED_S and value + take.cost > latest_us + take.bound:
                return _verdict(refused, ask.takes, now_s)
            del self.kept[name]
        return None


def _verdict(refused: _Refused, takes: Sequence[Take], now_s: float) -> Verdict | None:
    """By the earliest that Redis's clock can be, so that nobody is told to come back too early."""
    now_us = refused.now_us + int((now_s - refused.answered_s) * 1e6)
    rows = []
    for take in takes:
        known = refused.values.get(take.key)
        if known is None:
            return None
        value, until_us = known
        if take.form == "budget" and until_us <= now_us:
            return None
        rows.append(row_of(take, max(now_us, value) if take.form == "rate" else value, until_us, now_us))
    return verdict(takes, rows, now_us=now_us, admitted=False)
