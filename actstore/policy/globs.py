"""Globs over names: what they match, and whether one matches all that another does."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import translate
from functools import lru_cache

from actstore.policy.slices import without_ranges

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
