"""The random generators that a recomputed forward draws from, beside those of torch that a checkpoint restores."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module


class Source(NamedTuple):
    """How the state of one generator is read and set. States compare with ``==``."""

    read: Callable[[], Any]
    set: Callable[[Any], object]


class Generators:
    """The states of generators before a forward, so that it can draw the same numbers again.

    Known are Python's, NumPy's global one, and generators that are attributes of modules, of `torch.Generator`,
    `random.Random`, `numpy.random.Generator` or `numpy.random.RandomState`. Those that the forward did not draw from
    are forgotten when it `ended`.

    Notes
    -----
    Not thread-safe: what other threads draw from the same generators during a recomputation is drawn again.
    """

    def __init__(self, modules: Iterable[Module]) -> None:
        self._before = [(source, source.read()) for source in (*_SHARED, *owned(modules))]
        self._meanwhile: list[tuple[Source, Any]] = []

    def ended(self) -> None:
        """The forward is over."""
        self._before = [(source, state) for source, state in self._before if source.read() != state]

    def rewind(self) -> None:
        """Set the states from before the forward, until `resume`."""
        self._meanwhile = [(source, source.read()) for source, _ in self._before]
        for source, state in self._before:
            source.set(state)

    def resume(self) -> None:
        """Set the states from before `rewind`."""
        for source, state in self._meanwhile:
            source.set(state)
        self._meanwhile = []


def owned(modules: Iterable[Module]) -> list[Source]:
    """The generators that are attributes of modules."""
    found = (value for module in modules for value in vars(module).values())
    return [_source_of(value) for value in found if isinstance(value, _CLASSES) and not isinstance(value, _STATELESS)]


def _source_of(generator: Any) -> Source:
    if isinstance(generator, torch.Generator):
        return Source(
            lambda: generator.get_state().numpy().tobytes(),
            lambda state: generator.set_state(_tensor_of(state)),
        )
    if isinstance(generator, random.Random):
        return Source(generator.getstate, generator.setstate)
    if isinstance(generator, np.random.RandomState):
        return _legacy(generator)
    bits = generator.bit_generator
    return Source(lambda: pickle.dumps(bits.state), lambda state: setattr(bits, "state", pickle.loads(state)))


def _legacy(generator: Any) -> Source:
    return Source(
        lambda: pickle.dumps(generator.get_state(legacy=False)),
        lambda state: generator.set_state(pickle.loads(state)),
    )


def _tensor_of(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


_CLASSES = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_STATELESS = random.SystemRandom  # draws from the operating system, and never the same again
_SHARED = (Source(random.getstate, random.setstate), _legacy(np.random))
