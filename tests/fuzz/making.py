"""Strategies that the targets share: mutations of what is right, names that nobody should use, nested JSON."""

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

NASTY = (
    "", " ", ".", "..", "../../etc/passwd", "/etc/passwd", "a/../b", "%2e%2e%2f", "a\x00b", "a\nb",
    "a\r\nset-cookie: x=1",
    "\x1b[31m", "\x7f", "\u202egnp", "\u2028", "\ufeff", "\U0001f600", "\ud800", "\u0130", "a" * 300, "a" * 5000,
    "'; DROP", '"', "\\",
    "{}", "${HOME}", "{{7*7}}", "<script>", "nul", "-1", "0", "1e999", "NaN", "true", "None", "__proto__",
    "\u0661\u0662", "\u00b2",
)  # fmt: skip
"""Texts that break what takes them for something else."""

DRAWN = st.sampled_from(NASTY) | st.text(max_size=20)
NUMBERS = st.sampled_from(
    [
        0,
        -1,
        1,
        2,
        255,
        256,
        65535,
        2**31 - 1,
        2**31,
        2**32,
        2**63 - 1,
        2**63,
        2**64 - 1,
        2**64,
        10**30,
        0.5,
        1e308,
        -0.0,
    ]
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | DRAWN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(DRAWN, inner, max_size=4),
    max_leaves=12,
)
"""Any value that JSON has."""


@st.composite
def mutated(
    draw: st.DrawFn, seeds: Sequence[bytes], pieces: Sequence[bytes] = (), *, most: int = 6, longest: int = 200_000
) -> bytes:
    """One of `seeds` after a few changes: bits, bytes, cuts, repeats, splices with others, `pieces` put in."""
    text = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.sampled_from([1, 2, 4, 8, 64, 1024])))
        match draw(st.integers(0, 7)):
            case 0 if at < len(text):
                text[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                text[at:end] = draw(st.binary(max_size=8))
            case 2:
                del text[at:end]
            case 3:
                text[at:at] = text[at:end] * draw(st.sampled_from([1, 2, 50]))
            case 4:
                other = draw(st.sampled_from(seeds))
                text[at:] = other[draw(st.integers(0, len(other))) :]
            case 5 if pieces:
                text[at:at] = draw(st.sampled_from(pieces))
            case 6:
                size = draw(st.sampled_from([1, 2, 4, 8]))
                number = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**32 - 1, 2**63]))
                order = draw(st.sampled_from(["big", "little"]))
                text[at : at + size] = (number % 256**size).to_bytes(size, order)
            case _:
                del text[at:]
    return bytes(text[:longest])


@st.composite
def cut(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> list[bytes]:
    """A stream of bytes as reads of any size."""
    text = draw(whole)
    at = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=12))})
    return [text[begin:end] for begin, end in itertools.pairwise(at)]


def changed_somewhere(draw: st.DrawFn, document: Any, value: st.SearchStrategy[Any] = JSON) -> Any:
    """A document of JSON with one place in it replaced, dropped or doubled."""
    places = list(_places(document, ()))
    if not places:
        return draw(value)
    way = draw(st.sampled_from(places))
    return _replaced(draw, document, way, value)


def _places(document: Any, way: tuple[Any, ...]) -> Any:
    if way:
        yield way
    if isinstance(document, dict):
        for name, inner in document.items():
            yield from _places(inner, (*way, name))
    elif isinstance(document, list):
        for at, inner in enumerate(document):
            yield from _places(inner, (*way, at))


def _replaced(draw: st.DrawFn, document: Any, way: tuple[Any, ...], value: st.SearchStrategy[Any]) -> Any:
    copy = dict(document) if isinstance(document, dict) else list(document)
    step = way[0]
    if len(way) > 1:
        copy[step] = _replaced(draw, copy[step], way[1:], value)
        return copy
    what = draw(st.sampled_from(["replace", "drop", "add"]))
    if what == "replace":
        copy[step] = draw(value)
    elif what == "drop":
        del copy[step]
    elif isinstance(copy, dict):
        copy[draw(DRAWN)] = draw(value)
    else:
        copy.append(copy[step])
    return copy


@st.composite
def documents(draw: st.DrawFn, seeds: Sequence[Any], *, most: int = 4) -> Any:
    """One of `seeds` with a few places changed."""
    document = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, most))):
        if not isinstance(document, dict | list):
            break
        document = changed_somewhere(draw, document)
    return document
