"""Codecs by name, as the policy text writes them."""

from __future__ import annotations

from difflib import get_close_matches

from actstore.base import extensions
from actstore.codecs.affine import Int2, Int3, Int4, Int5, Int6
from actstore.codecs.base import Codec
from actstore.codecs.bit1 import Bit1
from actstore.codecs.bnb8 import Bnb8
from actstore.codecs.e5m6 import E5m6
from actstore.codecs.expack import Expack
from actstore.codecs.fp8 import Fp8
from actstore.codecs.hadamard128 import Hadamard128
from actstore.codecs.int8 import Int8
from actstore.codecs.intpack import Intpack
from actstore.codecs.lz4 import Lz4
from actstore.codecs.nf4 import Nf4
from actstore.codecs.nm import Nm
from actstore.codecs.raw import Raw
from actstore.codecs.topk import Topk
from actstore.codecs.zmask import Zmask
from actstore.codecs.zstd import Zstd
from actstore.errors import UnknownCodecError

_TYPES: dict[str, type[Codec]] = {
    codec.name: codec
    for codec in (
        Raw,
        Int8,
        Int6,
        Int5,
        Int4,
        Int3,
        Int2,
        Zmask,
        Topk,
        Nm,
        Bit1,
        Fp8,
        Expack,
        E5m6,
        Nf4,
        Intpack,
        Hadamard128,
        Zstd,
        Lz4,
        Bnb8,
    )
}


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
    found: type[Codec] | None = _TYPES.get(name) or extensions.load(extensions.CODECS, name, Codec)
    if found is None:
        known = (*_TYPES, *extensions.names(extensions.CODECS))
        near = get_close_matches(name, known)
        hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"There are {', '.join(map(repr, known))}."
        raise UnknownCodecError(f"no codec is called {name!r}. {hint}", name=name, near=near)
    return found
