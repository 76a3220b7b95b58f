"""The options of a codec: the fields of its dataclass, as policy text writes and reads them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, fields
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from actstore.codecs.base import Codec


@dataclass(frozen=True)
class CodecField:
    """A field of a codec: its type, and its default (MISSING where it must be given)."""

    name: str
    type: Any
    default: Any

    @property
    def takes_codec(self) -> bool:
        return isinstance(self.type, type) and issubclass(self.type, Codec)

    @property
    def expected(self) -> str:
        """Description of the values that this option accepts."""
        if self.takes_codec:
            return "a codec"
        if get_origin(self.type) is Literal:
            return "one of " + ", ".join(map(value_text, get_args(self.type)))
        return {bool: "true or false", int: "a whole number", float: "a number"}.get(self.type, "a word")

    def read(self, text: str) -> Any:
        """Turn a word or a number of the policy text into a value of this option's type.

        Raises
        ------
        ValueError : the text is not such a value
        """
        if get_origin(self.type) is Literal:
            choices = {value_text(choice): choice for choice in get_args(self.type)}
        elif self.type is bool:
            choices = {"true": True, "false": False}
        else:
            return self.type(text)
        if text not in choices:
            raise ValueError(text)
        return choices[text]

    def __str__(self) -> str:
        return self.name if self.default is MISSING else f"{self.name}={value_text(self.default)}"


@lru_cache(maxsize=256)
def options_of(codec: type[Codec]) -> dict[str, CodecField]:
    """Return the options of a codec class, by name."""
    types = get_type_hints(codec)
    return {
        field.name: CodecField(field.name, types[field.name], _default(field)) for field in fields(codec) if field.init
    }


def codec_text(codec: Codec) -> str:
    """Write a codec as policy text: its name, then the options that differ from their defaults.

    An inner codec stands without its option's name, and a flag without its value: ``zmask(int8(affine))``.
    """
    changed = [
        option.name
        if value is True
        else value_text(value)
        if option.takes_codec
        else f"{option.name}={value_text(value)}"
        for option in options_of(type(codec)).values()
        if (value := getattr(codec, option.name)) != option.default
    ]
    return f"{codec.name}({', '.join(changed)})" if changed else codec.name


def value_text(value: object) -> str:
    """Write the value of an option as policy text."""
    if isinstance(value, Codec):
        return codec_text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def near_words(word: str, known: Iterable[str]) -> str:
    """Return the similar known words as text: ``"'host' or 'disk'"``; empty for none."""
    by_folded = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_folded, n=2, cutoff=0.6)
    return " or ".join(repr(by_folded[name]) for name in near)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word: ``". Did you mean 'host'?"``, or else a full stop."""
    near = near_words(word, known)
    return f". Did you mean {near}?" if near else "."


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
