"""Patterns over module names: the modules that they cover, and suggestions for a pattern that matches none."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from actstore.errors import ConfigError, PolicyError
from actstore.policy import operators
from actstore.policy.globs import check_ranges, includes, matcher, read_slice, split_slice, without_ranges

_VALID = re.compile(r"[^\s:;#/]+(/[^\s:;#/]+)?")


def check_tag(name: Any) -> None:
    """Check the name of a tagged tensor.

    Raises
    ------
    ConfigError : it is not one word
    """
    if not isinstance(name, str) or not name or any(c.isspace() or c in "/:;#@>()[]*?" for c in name):
        raise ConfigError(f"name={name!r}: must be one word. Use letters, digits, '_', '-' and '.'.")


class Pattern(NamedTuple):
    """A glob over dotted module names, ``*`` crossing dots, and where one is given a glob over tags, or an operator.

    ``[0-15]`` is a number from 0 to 15. An alias, which stands for names in a model, may have a slice:
    ``@blocks[::2]``. A pattern covers the modules that it matches and everything inside them.
    """

    module: str
    tag: str = ""
    operator: str = ""  # a class of operators, or a glob over the names of operators

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read ``module``, ``module/tag`` or ``module/@operator``.

        Raises
        ------
        PolicyError : empty, more than one slash, an invalid character, slice or range, or an unknown operator
        """
        alias, chosen = split_slice(re.split("[./]", text, maxsplit=1)[0])
        plain = text if chosen is None else text.replace(f"[{chosen}]", "", 1)
        if chosen is not None:
            read_slice(alias, chosen)
        if not _VALID.fullmatch(plain):
            raise PolicyError(
                f"{text!r} is not a pattern. Write a module name, in which * stands for anything, such as "
                "'blocks.*.attn'. After a slash stands the name of a tagged tensor, such as 'blocks.*/qkv', or "
                "operators, such as 'blocks.*/@sdpa'.",
                pattern=text,
            )
        check_ranges(plain)
        module, _, inner = text.partition("/")
        if inner.startswith("@"):
            return cls(module, operator=operators.check_operator(inner[1:], text))
        return cls(module, inner)

    def __str__(self) -> str:
        return f"{self.module}/{self.tensors}" if self.tensors else self.module

    @property
    def tensors(self) -> str:
        """Text after the slash, which says the tensors that are meant; empty for all."""
        return f"@{self.operator}" if self.operator else self.tag

    @property
    def any_module(self) -> bool:
        """True if the module part covers every site, also sites outside of any module."""
        return not self.module.strip("*")

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the module `name` itself."""
        return matcher(self.module)(name) is not None

    def covers(self, name: str, tag: str = "", operator: str = "") -> bool:
        """Return whether the pattern covers a tensor with this tag that `operator` made, saved in the module `name`."""
        if self.tag and not (tag and matcher(self.tag)(tag)):
            return False
        if self.operator and not operators.covers(self.operator, operator):
            return False
        return self.covers_module(name)

    def covers_module(self, name: str) -> bool:
        """Return whether the pattern may cover a tensor that is saved in the module `name`."""
        return self.any_module or any(map(self.matches, ancestry(name)))

    def includes(self, other: Pattern) -> bool:
        """Return whether this pattern provably covers all that `other` covers, in any model."""
        if self.tag and not (other.tag and includes(self.tag, other.tag)):
            return False
        if self.operator and not (other.operator and operators.includes_all(self.operator, other.operator)):
            return False
        return any(includes(self.module, outer) for outer in ancestry(other.module))


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
    return ".".join("*" if part.isdigit() else part for part in without_ranges(name, "0")[0].split("."))
