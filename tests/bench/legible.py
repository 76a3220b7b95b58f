"""Whether a picture can be read: all texts lie inside of it, and none upon another."""

from __future__ import annotations

from itertools import combinations

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

SLACK = 1.0  # pixels


def faults(figure: Figure) -> list[str]:
    """What is wrong with the texts of `figure`, in words."""
    figure.draw_without_rendering()
    outside = _ticks_outside(figure)
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text not in outside]
    texts = [(text.get_text(), _box(text)) for text in shown if text.get_text().strip()]
    whole = figure.bbox.padded(SLACK)
    found = [f"{words!r} is cut off" for words, box in texts if not _inside(box, whole)]
    found += [f"{a!r} lies upon {b!r}" for (a, one), (b, other) in combinations(texts, 2) if one.overlaps(other)]
    return found


def _box(text: Text) -> Bbox:
    """Of the letters alone: the extent of an annotation takes in the line to its mark."""
    return Text.get_window_extent(text).padded(-SLACK)


def _ticks_outside(figure: Figure) -> set[Text]:
    """Labels of ticks that lie outside of the axes: they exist, and are not drawn."""
    found: set[Text] = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        found.update(*((tick.label1, tick.label2) for tick in ticks if not low <= tick.get_loc() <= high))
    return found


def _inside(box: Bbox, whole: Bbox) -> bool:
    return bool(whole.contains(box.x0, box.y0) and whole.contains(box.x1, box.y1))
