"""Tables that are data alone: rows are sent as they are and drawn in the browser, so that a refresh moves no focus.

On a narrow screen every row is a card, whose cells bear their column's name.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from nicegui import ui
from nicegui.events import GenericEventArguments

Tone = Literal["good", "warn", "bad", "plain", "busy"]
Row = Mapping[str, Any]
Act = Callable[[str, dict[str, Any]], Awaitable[None]]

_BODY: Final = """
<q-tr :props="props">
  <q-td v-for="col in props.cols" :key="col.name" :props="props" :data-label="col.label" :class="'is-' + col.kind">
    <span v-if="col.kind === 'chips'" class="chips">
      <span v-for="(chip, i) in col.value.list" :key="i" :class="'chip chip-' + chip.tone" :title="chip.title">
        {{ chip.text }}
      </span>
    </span>
    <span v-else-if="col.kind === 'bar' && col.value" class="meter">
      <span class="meter-track" role="meter" aria-valuemin="0" aria-valuemax="100"
        :aria-valuenow="Math.min(100, Math.round(col.value.share * 100))"
        :aria-label="col.label + ': ' + col.value.text">
        <span :class="'meter-fill meter-' + col.value.tone"
          :style="{width: Math.min(100, col.value.share * 100) + '%'}"></span>
      </span>
      <span>{{ col.value.text }}</span>
    </span>
    <span v-else-if="col.kind === 'acts'" class="acts">
      <button v-for="act in col.value.list" :key="act.act" type="button" tabindex="0" :class="'act act-' + act.tone"
        :aria-label="act.label + ': ' + props.row.name"
        @click="() => $parent.$emit('act', {act: act.act, key: props.key})">{{ act.label }}</button>
    </span>
    <span v-else>{{ col.kind === 'bar' ? '-' : col.value }}</span>
  </q-td>
</q-tr>
"""
"""How a row is drawn, by the kinds of its cells."""


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


class Table:
    """A table; every row has a unique `key`, and a `name` that its buttons bear for those who do not see it."""

    def __init__(
        self, columns: Sequence[Column], *, label: str, empty: str = "Nothing here.", on_act: Act | None = None
    ) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        self._on_act = on_act
        shown = [
            {
                "name": column.field,
                "label": column.label,
                "field": column.field,
                "kind": column.kind,
                "align": "right" if column.kind in ("number", "acts") else "left",
                "sortable": column.kind in ("text", "number", "code"),
            }
            for column in columns
        ]
        self.table = ui.table(columns=shown, rows=[], row_key="key", pagination={"rowsPerPage": 0}).classes("folding")
        self.table.props(f'flat hide-pagination no-data-label="{empty}" role=region aria-label="{label}"')
        self.table.add_slot("body", _BODY)
        self.table.on("act", self._clicked)

    def show(self, rows: Sequence[Row]) -> None:
        """Put `rows` in place of those before; nothing is sent where they are the same."""
        new = [{name: _cell(value) for name, value in row.items()} for row in rows]
        self._rows = {str(row["key"]): row for row in new}
        if new != self.table.rows:
            self.table.rows = new

    async def _clicked(self, event: GenericEventArguments) -> None:
        row = self._rows.get(str(event.args["key"]))
        if row is not None and self._on_act is not None:
            await self._on_act(str(event.args["act"]), row)


def _cell(value: object) -> object:
    """A cell as the library takes it: it draws lists of its own accord, so ours are inside of something else."""
    return {"list": value} if isinstance(value, list) else value
