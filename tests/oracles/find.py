"""The oracle of any codec, its inner codecs included."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module

from actstore.codecs import Codec, Int8
from tests.oracles import rows

Sizes = tuple[int, ...]


def encode(codec: Codec, data: bytes, dtype: str, key: int = 0, sizes: Sizes = ()) -> bytes:
    """The payload of elements given as their bytes in storage order.

    `sizes` are those of the dimensions greater than one, in the order of storage.
    """

    def flat(codec: Codec, data: bytes) -> bytes:
        return _oracle(codec).encode(data, dtype, **_arguments(codec, key, sizes))

    return rows.encode(codec, data, dtype, sizes, flat) if _has_groups(codec) else flat(codec, data)


def decode(codec: Codec, payload: bytes, numel: int, dtype: str, key: int = 0, sizes: Sizes = ()) -> bytes:
    """The bytes of the elements that come back."""

    def flat(codec: Codec, payload: bytes, numel: int) -> bytes:
        return _oracle(codec).decode(payload, numel, dtype, **_arguments(codec, key, sizes))

    if _has_groups(codec):
        return rows.decode(codec, payload, numel, sizes, 4 if dtype == "float32" else 2, flat)
    return flat(codec, payload, numel)


def variants() -> list[Codec]:
    """Every codec with every option that its oracle lists."""
    from actstore.codecs import names

    return [codec for name in names() for codec in import_module(f"tests.oracles.{name}").VARIANTS]


def _oracle(codec):
    return import_module(f"tests.oracles.{codec.name}")


def _has_groups(codec):
    """Whether groups end with rows."""
    token, bnb = getattr(codec, "axis", "") == "token", getattr(codec, "layout", "") == "bnb"
    return hasattr(codec, "group") and not (token or bnb)


def _arguments(codec, key, sizes):
    arguments = {field.name: getattr(codec, field.name) for field in fields(codec)}
    if codec.keyed:
        arguments["key"] = key
    if isinstance(codec, Int8) and codec.axis == "token":
        arguments["columns"] = sizes[-1] if len(sizes) > 1 else 1
    if codec.name in ("zstd", "lz4", "hadamard128"):
        arguments["sizes"] = sizes
    return arguments
