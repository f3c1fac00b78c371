"""What the code of a model raised, as Triton writes it: type and text, then where. Nothing here ever raises itself."""

import traceback
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

# gRPC carries an error's text in a header, and a peer may refuse headers of more than 8 KiB together.
_TEXT_BYTES = 4096
_PLACES_BYTES = 2048
_PLACES = 20

_Place = tuple[CodeType, int]


def text_of(value: object) -> str:
    """`str(value)` for whatever a model made: well-formed Unicode of at most 4 KiB in UTF-8, whatever `str` does."""
    try:
        text = str(value)
    except BaseException:  # noqa: BLE001 - a `__str__` of foreign code may raise anything
        return f"<str() of {_type_name(value)} failed>"
    return _cut(text, _TEXT_BYTES)


def named(error: BaseException) -> str:
    """The exception's type and text."""
    return f"{_type_name(error)}: {text_of(error)}"


def raised(error: BaseException) -> str:
    """The exception and all the places that it passed, the innermost first."""
    return _written(error, _places(error))


def raised_by_run(error: BaseException, file: Path) -> str:
    """The exception and the places from the model's file inwards, the innermost first."""
    places = _places(error)
    first = next((index for index, (code, _) in enumerate(places) if code.co_filename == str(file)), 0)
    return _written(error, places[first:])


def raised_by_load(error: BaseException, file: Path) -> str:
    """The innermost place that lies in the model's folder, if any: code that cannot be compiled tells its own place."""
    own = [(code, line) for code, line in _places(error) if Path(code.co_filename).is_relative_to(file.parent.parent)]
    return _written(error, own[-1:]).rstrip()


def _places(error: BaseException) -> list[_Place]:
    return [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]


def _written(error: BaseException, places: Sequence[_Place]) -> str:
    """At most 20 places, those where it began."""
    lines = [f"  {code.co_filename}({line}): {code.co_name}\n" for code, line in reversed(places[-_PLACES:])]
    where = _cut("".join(lines), _PLACES_BYTES)
    return f"{named(error)}\n\nAt:\n{where}" if where else named(error)


def _type_name(value: object) -> str:
    # Not `type(value).__name__`, which a metaclass may have replaced.
    return str(type.__dict__["__name__"].__get__(type(value)))


def _cut(text: str, size: int) -> str:
    """At most so many bytes of UTF-8; halves of surrogate pairs become question marks."""
    # Methods of `str` itself, since the text may be of a subclass.
    start = str.__getitem__(text, slice(size))
    return str.encode(start, "utf-8", "replace")[:size].decode("utf-8", "ignore")
