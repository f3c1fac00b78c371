"""Tables that are data alone: rows are sent as they are and drawn in the browser, so that a refresh moves no focus.

On a narrow screen every row is a card, whose cells bear their column's name.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nicegui import ui
from nicegui.events import GenericEventArguments

Tone = Literal["good", "warn", "bad", "plain", "busy", "off"]
Row = Mapping[str, Any]
Act = Callable[[str, dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. Cells are texts, a `time` of `words.moment`, `chips`, a `bar` or `acts` of the functions below."""

    field: str
    label: str
    kind: Literal["text", "number", "code", "time", "chips", "bar", "acts"] = "text"


def chip(text: str, tone: Tone = "plain", title: str = "") -> dict[str, str]:
    """A word that stands out."""
    return {"text": text, "tone": tone, "title": title}


def bar(share: float, text: str, tone: Tone = "plain") -> dict[str, Any]:
    """A share (0 to 1) as a bar."""
    return {"share": share, "text": text, "tone": tone}


def act(name: str, label: str, *, is_destructive: bool = False) -> dict[str, str]:
    """A button of a row."""
    return {"act": name, "label": label, "tone": "danger" if is_destructive else "plain"}


def having(rows: Sequence[Row], text: str) -> Sequence[Row]:
    """The rows that have all words of `text` in what they show, however they are written."""
    wanted = text.casefold().split()
    return [row for row in rows if all(word in _shown(row) for word in wanted)] if wanted else rows


def _shown(row: Row) -> str:
    cells = (cell for name, cell in row.items() if name not in ("key", "acts") and cell)
    texts = (one["text"] if isinstance(one, dict) else one for cell in cells for one in _parts(cell))
    return " ".join(str(text) for text in texts).casefold()


def _parts(cell: Any) -> Sequence[Any]:
    return cell if isinstance(cell, list) else [cell]


class Table(ui.element, component="table.js"):
    """A table; every row has a unique `key`, and a `name` that its buttons bear for those who do not see it."""

    def __init__(
        self, columns: Sequence[Column], *, label: str, empty: str = "Nothing here.", on_act: Act | None = None
    ) -> None:
        super().__init__()
        self._on_act = on_act
        self._props |= {"columns": [asdict(column) for column in columns], "rows": [], "label": label, "empty": empty}
        self.on("act", self._clicked)

    def show(self, rows: Sequence[Row]) -> None:
        """Put `rows` in place of those before; nothing is sent where they are the same."""
        if rows != self._props["rows"]:
            self._props["rows"] = list(rows)

    async def _clicked(self, event: GenericEventArguments) -> None:
        row = next((one for one in self._props["rows"] if one["key"] == event.args["key"]), None)
        if row is not None and self._on_act is not None:
            await self._on_act(str(event.args["act"]), row)
