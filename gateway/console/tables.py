"""Tables that are data alone: rows are sent as they are and drawn in the browser, so that a refresh moves no focus.

On a narrow screen every row is a card, whose cells bear their column's name.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nicegui import ui
from nicegui.events import GenericEventArguments

Tone = Literal["good", "warn", "bad", "plain", "busy"]
Row = Mapping[str, Any]
Act = Callable[[str, dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. Cells are texts; `chips`, a `bar` or `acts` (buttons), as the functions below make them."""

    field: str
    label: str
    kind: Literal["text", "number", "code", "chips", "bar", "acts"] = "text"


def chip(text: str, tone: Tone = "plain", title: str = "") -> dict[str, str]:
    """A word that stands out."""
    return {"text": text, "tone": tone, "title": title}


def bar(share: float, text: str, tone: Tone = "plain") -> dict[str, Any]:
    """A share (0 to 1) as a bar."""
    return {"share": share, "text": text, "tone": tone}


def act(name: str, label: str, *, is_destructive: bool = False) -> dict[str, str]:
    """A button of a row."""
    return {"act": name, "label": label, "tone": "danger" if is_destructive else "plain"}


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
