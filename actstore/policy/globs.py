"""Globs over names: what they match, and whether one matches all that another does."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import translate
from functools import lru_cache


@lru_cache(maxsize=4096)
def matcher(glob: str) -> Callable[[str], re.Match[str] | None]:
    """Return the function that matches a name."""
    return re.compile(translate(glob)).match


def includes(glob: str, other: str) -> bool:
    """Return whether `glob` provably matches all that `other` matches, for globs whose only wildcard is ``*``.

    Its ``*`` then matches the wildcards of `other` like any other character, and its letters match none of them.
    """
    if glob == other:
        return True
    return not set("?[") & set(glob) and "[" not in other and matcher(glob)(other) is not None
