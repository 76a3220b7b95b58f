"""The random generators that a recomputed forward draws from, beside those of torch that a checkpoint restores."""

from __future__ import annotations

import ctypes
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
        self._before = [(source, source.read()) for source in (*_SHARED, *_owned(modules))]
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


def _owned(modules: Iterable[Module]) -> list[Source]:
    found = (value for module in modules for value in vars(module).values())
    return [_source_of(value) for value in found if isinstance(value, _CLASSES)]


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
_KEY_NBYTES = 625 * 4  # what changes with each draw from NumPy's global generator: 624 words and a position
_known: tuple[bytes, bytes] = b"", b""  # a key, and the state that it belongs to


def _read_numpy() -> bytes:
    """The state of NumPy's global generator. NumPy takes 60 us to read it, and so it is read where the key is new.

    A second normal number comes from the first one's draw, and changes no key: nothing is known while one waits.
    """
    global _known  # of the process, as the generator is
    numpy: Any = np.random
    generator = numpy.get_bit_generator()
    plain = type(generator) is np.random.MT19937
    key = ctypes.string_at(generator.ctypes.state_address, _KEY_NBYTES) if plain else b""
    known, state = _known
    if plain and key == known:
        return state
    found = numpy.get_state(legacy=False)
    state = pickle.dumps(found)
    if plain and not found["has_gauss"] and key == _key_of(found):
        _known = key, state
    return state


def _key_of(found: Any) -> bytes:
    """What must stand at the state's address, were NumPy to arrange it in another way one day."""
    position = np.array([found["state"]["pos"]], dtype=np.int32)
    return bytes(found["state"]["key"].astype(np.uint32).tobytes() + position.tobytes())


_SHARED = (Source(random.getstate, random.setstate), Source(_read_numpy, _legacy(np.random).set))
