"""Short texts for many module names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

NUMBER = re.compile(r"\d+")
INDEX = re.compile(r"(?<![^.])(0|[1-9]\d*)(?![^.])")  # a part of a dotted name that is a number


def pattern_of(name: str) -> str:
    """Return `name` with `#` for each number; empty for a name without numbers."""
    return NUMBER.sub("#", name) if NUMBER.search(name) else ""


def layer_pattern(name: str) -> str:
    """Return `name` with `#` for its first index, that of a layer: ``blocks.3.mlp.0`` becomes ``blocks.#.mlp.0``."""
    return INDEX.sub("#", name, count=1)


def joined(names: Sequence[str]) -> str:
    """Return ``blocks.0-2,4.mlp`` for names with the same `layer_pattern`."""
    found = [INDEX.search(name) for name in names]
    numbers = sorted({int(match[0]) for match in found if match})
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last, _ in _runs(numbers))
    return INDEX.sub(text, names[0], count=1)


def short(names: Sequence[str], width: int = 40) -> str:
    """Return ``blocks.0-2, 4`` for ``blocks.0, blocks.1, blocks.2, blocks.4``.

    Names keep their order. Several pieces take at most `width` characters; names that do not fit are counted.
    """
    pieces = list(_pieces(names))
    shown = ", ".join(text for text, _ in pieces)
    if len(shown) <= width or len(pieces) == 1:
        return shown
    total = len(names)
    for count in range(len(pieces) - 1, 0, -1):
        named = sum(n for _, n in pieces[:count])
        shown = ", ".join(text for text, _ in pieces[:count]) + f" and {total - named} more"
        if len(shown) <= width:
            break
    return shown


def _pieces(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the text of each run of names that differ in their last number only, and the count of its names."""
    last = None
    for (before, after), group in groupby((_split(name) for name in names), key=lambda parts: (parts[0], parts[2])):
        numbers = [number for _, number, _ in group]
        if numbers == [None]:
            yield before, 1
            last = None
            continue
        for first, end, count in _runs([number for number in numbers if number is not None]):
            text = str(first) if first == end else f"{first}-{end}"
            yield (text if last == (before, after) else f"{before}{text}{after}"), count
            last = before, after


def _split(name: str) -> tuple[str, int | None, str]:
    """Split `name` into text, its last number, and text. A last number with leading zeros is part of the text."""
    found = list(NUMBER.finditer(name))
    if not found or str(int(found[-1][0])) != found[-1][0]:
        return name, None, ""
    return name[: found[-1].start()], int(found[-1][0]), name[found[-1].end() :]


def _runs(numbers: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the first number, the last number and the length of each run of consecutive numbers."""
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        yield run[0], run[-1], len(run)
