"""Patterns over module names: the modules that they cover, and suggestions for a pattern that matches none."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import NamedTuple

from actstore.errors import PolicyError

_VALID = re.compile(r"[^\s:;#/]+(/[^\s:;#/]+)?")


class Pattern(NamedTuple):
    """A glob over dotted module names, ``*`` crossing dots, and a glob over tags where one is given.

    A pattern covers the modules that it matches and everything inside them.
    """

    module: str
    tag: str = ""

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read ``module`` or ``module/tag``.

        Raises
        ------
        PolicyError : empty, more than one slash, or an invalid character
        """
        if not _VALID.fullmatch(text):
            raise PolicyError(
                f"{text!r} is not a pattern. Write a module name, in which * stands for anything, such as "
                "'blocks.*.attn'. After a slash stands the name of a tagged tensor, such as 'blocks.*/qkv'.",
                pattern=text,
            )
        return cls(*text.split("/"))

    def __str__(self) -> str:
        return f"{self.module}/{self.tag}" if self.tag else self.module

    @property
    def any_module(self) -> bool:
        """True if the module part covers every site, also sites outside of any module."""
        return not self.module.strip("*")

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the module `name` itself."""
        return _compiled(self.module)(name) is not None

    def covers(self, name: str, tag: str = "") -> bool:
        """Return whether the pattern covers a tensor with this tag, saved in the module `name`."""
        if self.tag and not (tag and _compiled(self.tag)(tag)):
            return False
        return self.any_module or any(map(self.matches, ancestry(name)))

    def includes(self, other: Pattern) -> bool:
        """Return whether this pattern provably covers all that `other` covers, in any model."""
        if self.tag and not (other.tag and _includes(self.tag, other.tag)):
            return False
        return any(_includes(self.module, outer) for outer in ancestry(other.module))


EVERYTHING = Pattern("*")


def ancestry(name: str) -> Iterator[str]:
    """Yield the module and the modules around it, from the inside out: ``a.b.c``, ``a.b``, ``a``."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def near_modules(module: str, names: Sequence[str]) -> list[str]:
    """Return patterns or names of the model that are similar to `module`, which matches none."""
    if re.search(r"\d", module):  # a number that does not exist: suggest the first and the last
        alike = [name for name in names if _shape(name) == _shape(module)]
        if alike:
            return [alike[0], alike[-1]] if len(alike) > 1 else alike
    known = shapes(names)
    inside = [shape for shape in known if f".{shape}".endswith(f".{_shape(module)}")]
    if near := inside[:3] or _closest(_shape(module), known):
        return near
    last = {shape.rpartition(".")[2]: shape for shape in known}
    return [last[part] for part in _closest(module.rpartition(".")[2], last)]


def shapes(names: Iterable[str]) -> list[str]:
    """Return the module names with ``*`` for their numbers, each once, outermost first."""
    return sorted(dict.fromkeys(_shape(name) for name in names if name), key=lambda shape: shape.count("."))


def _closest(word: str, known: Iterable[str]) -> list[str]:
    """Return the nearest of `known`, and those about as near: long names are similar by their common beginnings."""
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    likeness = [difflib.SequenceMatcher(a=word, b=name).ratio() for name in near]
    return [name for name, ratio in zip(near, likeness, strict=True) if ratio > likeness[0] - 0.05]


def _shape(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@lru_cache(maxsize=4096)
def _compiled(glob: str) -> Callable[[str], re.Match[str] | None]:
    return re.compile(translate(glob)).match


def _includes(glob: str, other: str) -> bool:
    """Return whether `glob` provably matches all that `other` matches, for globs whose only wildcard is ``*``.

    Its ``*`` then matches the wildcards of `other` like any other character, and its letters match none of them.
    """
    if glob == other:
        return True
    return not set("?[") & set(glob) and "[" not in other and _compiled(glob)(other) is not None
