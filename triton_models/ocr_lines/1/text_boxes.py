"""From a map of how likely each pixel is text to the boxes around its lines (as DBNet's authors do, arXiv 1911.08947).

Boxes are FP64 [4, 2]: corners as x, y, clockwise from the top left, in pixels of the map.
"""

from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

# PP-OCRv4's own measures.
TEXT = 0.3  # a pixel is text above this
SURE = 0.5  # a box is text where its pixels are this on average
GROWTH = 1.6  # lines are shrunk in the map; they grow by this times area / circumference
LEAST_SIDE = 3
MAX_BOXES = 1000

QUARTER = np.pi / 2


class Runs(NamedTuple):
    """Pixels of text that touch in a row: INT64 [runs] each, `ends` is behind the last pixel; in reading order."""

    rows: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def text_boxes(likely: np.ndarray) -> list[np.ndarray]:
    """The boxes of lines in a map FP32 [height, width], the largest first."""
    mask = likely > TEXT
    # Grown by a pixel to the right and below: what is nearly one line becomes one.
    mask[:, 1:] |= mask[:, :-1].copy()
    mask[1:] |= mask[:-1].copy()
    boxes = []
    for points in _outlines(mask):
        box = smallest_box(points)
        if min(sides(box)) < LEAST_SIDE or _mean_inside(likely, box) < SURE:
            continue
        boxes.append(_grown(box))
    return boxes


def sides(box: np.ndarray) -> tuple[float, float]:
    """Length of the top and of the left side."""
    return float(np.hypot(*(box[1] - box[0]))), float(np.hypot(*(box[3] - box[0])))


def smallest_box(points: np.ndarray) -> np.ndarray:
    """The rectangle of the least area around points [n, 2]: one of its sides lies on a side of their hull."""
    hull = _hull(points)
    along = np.diff(hull, axis=0, append=hull[:1])
    angles = np.unique(np.arctan2(along[:, 1], along[:, 0]) % QUARTER)
    axes = np.stack([np.stack([np.cos(angles), -np.sin(angles)]), np.stack([np.sin(angles), np.cos(angles)])])
    turned = np.einsum("pc,cak->kpa", hull, axes)  # [angles, points, 2], each turned back by its angle
    low, high = turned.min(axis=1), turned.max(axis=1)
    best = int(np.argmin(np.prod(high - low, axis=1)))
    (left, top), (right, bottom) = low[best], high[best]
    corners = np.array([(left, top), (right, top), (right, bottom), (left, bottom)])
    return _clockwise(corners @ axes[:, :, best].T)


def _clockwise(corners: np.ndarray) -> np.ndarray:
    """The corners of a rectangle, clockwise, from the upper one of the two on the left."""
    by_x = corners[np.argsort(corners[:, 0], kind="stable")]
    left, right = (pair[np.argsort(pair[:, 1], kind="stable")] for pair in (by_x[:2], by_x[2:]))
    return np.stack([left[0], right[0], right[1], left[1]])


def _grown(box: np.ndarray) -> np.ndarray:
    width, height = sides(box)
    by = GROWTH * width * height / (2 * (width + height))
    across = by * (box[1] - box[0]) / width
    down = by * (box[3] - box[0]) / height
    return box + np.stack([-across - down, across - down, across + down, -across + down])


def _mean_inside(likely: np.ndarray, box: np.ndarray) -> float:
    height, width = likely.shape
    left, top = (int(value) for value in np.clip(np.floor(box.min(axis=0)), 0, (width - 1, height - 1)))
    right, bottom = (int(value) for value in np.clip(np.ceil(box.max(axis=0)), 0, (width - 1, height - 1)))
    stencil = Image.new("1", (right - left + 1, bottom - top + 1))
    ImageDraw.Draw(stencil).polygon([(float(x) - left, float(y) - top) for x, y in box], fill=1, outline=1)
    inside = likely[top : bottom + 1, left : right + 1][np.asarray(stencil)]
    return float(inside.mean()) if inside.size else 0.0


def _outlines(mask: np.ndarray) -> list[np.ndarray]:
    """For each connected part of the mask (corners connect), the ends of its runs: x, y [n, 2]. The largest only."""
    runs = _runs(mask)
    labels = _labels(runs, mask.shape[1])
    order = np.argsort(labels, kind="stable")
    firsts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    if not len(firsts):
        return []
    spans = [
        np.maximum.reduceat(high[order], firsts) - np.minimum.reduceat(low[order], firsts) + 1
        for low, high in ((runs.starts, runs.ends - 1), (runs.rows, runs.rows))
    ]
    lasts = np.append(firsts[1:], len(order))
    # A tilted stroke is long in both directions, a speck in none.
    large = np.flatnonzero(np.maximum(*spans) >= LEAST_SIDE)
    kept = large[np.argsort(-(spans[0] * spans[1])[large], kind="stable")][:MAX_BOXES]
    parts = (order[firsts[part] : lasts[part]] for part in kept)
    return [
        np.concatenate(
            [np.stack([x[part], runs.rows[part]], axis=1) for x in (runs.starts, runs.ends - 1)],
        ).astype(float)
        for part in parts
    ]


def _runs(mask: np.ndarray) -> Runs:
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    rows, starts = np.nonzero(edges == 1)
    return Runs(rows, starts, np.nonzero(edges == -1)[1])


def _labels(runs: Runs, width: int) -> np.ndarray:
    """A number for each run: the least position of all runs that it is connected with."""
    span = width + 2  # of one row, in positions that count all pixels through
    below = (runs.rows + 1) * span
    low = np.searchsorted(runs.rows * span + runs.ends, below + runs.starts, side="left")
    high = np.searchsorted(runs.rows * span + runs.starts, below + runs.ends, side="right")
    times = np.maximum(high - low, 0)
    upper = np.repeat(np.arange(len(low)), times)
    lower = np.repeat(low, times) + np.arange(len(upper)) - np.repeat(np.cumsum(times) - times, times)
    labels = np.arange(len(low))
    while True:
        # Roots take the least root that touches their runs; then each run is shown its root. As often as it takes.
        above, beneath = labels[upper], labels[lower]
        if (above == beneath).all():
            return labels
        np.minimum.at(labels, np.maximum(above, beneath), np.minimum(above, beneath))
        while (labels != labels[labels]).any():
            labels = labels[labels]


def _hull(points: np.ndarray) -> np.ndarray:
    """The convex hull of points [n, 2] (Andrew's monotone chain)."""
    ordered = np.unique(points, axis=0).tolist()
    halves = []
    for chain in (ordered, ordered[::-1]):
        half: list[list[float]] = []
        for x, y in chain:
            while len(half) > 1 and _turn(half[-2], half[-1], (x, y)) <= 0:
                half.pop()
            half.append([x, y])
        halves.append(half[:-1])
    return np.array(halves[0] + halves[1] or ordered)


def _turn(first: list[float], second: list[float], third: tuple[float, float]) -> float:
    return (second[0] - first[0]) * (third[1] - first[1]) - (second[1] - first[1]) * (third[0] - first[0])
