"""A codec and a tier for actstore."""

from example_codec.bf16 import Bf16, error
from example_codec.shelf import Shelf

__all__ = ["Bf16", "Shelf", "error"]
