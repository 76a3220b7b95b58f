"""The random generators that a recomputed forward draws from."""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C import _get_dispatch_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import Module, RNNBase

from actstore.model.names import is_of_torch


class GeneratorAccess(NamedTuple):
    """Functions that read and set the state of one generator. States compare with ``==``.

    `look` is a faster read. It assumes that code that has set the state since the last read has set a different one.
    """

    read: Callable[[], Any]
    set: Callable[[Any], object]
    look: Callable[[], Any]


class GeneratorStates:
    """The states of generators before a forward, so that it can draw the same numbers again.

    Known are torch's generators of the CPU and of `devices`, Python's, NumPy's global one, and generators that are
    attributes of modules or arguments, of `torch.Generator`, `random.Random`, `numpy.random.Generator` or
    `numpy.random.RandomState`. The states of generators that the forward did not draw from are dropped. For generators
    of modules and arguments `ended` does this; for the shared generators, the next forward, which reads the same
    state. Equal states are one object.

    Parameters
    ----------
    modules : the modules whose attributes are searched
    devices : accelerators, by device
    last : the states of the previous forward on this thread, if any
    arguments : the arguments of the forward, and generators that it reaches by other ways

    Dropout of cuDNN's recurrent layers has a state of its own, which nothing reads. It begins anew, by a number of the
    device's generator, in the first of these layers that runs after that generator's state was set. So it is set before
    the forward, too, where a module draws so.

    Notes
    -----
    Not thread-safe: numbers that other threads draw from the same generators during a recompute are drawn again.
    Several threads may rewind the same forward, each with its own result of `again`.
    """

    __slots__ = ("_before", "_begins_anew", "_ended", "_meanwhile", "_own")

    def __init__(
        self,
        modules: Sequence[Module],
        devices: Iterable[torch.device] = (),
        last: GeneratorStates | None = None,
        arguments: Sequence[Any] = (),
    ) -> None:
        self._meanwhile: Sequence[tuple[GeneratorAccess, Any]] = ()
        self._ended = False
        on_devices = [_device_source(device) for device in devices]
        self._begins_anew = bool(on_devices) and any(map(_drops_by_cudnn, modules))
        sources = (*_SHARED, *on_devices)
        self._before = {source: source.read() if last is None else source.look() for source in sources}
        if last is not None and last._ended:
            for source, state in self._before.items():
                if last._before.get(source, last) is state:
                    del last._before[source]
        self._own = tuple([(source, source.read()) for source in owned(modules, arguments)])
        if self._begins_anew:
            for source in on_devices:
                source.set(source.read())

    def ended(self) -> None:
        """Mark the end of the forward, and drop the states of own generators that it did not draw from."""
        self._own = tuple([(source, state) for source, state in self._own if source.read() != state])
        self._ended = True

    def now(self) -> list[tuple[GeneratorAccess, Any]]:
        """Return the states now of all generators that a forward which has not ended may draw from."""
        return [(source, source.look()) for source, _ in (*self._before.items(), *self._own)]

    def drawn(self, states: Iterable[tuple[GeneratorAccess, Any]]) -> None:
        """Note the states after a part of the forward that later runs leave out: they set these states in its place."""
        if self._begins_anew:
            for source, state in states:
                source.set(state)

    def again(self) -> GeneratorStates:
        """Return a twin with the same states, which can `rewind` and `resume` independently."""
        twin = object.__new__(GeneratorStates)
        twin._before, twin._ended, twin._own, twin._meanwhile = self._before, self._ended, self._own, ()
        twin._begins_anew = self._begins_anew
        return twin

    def rewind(self) -> None:
        """Set the states from before the forward, until `resume`."""
        states = [*self._before.copy().items(), *self._own]
        self._meanwhile = [(source, source.read()) for source, _ in states]
        for (source, state), (_, now) in zip(states, self._meanwhile, strict=True):
            if now is not state:
                source.set(state)

    def resume(self) -> None:
        """Set the states from before `rewind`."""
        for source, state in self._meanwhile:
            if source.read() is not state:
                source.set(state)
        self._meanwhile = ()


def _drops_by_cudnn(module: Module) -> bool:
    return isinstance(module, RNNBase) and module.dropout > 0 and module.training


def owned(modules: Iterable[Module], others: Iterable[Any] = ()) -> list[GeneratorAccess]:
    """Return the generators among `others`, attributes of modules, and what is in lists, dicts and tuples of these."""
    modules = list(modules)
    values = list(chain.from_iterable([vars(module).values() for module in modules]))
    for module in modules:
        kind: Any = type(module)
        if not is_of_torch(kind):
            held = [value for name, value in vars(module).items() if name not in _OF_MODULES]
            values += chain.from_iterable(
                value.values() if isinstance(value, dict) else value for value in held if type(value) in _HOLDERS
            )
    return _sources_of([*values, *others])


_OF_MODULES = frozenset(vars(Module()))  # attributes of PyTorch's own
_HOLDERS = frozenset({list, dict, tuple})  # whose parts are seen, too


def _sources_of(values: Sequence[Any]) -> list[GeneratorAccess]:
    kinds = {kind for kind in set(map(type, values)) if has_state(kind)}  # one check a class, not a value
    return [*map(_source_of, {id(value): value for value in values if type(value) in kinds}.values())] if kinds else []


@lru_cache(maxsize=4096)
def has_state(kind: Hashable) -> bool:
    """Return whether instances of a class are generators that repeat their numbers from the same state."""
    return isinstance(kind, type) and issubclass(kind, _CLASSES) and not issubclass(kind, random.SystemRandom)


def _source_of(generator: Any) -> GeneratorAccess:
    if isinstance(generator, torch.Generator):
        return _source(
            lambda: _state_of(generator),
            lambda state: _set_state(generator, state),
        )
    if isinstance(generator, random.Random):
        return _source(generator.getstate, generator.setstate)
    if isinstance(generator, np.random.RandomState):
        return _source(
            lambda: pickle.dumps(generator.get_state(legacy=False)),
            lambda state: generator.set_state(pickle.loads(state)),
        )
    bits = generator.bit_generator
    return _source(lambda: pickle.dumps(bits.state), lambda state: setattr(bits, "state", pickle.loads(state)))


def _source(read: Callable[[], Any], put: Callable[[Any], object]) -> GeneratorAccess:
    return GeneratorAccess(read, put, read)


def _state_of(generator: torch.Generator) -> bytes:
    if _get_dispatch_mode(_FAKE) is None:
        return generator.get_state().numpy().tobytes()
    with unset_fake_temporarily():  # a mode that makes all new tensors fake leaves generators real
        return generator.get_state().numpy().tobytes()


def _set_state(generator: torch.Generator, state: bytes) -> None:
    with unset_fake_temporarily():
        generator.set_state(_tensor_of(state))


def _tensor_of(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _shared(source: GeneratorAccess) -> GeneratorAccess:
    """Return the same source, with equal consecutive states given as one object."""
    known: Any = None  # the first of these states,
    last: Any = None  # and the last: a look at an unchanged state is the same object, and needs no comparison

    def same(read: Callable[[], Any]) -> Any:
        nonlocal known, last
        before, state = known, read()
        if state is last or state == before:
            last = state
            return before
        known = last = state
        return state

    return GeneratorAccess(partial(same, source.read), source.set, partial(same, source.look))


class _TorchGlobal:
    """PyTorch's generator of the CPU. A `look` at an unchanged state copies it once, a read twice."""

    def __init__(self) -> None:
        self._known = b""

    def read(self) -> bytes:
        self._known = _state_of(torch.default_generator)
        return self._known

    def look(self) -> bytes:
        if _get_dispatch_mode(_FAKE) is None and _is_same(self._known, torch.default_generator.get_state().numpy()):
            return self._known
        return self.read()


class _PythonGlobal:
    """Python's global generator. A read of its state takes 20 us; a `look` at an unchanged state takes 1 us.

    The state consists of the words of a Mersenne twister and, at times, a buffered normal number. CPython has the words
    at the end of an object. Where they are not found there, `look` reads all.
    """

    def __init__(self) -> None:
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
        self._known: tuple[bytes, Any] | None = None
        self._words = self._find_words()

    def read(self) -> Any:
        words = b"" if self._words is None else bytes(self._words)
        state = random.getstate()
        self._known = (words, state) if words and _is_same(words, self._words) else None
        return state

    def look(self) -> Any:
        known = self._known
        if known is not None and known[1][2] is self._generator.gauss_next and _is_same(known[0], self._words):
            return known[1]
        return self.read()

    def set(self, state: Any) -> None:
        self._known = None
        random.setstate(state)

    def _find_words(self) -> Any:
        """Return the memory of the position in the words, and of the words; None where they are not found."""
        base: Any = random.Random.__base__
        if sys.implementation.name != "cpython" or base.__basicsize__ < object.__basicsize__ + _MT19937_NBYTES:
            return None
        memory = _memory(id(self._generator) + object.__basicsize__)
        *words, position = random.getstate()[1]
        return memory if _is_same(struct.pack(f"{1 + len(words)}I", position, *words), memory) else None


class _NumpyGlobal:
    """NumPy's global generator. A read of its state takes 30 us; a `look` at an unchanged state takes 1 us.

    The state consists of the words of the bit generator and, at times, a buffered normal number (they are drawn in
    pairs). A draw cannot buffer a number and leave the words as they are. While a number is buffered, `look` reads all.
    """

    def __init__(self) -> None:
        self._known: tuple[int, bytes, bytes] | None = None

    def read(self) -> bytes:
        address = self._address()
        words = bytes(_memory(address)) if address else b""
        full: Any = _numpy_random.get_state(legacy=False)
        state = pickle.dumps(full)
        stable = words and not full["has_gauss"] and self._address() == address and _is_same(words, _memory(address))
        self._known = (address, words, state) if stable else None
        return state

    def look(self) -> bytes:
        known = self._known
        if known is not None and known[0] == self._address() and _is_same(known[1], _memory(known[0])):
            return known[2]
        return self.read()

    def set(self, state: bytes) -> None:
        self._known = None
        _numpy_random.set_state(pickle.loads(state))

    @staticmethod
    def _address() -> int:
        """Return the address of the words of a Mersenne twister and its position; 0 for another generator."""
        bits = _numpy_random.get_bit_generator()
        address: int = bits.ctypes.state_address if type(bits) is np.random.MT19937 else 0
        return address


@lru_cache(maxsize=16)
def _memory(address: int) -> Any:
    """Return the memory of a Mersenne twister."""
    return (ctypes.c_char * _MT19937_NBYTES).from_address(address)


def _is_same(known: bytes, memory: Any) -> bool:
    """Return whether a buffer of as many bytes has these bytes, without a copy of it."""
    return known.startswith(memory)


@cache
def _device_source(device: torch.device) -> GeneratorAccess:
    module: Any = torch.get_device_module(device)
    generators: Any = getattr(module, "default_generators", None)  # CUDA and XPU; one for each device
    if generators:
        return _shared(_source_of(generators[device.index]))
    return _shared(
        _source(
            lambda: module.get_rng_state().cpu().numpy().tobytes(),
            lambda state: module.set_rng_state(_tensor_of(state)),
        )
    )


_numpy_random: Any = np.random
_CLASSES = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_MT19937_NBYTES = 625 * 4  # of the structs of NumPy and CPython: 624 words and the position in them
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_torch = _TorchGlobal()
_python = _PythonGlobal()
_numpy = _NumpyGlobal()
_SHARED = (
    _shared(GeneratorAccess(_torch.read, partial(_set_state, torch.default_generator), _torch.look)),
    _shared(GeneratorAccess(_python.read, _python.set, _python.look)),
    _shared(GeneratorAccess(_numpy.read, _numpy.set, _numpy.look)),
)
