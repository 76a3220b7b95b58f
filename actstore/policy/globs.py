"""Globs over names, with ranges of numbers, ``blocks.[0-15]``, and slices of aliases, ``@blocks[::2]``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import translate
from functools import cache, lru_cache

from actstore.errors import PolicyError

MOST = 9999  # the largest number in a range: the compiled pattern spells out each

_SLICED = re.compile(r"(@\w+)\[([^\[\]]*)\]")
_NUMBER = "-?[0-9]{1,9}"
_SLICE = re.compile(f"({_NUMBER})?:({_NUMBER})?(?::({_NUMBER})?)?")
_RANGE = re.compile(r"\[([0-9]{1,9})-([0-9]{1,9})\]")


def split_slice(alias: str) -> tuple[str, str | None]:
    """Return the alias and the text in its brackets; None for an alias without brackets."""
    found = _SLICED.fullmatch(alias)
    return (alias, None) if found is None else (found[1], found[2])


def read_slice(alias: str, text: str) -> slice:
    """Read the text in the brackets of an alias: a slice or an index, as Python writes them.

    Raises
    ------
    PolicyError : it is neither, or its step is 0
    """
    found = _SLICE.fullmatch(text)
    if found is not None:
        start, stop, step = (None if part is None else int(part) for part in found.groups())
        if step != 0:
            return slice(start, stop, step)
    elif re.fullmatch(_NUMBER, text):
        index = int(text)
        return slice(index, index + 1 or None)
    raise PolicyError(
        f"'{alias}[{text}]': the brackets must hold a slice or an index as in Python, without blanks. Write "
        f"'{alias}[::2]', '{alias}[0:4]', '{alias}[-2:]' or '{alias}[3]'.",
        alias=alias,
    )


def select(alias: str, text: str, names: Sequence[str]) -> Sequence[str]:
    """Return those of the names that a slice selects.

    Raises
    ------
    PolicyError : it selects none; `count` is their number
    """
    chosen = names[read_slice(alias, text)]
    if not chosen:
        last = f" to {names[-1]}" if len(names) > 1 else ""
        raise PolicyError(
            f"'{alias}[{text}]' selects none of the {len(names)} modules of {alias}: {names[0]}{last}.",
            alias=alias,
            count=len(names),
        )
    return chosen


def check_ranges(glob: str) -> None:
    """Check the ranges of numbers in a glob.

    Raises
    ------
    PolicyError : a range counts down, or has a number that is too large
    """
    for low, high in _RANGE.findall(glob):
        if not int(low) <= int(high) <= MOST:
            raise PolicyError(
                f"'[{low}-{high}]': a range must count up, to {MOST} at most. Write its least number first: '[0-15]'.",
                pattern=glob,
            )


def without_ranges(glob: str, mark: str) -> tuple[str, list[str]]:
    """Return the glob with a mark in the place of each range, and regular expressions for the numbers of each."""
    return _RANGE.sub(mark, glob), [_numbers(int(low), int(high)) for low, high in _RANGE.findall(glob)]


@cache
def _numbers(low: int, high: int) -> str:
    return f"(?:{'|'.join(map(str, range(low, high + 1)))})"


_MARK = "\ue000"  # for a range of numbers: a character that `translate` leaves alone, and no name has


@lru_cache(maxsize=4096)
def matcher(glob: str) -> Callable[[str], re.Match[str] | None]:
    """Return the function that matches a name."""
    marked, numbers = without_ranges(glob, _MARK)
    pattern = translate(marked)
    for each in numbers:
        pattern = pattern.replace(_MARK, each, 1)
    return re.compile(pattern).match


def includes(glob: str, other: str) -> bool:
    """Return whether `glob` provably matches all that `other` matches, for globs whose only wildcard is ``*``.

    Its ``*`` then matches the wildcards of `other` like any other character, and its letters match none of them.
    """
    if glob == other:
        return True
    return not set("?[") & set(glob) and "[" not in other and matcher(glob)(other) is not None
