"""The oracle of any codec, its inner codecs included."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module

from actstore.codecs import Codec


def encode(codec: Codec, data: bytes, dtype: str, key: int = 0, columns: int = 1) -> bytes:
    """The payload of elements given as their bytes in storage order.

    `columns` is the number of elements in a row of the storage: of the dimension with the least stride.
    """
    return _oracle(codec).encode(data, dtype, **_arguments(codec, key, columns))


def decode(codec: Codec, payload: bytes, numel: int, dtype: str, key: int = 0, columns: int = 1) -> bytes:
    """The bytes of the elements that come back."""
    return _oracle(codec).decode(payload, numel, dtype, **_arguments(codec, key, columns))


def variants() -> list[Codec]:
    """Every codec with every option that its oracle lists."""
    from actstore.codecs import names

    return [codec for name in names() for codec in import_module(f"tests.oracles.{name}").VARIANTS]


def _oracle(codec):
    return import_module(f"tests.oracles.{codec.name}")


def _arguments(codec, key, columns):
    arguments = {field.name: getattr(codec, field.name) for field in fields(codec)}
    if codec.keyed:
        arguments["key"] = key
    if codec.shaped:
        arguments["columns"] = columns
    return arguments
