"""The figures of some rules, second by second: each second is read until it cannot change any more, and then kept."""

from collections.abc import Collection
from typing import Final

from gateway.admin_ports import FigureSource
from gateway.core.rollouts.guarding import of_rules
from gateway.core.watching.figures import Figures, Series, Tally

SETTLED_S: Final = 10
"""Workers write several times a second, and write nothing that is older than a few seconds."""
AHEAD_S: Final = 2
"""Workers' clocks may be ahead of ours."""
AT_ONCE_S: Final = 300
"""An hour in one piece would keep everything else waiting for more than a second."""


class RecentFigures:
    """What one look after another needs, with few seconds read for each of them."""

    def __init__(self, source: FigureSource) -> None:
        self._source = source
        self._rules: frozenset[str] = frozenset()
        self._seconds: dict[int, Figures] = {}
        self._from_s: int | None = None
        self._until_s = 0

    async def read(self, rules: Collection[str], *, since_s: int, now_s: int) -> None:
        """Know the figures of these rules from the Unix second `since_s` to now. Raises `RulesUnavailable`."""
        known = self._from_s is not None and self._from_s <= since_s and self._rules.issuperset(rules)
        if not known:
            self._rules, self._seconds, self._from_s = frozenset(rules), {}, None
        first_s = max(since_s, self._until_s - SETTLED_S) if known else since_s
        until_s = now_s + AHEAD_S
        seconds = {second: figures for second, figures in self._seconds.items() if since_s <= second < first_s}
        for start_s in range(first_s, until_s, AT_ONCE_S):
            found = await self._source.read(start_s, min(start_s + AT_ONCE_S, until_s))
            seconds |= {second: of_rules(figures, self._rules) for second, figures in found.items()}
        self._seconds, self._from_s, self._until_s = seconds, since_s, until_s

    def since(self, since_s: int) -> Figures:
        """What ended in that second or later."""
        found: dict[Series, Tally] = {}
        for second, figures in self._seconds.items():
            if second >= since_s:
                for series, tally in figures.items():
                    found.setdefault(series, Tally()).add(tally)
        return found
