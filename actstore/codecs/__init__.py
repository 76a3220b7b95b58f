"""Codecs: pure functions from dense tensors to bytes and back."""

from actstore.codecs.base import AtMost, Bound, Codec, Exact, Size
from actstore.codecs.int8 import Int8
from actstore.codecs.raw import Raw
from actstore.codecs.registry import get, names

__all__ = ["AtMost", "Bound", "Codec", "Exact", "Int8", "Raw", "Size", "get", "names"]
