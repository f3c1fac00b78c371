"""What a change of the rules would do, shown before it is made: the API's dry run over the last requests."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from nicegui import ui

from gateway.console import words
from gateway.console.client import Api, ApiError
from gateway.console.dialogs import texts
from gateway.ports import JsonObject

PAUSE_S: Final = 0.3  # a slider that moves is waited for
LAST: Final = 1000
MOVES: Final = 6
Rules = Sequence[JsonObject]


class Effect:
    """A box that says it in words. `rules` are those that would be, or what gives them."""

    def __init__(self, api: Api, rules: Rules | Callable[[], Rules]) -> None:
        self._api = api
        self._rules = rules
        self._asking: asyncio.Task[None] | None = None
        self._box = ui.element("div").classes("preview").props('role=status aria-label="Effect"')
        self._box.on("vue:unmounted", self._stop)

    def look(self) -> None:
        """Ask anew, after a moment, what it would do; an older question is given up."""
        self._stop()
        self._asking = asyncio.create_task(self._look())

    def _stop(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    async def _look(self) -> None:
        await asyncio.sleep(PAUSE_S)
        rules = self._rules() if callable(self._rules) else self._rules
        try:
            found = await self._api.change("POST", "/rules/dry-run", body={"rules": list(rules), "last": LAST})
            lines = _in_words(found)
        except ApiError as error:
            lines = [error.detail]
        if self._box.is_deleted:
            return
        self._box.clear()
        with self._box:
            texts(lines)


def _in_words(found: JsonObject) -> list[str]:
    if not found["requests"]:
        return ["No requests are recorded yet, so there is nothing to tell the effect from."]
    lines = [f"Of the last {found['requests']:,} requests {found['moved']:,.0f} would go elsewhere."]
    lines += [f"{one['requests']:,.0f} from {one['from']} to {one['to']}" for one in found["moves"][:MOVES]]
    more = found["refused_after"] - found["refused_before"]
    if more > 0:
        lines.append(f"{more:,} more would be refused: no rule would take them.")
    lines += [f"Note: {text}" for text in found.get("warnings", [])]
    return [words.short(line, 200) for line in lines]
