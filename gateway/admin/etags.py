"""Revisions on the wire: an answer's `ETag`, and the `If-Match` of a change that was made from it."""

import re
from typing import Annotated, Final

from fastapi import Header, Response

from gateway.core.errors import MalformedRequest

IfMatch = Annotated[str | None, Header(description="the revision that the change was made from")]
_ETAG: Final = re.compile(r'(?:W/)?"(\d{1,15})"|(\d{1,15})')


def revision_of(if_match: str | None) -> int | None:
    """The revision in an `If-Match` header, quoted as an ETag or bare; None where it was not sent.

    Raises `MalformedRequest` for anything else.
    """
    if if_match is None:
        return None
    found = _ETAG.fullmatch(if_match.strip())
    if found is None:
        raise MalformedRequest("If-Match must be a revision number")
    return int(found[1] or found[2])


def set_etag(response: Response, revision: int) -> None:
    """Tell the revision as the ETag."""
    response.headers["etag"] = f'"{revision}"'
