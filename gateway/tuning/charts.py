"""Pictures for a report: SVG in text, with labelled axes, in the colours of `STYLE` for light and dark. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

Point = tuple[float, float | None]

WIDTH: Final = 640
HEIGHT: Final = 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 12, 46
_INNER_W: Final = WIDTH - _LEFT - _RIGHT
_INNER_H: Final = HEIGHT - _TOP - _BOTTOM
_COLOURS: Final = 6
_MOST_MARKED: Final = 60  # points that are drawn as dots
_MOST_LABELLED: Final = 12  # bars whose names fit below them

STYLE: Final = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c1e21; --dim: #5c6370; --rule: #d8dce2; --panel: #f6f7f9;
  --c0: #0b62c4; --c1: #c2410c; --c2: #15803d; --c3: #7e22ce; --c4: #b91c1c; --c5: #0e7490; }
@media (prefers-color-scheme: dark) { :root { --page: #14161a; --ink: #e6e8eb; --dim: #a2a9b4; --rule: #3a3f48;
  --panel: #1c1f25; --c0: #6cb2ff; --c1: #ffa267; --c2: #6fd68f; --c3: #d09bff; --c4: #ff8585; --c5: #63d5e8; } }
body { margin: 2rem auto; padding: 0 1rem; max-width: 86rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--dim); font-weight: 600; }
.chosen td { font-weight: 700; } pre { background: var(--panel); padding: 1rem; overflow: auto; border-radius: 6px; }
.setting, .notes { color: var(--dim); margin: .3rem 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .8rem; background: var(--panel); border-radius: 6px; min-width: 0; }
figcaption { font-weight: 600; } figure svg { width: 100%; height: auto; display: block; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; color: var(--dim); font-size: .85rem; min-height: 1.3em; }
.legend i { display: inline-block; width: .9em; height: .25em; margin-right: .4em; vertical-align: middle; }
svg text { fill: var(--dim); font: 12px system-ui, sans-serif; } svg .grid { stroke: var(--rule); }
svg path { fill: none; stroke-width: 2; stroke-linejoin: round; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points from left to right; where there is no value the line has a gap. `marks`: a word for each point."""

    name: str
    points: Sequence[Point]
    marks: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """`name` has the unit; `ticks` are places and their words, where round numbers do not do."""

    name: str
    ticks: Sequence[tuple[float, str]] = ()


def lines(title: str, drawn: Sequence[Line], *, x: Axis, y: Axis) -> str:
    """A figure with lines; empty where no point has a value. The vertical axis begins at 0."""
    known = [(px, py) for line in drawn for px, py in line.points if py is not None]
    if not known:
        return ""
    places = [px for px, _ in known] + [at for at, _ in x.ticks]
    low, high = min(places), max(places)
    if low == high:
        low, high = low - 0.5, high + 0.5
    top = _top(max(py for _, py in known))

    def at(px: float, py: float) -> tuple[float, float]:
        return _LEFT + (px - low) / (high - low) * _INNER_W, _TOP + (1 - py / top) * _INNER_H

    ticks = x.ticks or [(one, number(one)) for one in _round_numbers(low, high)]
    parts = [*_rules(top, y.name), *(_tick(at(place, 0)[0], word) for place, word in ticks), _below(x.name)]
    for index, line in enumerate(drawn):
        parts += _line(line, [None if py is None else at(px, py) for px, py in line.points], index)
    legend = [(line.name, index) for index, line in enumerate(drawn)]
    return _figure(title, parts, legend=legend)


def bars(title: str, drawn: Sequence[tuple[str, float]], *, x: Axis, y: Axis) -> str:
    """A figure with bars by name; empty where there are none."""
    if not drawn or max(value for _, value in drawn) <= 0:
        return ""
    top = _top(max(value for _, value in drawn))
    step = _INNER_W / len(drawn)
    every = math.ceil(len(drawn) / _MOST_LABELLED)
    parts = [*_rules(top, y.name), _below(x.name)]
    for index, (name, value) in enumerate(drawn):
        height = value / top * _INNER_H
        left = _LEFT + step * (index + 0.15)
        parts.append(
            f'<rect x="{left:.1f}" y="{_TOP + _INNER_H - height:.1f}" width="{step * 0.7:.1f}" '
            f'height="{height:.1f}" fill="var(--c0)"><title>{escape(name)}: {number(value)}</title></rect>'
        )
        if index % every == 0:
            parts.append(_tick(_LEFT + step * (index + 0.5), name))
    return _figure(title, parts, legend=())


def number(value: float) -> str:
    """Short, for an axis: 12k, 1.5M, 0.25."""
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            return f"{value / (1e3 if unit == 'k' else bound):.4g}{unit}"
    return f"{value:.4g}"


def _line(line: Line, places: Sequence[tuple[float, float] | None], index: int) -> list[str]:
    colour = f"var(--c{index % _COLOURS})"
    path, is_down = [], False
    for place in places:
        if place is not None:
            path.append(f"{'L' if is_down else 'M'}{place[0]:.1f} {place[1]:.1f}")
        is_down = place is not None
    parts = [f'<path d="{" ".join(path)}" stroke="{colour}"/>']
    if len(places) <= _MOST_MARKED:
        for number_, (place, (_, value)) in enumerate(zip(places, line.points, strict=True)):
            if place is not None and value is not None:
                word = line.marks[number_] if number_ < len(line.marks) else line.name
                parts.append(
                    f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="3" fill="{colour}">'
                    f"<title>{escape(word)}: {number(value)}</title></circle>"
                )
    return parts


def _rules(top: float, name: str) -> list[str]:
    """Horizontal rules with their numbers, and the axis's name."""
    parts = []
    for value in _round_numbers(0, top):
        y = _TOP + (1 - value / top) * _INNER_H
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    middle = _TOP + _INNER_H / 2
    parts.append(f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(name)}</text>')
    return parts


def _tick(x: float, word: str) -> str:
    bottom = _TOP + _INNER_H
    return (
        f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
        f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(word)}</text>'
    )


def _below(name: str) -> str:
    return f'<text x="{_LEFT + _INNER_W / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(name)}</text>'


def _figure(title: str, parts: Sequence[str], *, legend: Sequence[tuple[str, int]]) -> str:
    named = "".join(
        f'<span><i style="background: var(--c{index % _COLOURS})"></i>{escape(name)}</span>' for name, index in legend
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><div class="legend">{named}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )


def _top(most: float) -> float:
    """The end of an axis that begins at 0: the round number above."""
    step = _step(most or 1.0)
    return math.ceil((most or 1.0) / step * 1.0001) * step


def _round_numbers(low: float, high: float) -> list[float]:
    step = _step(high - low)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _step(span: float) -> float:
    """1, 2 or 5 times a power of ten, four to ten times in `span`."""
    raw = span / 6
    power: float = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
