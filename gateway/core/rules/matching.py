"""Which rule takes a request: the rules of a set compiled once, so that a request is held against few of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from gateway.core.rules.rule import Match, Rule, TimeWindow
from gateway.core.types import ANY, InferenceRequest
from gateway.core.values import quick_value

MEMO: Final = 4096
"""Kinds of callers that a table remembers; callers name models themselves, so that there may be any number."""


@quick_value
class Circumstances:
    """What a request does not say itself. Both are asked for only where a rule needs them.

    Attributes:
        now_s: Unix time.
        input_tokens: an estimate of its prompt; None for a task that no LLM can answer.
    """

    now_s: Callable[[], float]
    input_tokens: Callable[[], int | None]


def _unknown_time() -> float:
    return 0.0


NOWHERE: Final = Circumstances(now_s=_unknown_time, input_tokens=lambda: None)
"""For requests of which nothing more is known: in the year 1970, without tokens."""


class _Kind(NamedTuple):
    """What may be matched without looking into a request: the same for all of a caller's."""

    task: str
    tenant: str
    key: str
    model: str
    priority: str


class _Candidates:
    """The rules that a kind of caller may come by, up to the first that takes it whatever its request holds.

    Attributes:
        rules: in their order, each with whether a request has to be looked into for it.
        by_header: the numbers of those that want a header to be one value, by name and value: of many such rules a
            request is held against its own alone.
        others: the numbers of the rest.
    """

    __slots__ = ("by_header", "others", "rules")

    def __init__(self, rules: Sequence[tuple[Rule, bool]]) -> None:
        self.rules = rules
        self.by_header: dict[str, dict[str, list[int]]] = {}
        self.others: list[int] = []
        for number, (rule, _) in enumerate(rules):
            name, value = next(iter(rule.match.headers.items()), ("", ANY))
            if value[-1:] == ANY:
                self.others.append(number)
            else:
                self.by_header.setdefault(name, {}).setdefault(value, []).append(number)

    def of(self, headers: Mapping[str, str]) -> Sequence[int]:
        """The numbers of those that may take a request with these headers, in order."""
        found = self.others
        for name, by_value in self.by_header.items():
            value = headers.get(name)
            if value is not None and value in by_value:
                found = sorted([*found, *by_value[value]])
        return found


class RuleTable:
    """Rules in their order. A kind of caller that came before is held only against the rules that may be its own."""

    __slots__ = ("_memo", "_rules")

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = tuple(rule for rule in rules if rule.enabled)
        self._memo: dict[_Kind, _Candidates] = {}

    def find(self, request: InferenceRequest, at: Circumstances) -> Rule | None:
        """The first enabled rule that takes `request`."""
        caller = request.caller
        kind = _Kind(request.task, caller.tenant, caller.key_id, request.model, request.priority)
        candidates = self._memo.get(kind) or self._remember(kind)
        for number in candidates.of(request.headers):
            rule, is_whole = candidates.rules[number]
            if is_whole or _looks_fit(rule.match, request, at):
                return rule
        return None

    def _remember(self, kind: _Kind) -> _Candidates:
        found: list[tuple[Rule, bool]] = []
        for rule in self._rules:
            if _kind_fault(rule.match, kind) is None:
                is_whole = not _looks_inside(rule.match)
                found.append((rule, is_whole))
                if is_whole:
                    break
        if len(self._memo) >= MEMO:
            self._memo.clear()
        self._memo[kind] = _Candidates(found)
        return self._memo[kind]


def why_not(match: Match, request: InferenceRequest, at: Circumstances) -> str | None:
    """None where `match` takes the request, else the first field that does not fit and what the request has there."""
    caller = request.caller
    kind = _Kind(request.task, caller.tenant, caller.key_id, request.model, request.priority)
    return _kind_fault(match, kind) or next(_inner_faults(match, request, at), None)


def fits(pattern: str, value: str) -> bool:
    """Whether `value` is what `pattern` says: a name, a beginning and `*`, or `*`."""
    return value.startswith(pattern[:-1]) if pattern[-1:] == ANY else value == pattern


def is_within(window: TimeWindow, now_s: float) -> bool:
    """Whether it is that time now."""
    here = datetime.fromtimestamp(now_s, ZoneInfo(window.timezone))
    minute, day = here.hour * 60 + here.minute, here.weekday()
    if window.from_min < window.to_min:
        return day in window.days and window.from_min <= minute < window.to_min
    if minute >= window.from_min:
        return day in window.days
    return minute < window.to_min and (here - timedelta(days=1)).weekday() in window.days


def _kind_fault(match: Match, kind: _Kind) -> str | None:
    asked: Mapping[str, str] = {
        "task": match.task,
        "tenant": match.tenant,
        "key": match.key,
        "model": match.model,
        "priority": match.priority,
    }
    for name, value in zip(kind._fields, kind, strict=True):
        if not fits(asked[name], value):
            return f"match.{name} is '{asked[name]}', the request's is '{value}'"
    return None


def _looks_inside(match: Match) -> bool:
    return bool(match.headers or match.times or _bounds(match))


def _bounds(match: Match) -> int:
    return match.min_input_tokens or match.max_input_tokens or match.min_input_bytes or match.max_input_bytes


def _looks_fit(match: Match, request: InferenceRequest, at: Circumstances) -> bool:
    """The same as `_inner_faults`, without words."""
    for name, pattern in match.headers.items():
        value = request.headers.get(name)
        if value is None or not fits(pattern, value):
            return False
    size = request.input_bytes
    if size < match.min_input_bytes or (match.max_input_bytes and size > match.max_input_bytes):
        return False
    needs_more = match.times or match.min_input_tokens or match.max_input_tokens
    return not needs_more or next(_inner_faults(match, request, at), None) is None


def _inner_faults(match: Match, request: InferenceRequest, at: Circumstances) -> Iterator[str]:
    for name, pattern in match.headers.items():
        value = request.headers.get(name)
        if value is None:
            yield f"match.headers.{name} is '{pattern}', the request has none"
        elif not fits(pattern, value):
            yield f"match.headers.{name} is '{pattern}', the request's is another"
    if match.min_input_bytes or match.max_input_bytes:
        size = request.input_bytes
        yield from _outside("bytes", size, match.min_input_bytes, match.max_input_bytes)
    if match.min_input_tokens or match.max_input_tokens:
        tokens = at.input_tokens()
        if tokens is None:
            yield "match has a bound of input tokens, and no LLM can answer the task"
        else:
            yield from _outside("tokens", tokens, match.min_input_tokens, match.max_input_tokens)
    if match.times and not any(is_within(window, at.now_s()) for window in match.times):
        yield "match.times: it is none of these times"


def _outside(unit: str, size: int, least: int, most: int) -> Iterator[str]:
    if size < least:
        yield f"match.min_input_{unit} is {least}, the request has {size}"
    if most and size > most:
        yield f"match.max_input_{unit} is {most}, the request has {size}"
