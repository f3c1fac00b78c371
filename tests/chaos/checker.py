"""Replays what clients wrote down and says what must not have happened. Pure: no clock, no files, no gateway."""

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.chaos.allowed import GRACE_S, allowed
from tests.chaos.history import Ended, Execution, History, Limit, Sent, Struck

TIMEOUT_S: Final = 8.0
"""Of every task: after it, and `GRACE_S`, nothing may still be without an end."""
MARGIN_S: Final = 2.0
"""How much longer than a fault of Redis a worker may decide alone: it asks once a second whether Redis is back."""
WORKERS: Final = 2
STRETCH_S: Final = 60.0
"""The longest stretch of time whose limit is looked at: what is too much in a longer one is so in one of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that must not be. `rule` is the property that it breaks."""

    rule: str
    text: str


def check(history: History) -> list[Finding]:
    """All that is wrong with a run."""
    findings = list(_one_end(history))
    for sent, ended in history.pairs():
        findings += _right(sent, ended)
        findings += _honest(sent, ended, history.struck)
        findings += _in_time(sent, ended, history.struck)
    return [*findings, *_ordered(history), *_limited(history)]


def outcomes(history: History) -> dict[str, Counter[str]]:
    """How many of each kind ended how: for the report."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for sent, ended in history.pairs():
        found[sent.kind]["ok" if ended.is_success else name_of(ended)] += 1
    return dict(found)


def name_of(ended: Ended) -> str:
    """Of an end that is no success: the code, or what happened to the connection."""
    return ended.code or (str(ended.status) if ended.how == "answered" else ended.how)


# --- one request -----------------------------------------------------------------------------------------


def _one_end(history: History) -> Iterator[Finding]:
    """Each request has exactly one end, and each end a request."""
    sent = Counter(one.id for one in history.sent)
    ended = Counter(one.id for one in history.ended)
    for name in sorted(sent.keys() | ended.keys()):
        if (sent[name], ended[name]) != (1, 1):
            yield Finding(rule="one end", text=f"{name} was sent {sent[name]} times and ended {ended[name]} times")


def _right(sent: Sent, ended: Ended) -> Iterator[Finding]:
    """A success is the known answer."""
    if ended.is_success and ended.answer != ended.expected:
        text = f"{_words(sent, ended)}: {ended.answer!r} where {ended.expected!r} is right"
        yield Finding(rule="right answers", text=text)


def _honest(sent: Sent, ended: Ended, struck: Sequence[Struck]) -> Iterator[Finding]:
    """A failure is one that a fault of its time excuses."""
    if ended.is_success:
        return
    if name_of(ended) not in allowed(sent, ended, struck):
        met = [one.name for one in struck if one.began <= ended.at and sent.at <= one.healed + GRACE_S]
        text = f"{_words(sent, ended)} {name_of(ended)}, with {', '.join(met) or 'no fault'} at its time"
        yield Finding(rule="errors of the closed list", text=text)


def _in_time(sent: Sent, ended: Ended, struck: Sequence[Struck]) -> Iterator[Finding]:
    """Nothing is stuck once its time is up and all faults that it has met are healed."""
    met = [one.healed for one in struck if one.began <= ended.at and sent.at <= one.healed]
    until = max([sent.at + TIMEOUT_S, *met]) + GRACE_S
    if ended.at > until or ended.how == "silent":
        excused = ended.how == "silent" and "silent" in allowed(sent, ended, struck)
        if not excused:
            yield Finding(rule="nothing stuck", text=f"{_words(sent, ended)} after {ended.at - sent.at:.1f} s")


def _words(sent: Sent, ended: Ended) -> str:
    return f"{sent.id} ({sent.kind}) at {sent.at:.2f} {ended.how} {ended.status}"


# --- order -----------------------------------------------------------------------------------------------


def _ordered(history: History) -> Iterator[Finding]:
    lines: dict[str, list[tuple[Sent, Ended]]] = defaultdict(list)
    for sent, ended in history.pairs():
        if sent.order_key and ended.ticket and ended.is_success:
            lines[sent.order_key].append((sent, ended))
    works = {one.id: one for one in history.executions}
    for line in lines.values():
        line.sort(key=lambda pair: pair[1].ticket)
        for before, after in itertools.pairwise(line):
            yield from _two(before, after, works)


def _two(before: tuple[Sent, Ended], after: tuple[Sent, Ended], works: dict[str, Execution]) -> Iterator[Finding]:
    """Two successes under one ordering key, by their tickets."""
    (sent, ended), (sent_after, ended_after) = before, after
    both = f"{sent.id} with ticket {ended.ticket} and {sent_after.id} with {ended_after.ticket}"
    if ended.ticket == ended_after.ticket:
        yield Finding(rule="order", text=f"one ticket for two: {both}")
    if sent.at > ended_after.at:
        yield Finding(rule="order", text=f"the later ticket was answered before the earlier one was asked for: {both}")
    if sent.kind == "serial":
        first, second = works.get(ended.execution), works.get(ended_after.execution)
        if first is None or second is None:
            yield Finding(rule="order", text=f"an answer that no execution gave: {both}")
        elif first.ended > second.began:
            yield Finding(rule="order", text=f"executed at the same time, or the wrong way round: {both}")
    elif ended.last > ended_after.first:
        yield Finding(rule="order", text=f"answered the wrong way round: {both}")


# --- limits ----------------------------------------------------------------------------------------------


def _limited(history: History) -> Iterator[Finding]:
    by_key: dict[str, list[tuple[Sent, Ended]]] = defaultdict(list)
    for sent, ended in history.pairs():
        if sent.key in history.limits and ended.status == 200:
            by_key[sent.key].append((sent, ended))
    for key, pairs in by_key.items():
        limit = history.limits[key]
        if limit.kind == "places":
            yield from _places(key, limit, pairs, history)
        else:
            yield from _rate(key, limit, pairs, history.struck)


def _rate(key: str, limit: Limit, pairs: Sequence[tuple[Sent, Ended]], struck: Sequence[Struck]) -> Iterator[Finding]:
    """In no stretch of time was more let through than the burst, what came back in it, and the workers' own shares.

    A request is admitted between its sending and its end, so those that lie whole within a stretch are counted.
    """
    ends = sorted(pairs, key=lambda pair: pair[1].at)
    times = [ended.at for _, ended in ends]
    for began in sorted({sent.at for sent, _ in pairs}):
        used = 0
        stretch = slice(bisect_left(times, began), bisect_right(times, began + STRETCH_S))
        for sent, ended in ends[stretch]:
            if sent.at < began:
                continue
            used += ended.tokens if limit.kind == "tokens" else 1
            most = _most(limit, began, ended.at, struck)
            if used > most:
                text = f"{key}: {used} {limit.kind} within {ended.at - began:.2f} s, where {most:.1f} is the most"
                yield Finding(rule="limits", text=text)
                return


def _most(limit: Limit, began: float, until: float, struck: Sequence[Struck]) -> float:
    """What a limit lets through from `began` to `until`, with what workers give alone while Redis is away."""
    rate = limit.amount / limit.per_s
    most = limit.burst + rate * (until - began)
    for one in struck:
        if one.part != "redis" or one.healed + MARGIN_S < began or one.began > until:
            continue
        lasted = min(until, one.healed + MARGIN_S) - max(began, one.began)
        # From full counters; a worker that was started meanwhile brings its share of them along.
        newcomers = [other for other in struck if other.part == "worker" and other.action in {"kill", "restart"}]
        beside = sum(
            other.began <= one.healed + MARGIN_S and other.healed + GRACE_S >= one.began for other in newcomers
        )
        most += (limit.burst + rate * lasted) * (1 + beside / WORKERS)
    return most


def _places(key: str, limit: Limit, pairs: Sequence[tuple[Sent, Ended]], history: History) -> Iterator[Finding]:
    """No more executions at once than there are places; while Redis is away, as many again by the workers' shares."""
    answered = {ended.execution for _, ended in pairs if ended.is_success}
    works = [one for one in history.executions if one.id in answered]
    changes = sorted([(one.began, 1) for one in works] + [(one.ended, -1) for one in works])
    running = 0
    for at, change in changes:
        running += change
        away = [one for one in history.struck if one.part == "redis" and one.began <= at <= one.healed + GRACE_S]
        most = limit.amount * (2 if away else 1)
        if running > most:
            yield Finding(rule="limits", text=f"{key}: {running} executions at once, where {most} is the most")
            return
