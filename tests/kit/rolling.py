"""What guards and rollouts are tested with: figures that a test makes up, and a clock that it sets."""

import time
from collections.abc import Mapping
from typing import Any

from gateway.core.errors import RulesUnavailable
from gateway.core.watching.figures import Figures, Series, Tally, step_of

TASK = "embed"


class Clock:
    """Unix milliseconds that go on when a test says so."""

    def __init__(self) -> None:
        self.now_ms = round(time.time() * 1000)

    def __call__(self) -> int:
        return self.now_ms

    def forward(self, seconds: float) -> None:
        self.now_ms += round(seconds * 1000)


class MadeFigures:
    """An `admin_ports.FigureSource` of what `add` was told."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: dict[int, dict[Series, Tally]] = {}
        self.reads: list[tuple[int, int]] = []
        self.is_away = False

    def add(self, place: str, count: int, *, rule: str = "r", failed: int = 0, ms: int = 10, **fields: Any) -> None:
        """So many requests of now at `backend/model:version`, of which some failed."""
        backend, _, rest = place.partition("/")
        model, _, version = rest.partition(":")
        good = count - failed
        tally = Tally(requests=good, attempts=count, failed_attempts=failed, whole={step_of(ms * 1000): good}, **fields)
        second = self.seconds.setdefault(self.clock.now_ms // 1000, {})
        second.setdefault(Series(TASK, rule, backend, model, version), Tally()).add(tally)

    async def read(self, since_s: int, until_s: int) -> Mapping[int, Figures]:
        if self.is_away:
            raise RulesUnavailable("no figures")
        self.reads.append((since_s, until_s))
        return {second: figures for second, figures in self.seconds.items() if since_s <= second < until_s}
