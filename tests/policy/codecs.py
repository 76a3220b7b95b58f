"""Codecs with every kind of option, known to the parser only inside `these_codecs`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import pytest

from actstore.codecs import Raw, registry
from actstore.codecs.base import Codec, Exact
from actstore.errors import ChainError


@dataclass(frozen=True)
class _Inert(Codec):
    lossless = False

    def accepts(self, dtype):
        return True

    def size(self, spec):
        return Exact(0)

    def encode(self, src, out):
        return 0

    def decode(self, buf, out):
        out.zero_()


@dataclass(frozen=True)
class Options(_Inert):
    name = "options"
    flag: bool = False
    on: bool = True
    count: int = 128
    ratio: float = 0.5
    mode: Literal["nearest", "dither"] = "nearest"
    word: str = "plain"
    own: int = field(default=0, init=False)  # no option: it cannot be given

    def __post_init__(self):
        if self.count % 2:
            raise ChainError(f"options: count={self.count} is odd. Give an even one.", count=self.count)


@dataclass(frozen=True)
class Wrap(_Inert):
    name = "wrap"
    inner: Codec = field(default_factory=Raw)
    share: float = 1.0


@dataclass(frozen=True)
class Needy(_Inert):
    name = "needy"
    inner: Codec


@contextmanager
def these_codecs() -> Iterator[None]:
    """Let the registry find the codecs of this file too."""
    mine = {codec.name: codec for codec in (Options, Wrap, Needy)}
    find = registry.get
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "get", lambda name: mine[name] if name in mine else find(name))
        yield
