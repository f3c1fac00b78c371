"""Digests by which two requests are found to be the same."""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import orjson

_SIZE: Final = 32  # bytes: nobody can make two requests with one digest, and so be given the answer of another
_OPTIONS: Final = orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY


def digest(*parts: bytes | str) -> str:
    """Of `parts` and their borders, in hexadecimal."""
    found = hashlib.blake2b(digest_size=_SIZE)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(b"%d:" % len(data))
        found.update(data)
    return found.hexdigest()


def canonical(value: Any) -> bytes | None:
    """The same bytes for values that say the same, whatever the order of their mappings.

    Takes what JSON has, dataclasses, numpy arrays and bytes; None for anything else, and for what is nested more than
    250 deep.
    """
    try:
        return orjson.dumps(value, default=_written, option=_OPTIONS)
    except orjson.JSONEncodeError:
        return None


def _written(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"\0bytes": hashlib.blake2b(value, digest_size=_SIZE).hexdigest()}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(type(value).__name__)
