"""Counts the bytecode instructions that one thread runs, function by function.

Time and the processor's own counters tell something else in every run; an instruction of Python's is executed or not.
What libraries do in C is one instruction to whoever calls them.
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, Self

ROOT: Final = Path(__file__).resolve().parents[2]
BY_THE_CLOCK: Final = frozenset({"Histogram.observe"})
"""Functions that look through the more buckets the longer something took; what they call is counted."""
_LIBRARY: Final = re.compile(r".*(?:/site-packages|/lib/python3\.\d+)/")


class _Function:
    """The local trace function of one code object's frames."""

    __slots__ = ("code", "count")

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.count = 0

    def __call__(self, _frame: FrameType, event: str, _argument: object) -> Self:
        if event == "opcode":
            self.count += 1
        return self


class Meter:
    """Functions of `unseen` files, and of this one, are not counted; what they call is."""

    def __init__(self, *unseen: str) -> None:
        self._unseen = frozenset((__file__, *unseen))
        self._functions: dict[int, _Function] = {}

    def begin(self) -> None:
        """Count from now on what the calling thread runs, until it says `sys.settrace(None)`."""
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, _event: str, _argument: object) -> Any:
        """The trace function; also called where a coroutine goes on."""
        code = frame.f_code
        if code.co_filename in self._unseen or code.co_qualname in BY_THE_CLOCK:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        found = self._functions.get(id(code))  # a code object's own hash is made of all that is in it, each time
        if found is None:
            found = self._functions[id(code)] = _Function(code)
        return found

    @property
    def total(self) -> int:
        """Of all functions so far; for threads that are not counted themselves."""
        return sum(function.count for function in list(self._functions.values()))

    def reading(self) -> Counter[str]:
        """So far, by file, line and name; any thread may ask."""
        tracing = sys.gettrace()
        sys.settrace(None)
        counts: Counter[str] = Counter()
        for function in list(self._functions.values()):
            counts[_where(function.code)] += function.count
        sys.settrace(tracing)
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one request: its instructions, and those of each function, the dearest first.

    `garbage`: objects that it leaves in cycles, which only a search for garbage frees.
    """

    instructions: int
    functions: Mapping[str, int]
    garbage: int = 0


def cost_of(readings: Sequence[Counter[str]]) -> Cost:
    """What requests have in common, by readings that were taken before the first, and after each of them.

    Of each function the lower quartile: timers run beside some requests, beside most where the machine is busy. What
    fewer than three quarters of all requests need is not seen.
    """
    spent = [after - before for before, after in pairwise(readings)]
    usual = Counter({name: sorted(one[name] for one in spent)[len(spent) // 4] for name in readings[-1]})
    return Cost(instructions=usual.total(), functions={name: count for name, count in usual.most_common() if count})


def _where(code: CodeType) -> str:
    path = _LIBRARY.sub("", code.co_filename.removeprefix(f"{ROOT}/"))
    return f"{path}:{code.co_firstlineno} {code.co_qualname}"
