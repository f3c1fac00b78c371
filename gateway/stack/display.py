"""What `gateway up` shows: a live table on a terminal, plain lines anywhere else."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gateway.stack.parts import Part

WAITING = "waiting"
STARTING = "starting"
READY = "ready"
FAILED = "failed"
STOPPING = "stopping"
STOPPED = "stopped"

_STYLES = {READY: "green", FAILED: "bold red", STOPPED: "dim", WAITING: "dim"}
_BUSY = {STARTING, STOPPING}


@dataclass(slots=True)
class _Line:
    state: str = WAITING
    since: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    note: str = ""


class Display:
    """One line per part: its state and the seconds it took. Usable also outside its `with`."""

    def __init__(self, parts: Sequence[Part], console: Console) -> None:
        self._console = console
        self._titles = {part.name: part.title for part in parts}
        self._lines = {part.name: _Line() for part in parts}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=8)
            self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, name: str, state: str, *, seconds: float | None = None, note: str = "") -> None:
        """A part reached a state; `seconds` says how long it took to get there."""
        self._lines[name] = _Line(state=state, seconds=seconds, note=note)
        if self._live is None and state not in _BUSY:
            took = f" after {seconds:.1f} s" if seconds is not None else ""
            remark = f" ({note})" if note else ""
            self.say(f"{self._titles[name]}: {state}{took}{remark}")

    def say(self, text: str, *, style: str | None = None) -> None:
        """One line, above the table where there is one."""
        self._console.print(Text(text, style=style or ""), soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, line in self._lines.items():
            seconds = line.seconds
            if seconds is None and line.state in _BUSY:
                seconds = time.monotonic() - line.since
            state = (
                Spinner("dots", text=line.state)
                if line.state in _BUSY
                else Text(line.state, style=_STYLES.get(line.state, ""))
            )
            took = "" if seconds is None else f"{seconds:.1f} s"
            table.add_row(
                f"  {self._titles[name]}", state, Text(took, justify="right"), Text(line.note, style="yellow")
            )
        return table
