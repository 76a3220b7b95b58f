"""Codecs by name, as the policy text writes them."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from actstore.base import extensions
from actstore.codecs.base import Codec
from actstore.errors import UnknownCodecError

_TYPES = {  # the module and the class of each codec, imported when a policy names it
    "raw": ("raw", "Raw"),
    "int8": ("int8", "Int8"),
    "int6": ("affine", "Int6"),
    "int5": ("affine", "Int5"),
    "int4": ("affine", "Int4"),
    "int3": ("affine", "Int3"),
    "int2": ("affine", "Int2"),
    "zmask": ("sparse", "Zmask"),
    "topk": ("sparse", "Topk"),
    "nm": ("sparse", "Nm"),
    "bit1": ("bit1", "Bit1"),
    "fp8": ("fp8", "Fp8"),
    "expack": ("expack", "Expack"),
    "e5m6": ("e5m6", "E5m6"),
    "nf4": ("nf4", "Nf4"),
    "intpack": ("intpack", "Intpack"),
    "hadamard128": ("hadamard128", "Hadamard128"),
    "zstd": ("blosc", "Zstd"),
    "lz4": ("blosc", "Lz4"),
    "bnb8": ("bnb8", "Bnb8"),
}
CLASSES = {kind: module for module, kind in _TYPES.values()}  # the module of each class


def names() -> tuple[str, ...]:
    """Return the names of actstore's own codecs."""
    return tuple(_TYPES)


def get(name: str) -> type[Codec]:
    """Return the codec type called `name`: one of actstore's, or one that an installed package offers.

    Raises
    ------
    UnknownCodecError : an unknown name; the message lists near names
    ConfigError : a package offers a codec that cannot be used
    """
    if name in _TYPES:
        return load(_TYPES[name][1])
    found: type[Codec] | None = extensions.load(extensions.CODECS, name, Codec)
    if found is None:
        known = (*_TYPES, *extensions.names(extensions.CODECS))
        near = get_close_matches(name, known)
        hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"There are {', '.join(map(repr, known))}."
        raise UnknownCodecError(f"no codec is called {name!r}. {hint}", name=name, near=near)
    return found


def load(kind: str) -> type[Codec]:
    """Import a class of actstore's codecs, such as ``"Int8"``."""
    found: type[Codec] = getattr(import_module(f"actstore.codecs.{CLASSES[kind]}"), kind)
    return found
