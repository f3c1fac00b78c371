"""How a log is searched: page by page, the newest first, as far as one call may look."""

from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

MAX_PAGE: Final = 500
DEFAULT_PAGE: Final = 100
MAX_SEARCHED: Final = 10_000  # entries that one call looks through; its cursor says where the next goes on

_Entry = TypeVar("_Entry")


class Pages(Protocol[_Entry]):
    """See `admin_ports.AuditLog.page`."""

    def __call__(self, *, before: str, size: int) -> Awaitable[tuple[list[_Entry], str | None]]:
        """The newest first, those before the cursor `before`; and the cursor for those after them."""
        ...


async def search(
    pages: Pages[_Entry],
    takes: Callable[[_Entry], bool] | None,
    *,
    cursor_of: Callable[[_Entry], str],
    before: str,
    limit: int,
) -> tuple[list[_Entry], str | None]:
    """At most `limit` entries that `takes` takes (None: all), and the cursor for those after them.

    There may be fewer and a cursor all the same: so far has been looked.
    """
    found: list[_Entry] = []
    following: str | None = before
    searched = 0
    while len(found) < limit and following is not None and searched < MAX_SEARCHED:
        size = limit if takes is None else MAX_PAGE
        entries, following = await pages(before=following, size=size)
        searched += size
        for entry in entries:
            if takes is not None and not takes(entry):
                continue
            found.append(entry)
            if len(found) == limit and entry is not entries[-1]:
                return found, cursor_of(entry)
    return found, following
