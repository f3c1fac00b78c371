"""What all commands of the control plane show in the same words: tables, times, how far a change has got, questions."""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod, OverflowMethod, RenderableType
from rich.containers import Lines
from rich.table import Table
from rich.text import Text

from gateway.cli.admin_client import EXIT_REFUSED, EXIT_USAGE, Failure
from gateway.cli.terminal import say, visible

NARROWEST: Final = 80  # columns
ENDLESS: Final = 1000  # what goes into a file or another program is not folded: names can be looked for in it
_WORD: Final = re.compile(r"\S+\s*")
_AFTER_SIGN: Final = re.compile(r"(?<=[/@:_,-])(?=\S)|(?<=\.)(?=[^\s\d])")  # not within 4.1
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_CONTROLS: Final = re.compile("[\x7f-\x9f]")
_SPAN: Final = re.compile(r"(?:\d{1,9}[smhd])+")


def show_json(document: object) -> None:
    """As it is, for scripts; what JSON would leave to a terminal to obey is escaped."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    typer.echo(_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def examples(*lines: str) -> str:
    """The end of a command's help: what to type, a line each."""
    return "\n\n".join(("Try:", *lines))


def table(*headings: str, title: str = "", right: Iterable[str] = (), whole: Iterable[str] = ()) -> Table:
    """An empty table; names in it are folded, figures never.

    `right`: the headings over figures; `whole`: those over what is typed or read as a whole, such as ids.
    """
    made = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        is_figure = heading in right
        is_whole = is_figure or heading in whole
        made.add_column(heading, overflow="fold", justify="right" if is_figure else "left", no_wrap=is_whole)
    return made


def add(to: Table, *cells: object, style: str | None = None) -> None:
    """A row of plain texts; None and empty ones are `-`."""
    to.add_row(*(_Cell(visible("-" if cell in (None, "") else str(cell))) for cell in cells), style=style)


def show(shown: RenderableType) -> None:
    """On the terminal, as wide as it is; one that is narrower than any table breaks the lines itself."""
    if isinstance(shown, str):  # as it is: in Rich's own texts brackets mean something
        say(shown)
        return
    console = Console()
    is_endless = not console.is_terminal and "COLUMNS" not in os.environ
    console = Console(width=ENDLESS if is_endless else max(console.width, NARROWEST))
    console.print(shown, soft_wrap=isinstance(shown, Text))  # lines of text are the terminal's to break


def folded(text: str, width: int) -> str:
    """Lines of `width` at most where words allow it: a word that is longer than a line is broken after its signs."""
    lines: list[str] = []
    for line in text.split("\n"):
        now = ""
        for word in _WORD.findall(line):
            fits = cell_len(word.rstrip()) <= width
            for piece in (word,) if fits else _AFTER_SIGN.split(word):
                if now and cell_len((now + piece).rstrip()) > width:
                    lines.append(now.rstrip())
                    now = ""
                now += piece
        lines.append(now.rstrip())
    return "\n".join(lines)


class _Cell(Text):
    """A text that is broken as `folded` does it; Rich alone would break `text_embedding` wherever the line ends."""

    def wrap(
        self,
        console: Console,
        width: int,
        *,
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        tab_size: int = 8,
        no_wrap: bool | None = None,
    ) -> Lines:
        """As Rich's own."""
        plain = self.plain if no_wrap else folded(self.plain, width)
        return Text(plain, style=self.style).wrap(
            console, width, justify=justify, overflow=overflow, tab_size=tab_size, no_wrap=no_wrap
        )


def fields(named: Mapping[str, object]) -> Table:
    """Names and values below each other; what is None or empty is left out."""
    made = Table(show_header=False, box=None, pad_edge=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in named.items():
        if value not in (None, "", [], {}):
            made.add_row(Text(visible(name)), _Cell(visible(str(value))))
    return made


def seconds_of(span: str, option: str) -> int:
    """`90s`, `10m`, `1h30m`, `2d` in seconds."""
    if not _SPAN.fullmatch(span):
        raise Failure(f"{option} {span}: write a time as 90s, 10m, 1h30m or 2d", EXIT_USAGE)
    return sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([smhd])", span))


def span_words(seconds: float) -> str:
    """`5400` as `1h 30m`: the two largest units that say something."""
    left, words = max(0, round(seconds)), []
    for unit, size in reversed(_UNITS.items()):
        number, left = divmod(left, size)
        if number:
            words.append(f"{number}{unit}")
    return " ".join(words[:2]) or "0s"


def clock(at: str | None) -> str:
    """An instant of the control plane in short, in UTC as everywhere; `-` for none."""
    try:
        return f"{datetime.fromisoformat(at).astimezone(UTC):%Y-%m-%d %H:%M:%S}" if at else "-"
    except ValueError:
        return str(at)


def when(at: str | float | None, now: datetime | None = None) -> str:
    """`clock` or `instant` without what goes without saying: of today the time alone, of other days no seconds."""
    said = clock(at) if at is None or isinstance(at, str) else instant(at)
    today = f"{now or datetime.now(UTC):%Y-%m-%d} "
    return said.removeprefix(today) if said.startswith(today) else said[: len("2026-01-31 22:00")]


def instant(at_ms: float) -> str:
    """Unix milliseconds as `clock` has it."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def figure(value: float | None, unit: str = "", digits: int = 1) -> str:
    """A number with thousands marked; `-` for none."""
    if value is None:
        return "-"
    number = f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"
    return f"{number} {unit}".rstrip()


def percent(ratio: float | None) -> str:
    """`0.0125` as `1.25 %`; `-` for none."""
    return "-" if ratio is None else f"{ratio * 100:.3g} %"


def place(target: Mapping[str, Any]) -> str:
    """Where a target leads: `backend/model:version`."""
    version = f":{target['version']}" if target.get("version") else ""
    return f"{target['backend']}/{target['model']}{version}"


def is_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


def confirm(question: str, *, yes: bool) -> None:
    """Ask, unless `yes`; no ends the command and changes nothing, and so does it where nobody can be asked."""
    if yes:
        return
    if not is_terminal():
        raise Failure(f"nothing was changed: nobody can be asked here ({question}); say --yes", EXIT_USAGE)
    if not typer.confirm(question, err=True):
        raise Failure("nothing was changed", EXIT_REFUSED)


def warn(document: Mapping[str, Any]) -> None:
    """What to mind, on stderr."""
    for warning in document.get("warnings") or ():
        say(f"warning: {warning}", err=True)


def finish(changed: Mapping[str, Any], saved: str, *, quiet: bool = False) -> None:
    """Say how far a change has got; an incomplete one is a failure that scripts can see.

    `saved` is what was: `saved as revision 7`. `quiet`: say only what went wrong.
    """
    workers, of, ms = (changed["applied"][key] for key in ("workers", "of", "ms"))
    if workers < of:
        raise Failure(f"{saved}, but applied on only {workers}/{of} workers after {ms} ms", EXIT_REFUSED)
    if not quiet:
        words = f"applied on {workers}/{of} workers in {ms} ms" if of else "no worker is running"
        say(f"{saved}; {words}")
