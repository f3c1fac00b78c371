"""JSON as this protocol has it: strict, except for the bare words NaN and Infinity, as in Triton's server. Pure."""

import json
import math
from typing import Any, Final

import orjson

from local_runtime.errors import invalid
from local_runtime.protocol.error_texts import safe_text

# Lists and objects, and what looks like them within strings. So many pairs of numbers are read in 0.25 s (0.4 s with a
# NaN among them) on one core of 2.5 GHz, during which nothing else is answered. Flat lists of numbers cost a tenth.
MAX_CONTAINERS: Final = 500_000
# The same of members' names, and of values: a 32 MiB body has fewer numbers that are worth their digits.
MAX_NAMES: Final = 500_000
MAX_VALUES: Final = 4_000_000
_BOUNDS: Final = ((b"[{", MAX_CONTAINERS), (b":", MAX_NAMES), (b",", MAX_VALUES))
_MIN_INT64 = -(2**63)
_MAX_UINT64 = 2**64 - 1


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object; INVALID_ARG for anything else, or too many parts. Bare NaN and Infinity are numbers."""
    for marks, most in _BOUNDS if len(body) > MAX_CONTAINERS else ():
        if sum(body.count(mark) for mark in marks) > most:
            shown = " and ".join(marks.decode())
            raise invalid(f"failed to parse the request JSON buffer: it has more than {most} of the characters {shown}")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        document = _parse_non_finite(body, error)
    if not isinstance(document, dict):
        raise invalid("failed to parse the request JSON buffer: the document is not an object")
    return document


def dump(document: Any) -> bytes:
    """A document as JSON, arrays (one-dimensional) and NaN and Infinity included."""
    text = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    # orjson writes null for what JSON has no word for; nothing else in an answer is null.
    if b"null" in text:
        return json.dumps(document, default=_plain, separators=(",", ":"), ensure_ascii=False).encode()
    return text


def error_body(text: object) -> bytes:
    """The body of every answer that is an error."""
    return orjson.dumps({"error": safe_text(text)})


def _parse_non_finite(body: bytes, error: orjson.JSONDecodeError) -> Any:
    """What the first parser refused, in case it was for bare NaN or Infinity: just as strict about everything else."""
    if b"NaN" in body or b"Infinity" in body:
        try:
            document = json.loads(body.decode(), parse_int=_integer, parse_float=_finite)
            orjson.dumps(document)  # raises for half a surrogate pair, which is no text
        except (ValueError, RecursionError, orjson.JSONEncodeError):
            pass  # it is malformed in another way: the first parser's words are better
        else:
            return document
    raise invalid(f"failed to parse the request JSON buffer: {error}") from error


def _integer(text: str) -> int | float:
    number = int(text)
    return number if _MIN_INT64 <= number <= _MAX_UINT64 else _finite(text)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("number is infinity when parsed as double")
    return number


def _plain(value: Any) -> Any:
    return value.tolist()
