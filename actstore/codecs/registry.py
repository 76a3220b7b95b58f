"""Codecs by name, as the policy text writes them."""

from __future__ import annotations

from difflib import get_close_matches

from actstore.codecs.base import Codec
from actstore.codecs.int8 import Int8
from actstore.codecs.raw import Raw
from actstore.errors import UnknownCodecError

_TYPES: dict[str, type[Codec]] = {codec.name: codec for codec in (Raw, Int8)}


def names() -> tuple[str, ...]:
    """The names of all codecs."""
    return tuple(_TYPES)


def get(name: str) -> type[Codec]:
    """The codec type called `name`.

    Raises
    ------
    UnknownCodecError : no such codec; the message lists near names
    """
    try:
        return _TYPES[name]
    except KeyError:
        near = get_close_matches(name, _TYPES)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(map(repr, _TYPES))}"
        raise UnknownCodecError(f"no codec is called {name!r}; {hint}", name=name, near=near) from None
