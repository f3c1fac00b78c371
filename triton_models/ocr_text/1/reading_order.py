"""In which order the lines of a page are read."""

import numpy as np


def rows_of(boxes: np.ndarray) -> list[list[int]]:
    """The positions of boxes FP32 [boxes, 4, 2] by rows, first to last, and in a row from its beginning to its end.

    Corners go clockwise from each line's own top left: so the page is read the way it is written, even where it lies on
    its side. A box is in the row of another where their middles are apart by less than half the height of the flatter.
    """
    if not len(boxes):
        return []
    along = (boxes[:, 1] - boxes[:, 0]).sum(axis=0)  # long lines count for more
    length = float(np.hypot(*along))
    x, y = along / length if length else (1.0, 0.0)
    turned = boxes @ np.array([(x, -y), (y, x)])
    middles = turned.mean(axis=1)
    heights = np.ptp(turned[:, :, 1], axis=1)
    rows: list[list[int]] = []
    for index in np.argsort(middles[:, 1], kind="stable").tolist():
        first = rows[-1][0] if rows else index
        reach = min(heights[index], heights[first]) / 2
        if rows and middles[index, 1] - middles[first, 1] < reach:
            rows[-1].append(index)
        else:
            rows.append([index])
    return [sorted(row, key=lambda index: float(middles[index, 0])) for row in rows]
