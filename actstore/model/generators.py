"""The random generators that a recomputed forward draws from."""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _get_dispatch_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import Module, RNNBase

from actstore.model.names import is_of_torch
from actstore.model.snapshot import AS_IT_IS, Snapshot


class GeneratorAccess:
    """Functions that read and set the state of one generator. States compare with ``==``."""

    __slots__ = ("read", "set")

    def __init__(self, read: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self.read = read
        self.set = put


class SharedGenerator(ABC):
    """The state of a generator of the process. Equal consecutive states are one object."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: tuple[Any, Any] = None, None  # the last state, after the words that tell whether it is the same

    def read(self) -> Any:
        """Return the state."""
        words, state = self._read()
        known = self._known[1]
        self._known = words, known if state == known else state  # at once: other threads read it
        return self._known[1]

    def look(self) -> Any:
        """Return the state, faster: code that has set it since the last read must have set a different one."""
        return self.read()

    @abstractmethod
    def _read(self) -> tuple[Any, Any]:
        """Return the words that tell a change, if there are any, and the state."""

    @abstractmethod
    def set(self, state: Any) -> None:
        """Set a state that was read."""


Generator = GeneratorAccess | SharedGenerator


class GeneratorStates(Snapshot):
    """The states of generators before a forward, so that it can draw the same numbers again.

    They are torch's generators of the CPU and of `devices`, Python's, NumPy's global one, and generators that are
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
    """

    __slots__ = ("_before", "_begins_anew", "_ended", "_own")

    def __init__(
        self,
        modules: Sequence[Module],
        devices: Iterable[torch.device] = (),
        last: GeneratorStates | None = None,
        arguments: Sequence[Any] = (),
    ) -> None:
        self._ended = False
        on_devices = [_device_generator(device) for device in devices]
        self._begins_anew = bool(on_devices) and any(map(_drops_by_cudnn, modules))
        sources = (*_GLOBALS, *on_devices) if on_devices else _GLOBALS
        self._before: dict[SharedGenerator, Any] = {}
        for source in sources:
            self._before[source] = source.read() if last is None else source.look()
        if last is not None and last._ended:
            last._drop(self._before)
        self._own: list[tuple[GeneratorAccess, Any]] = []
        if modules or any(map(has_state, map(type, arguments))):
            self._own = [(source, source.read()) for source in owned(modules, arguments)]
        if self._begins_anew:
            for source in on_devices:
                source.set(source.read())

    def ended(self) -> None:
        """Mark the end of the forward, and drop the states of own generators that it did not draw from."""
        if self._own:
            self._own = [(source, state) for source, state in self._own if source.read() != state]
        self._ended = True

    def _drop(self, now: dict[SharedGenerator, Any]) -> None:
        """Drop the states that are those of now."""
        for source, state in now.items():
            if self._before.get(source, self) is state:
                del self._before[source]

    def drop_unchanged(self) -> None:
        """Drop the states of shared generators that are those of now, if the forward has ended: it did not draw."""
        if self._ended:
            self._drop({source: source.look() for source in self._before})

    def now(self) -> list[tuple[Generator, Any]]:
        """Return the states now of all generators that a forward which has not ended may draw from."""
        shared: list[tuple[Generator, Any]] = [(source, source.look()) for source in self._before]
        return shared + [(source, source.read()) for source, _ in self._own]

    def drawn(self, before: Iterable[tuple[Generator, Any]]) -> list[tuple[Generator, Any]]:
        """Return the states of generators from which a part of the forward has drawn since `before`, the states then.

        Later runs leave the part out, and set these states in its place.
        """
        states = [now for now, (_, was) in zip(self.now(), before, strict=True) if now[1] != was]
        if self._begins_anew:
            for source, state in states:
                source.set(state)
        return states

    def rewind(self) -> list[tuple[Generator, Any]]:
        """Set the states from before the forward. Returns those of now."""
        states: list[tuple[Generator, Any]] = [*self._before.copy().items(), *self._own]
        meanwhile: list[tuple[Generator, Any]] = []
        for source, state in states:
            meanwhile.append((source, now := source.read()))
            if now is not state:
                source.set(state)
        return meanwhile

    def rewound(self) -> AbstractContextManager[None]:
        return self._rewound() if self._before or self._own else AS_IT_IS

    @contextmanager
    def _rewound(self) -> Iterator[None]:
        meanwhile = self.rewind()
        try:
            yield
        finally:
            resume(meanwhile)


def resume(states: Iterable[tuple[Generator, Any]]) -> None:
    """Set the states that generators had before a rewind."""
    for source, state in states:
        now = source.look() if isinstance(source, SharedGenerator) else source.read()
        if now is not state:
            source.set(state)


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
        return GeneratorAccess(partial(_state_of, generator), partial(_set_state, generator))
    if isinstance(generator, random.Random):
        return GeneratorAccess(generator.getstate, generator.setstate)
    if isinstance(generator, np.random.RandomState):
        return GeneratorAccess(
            lambda: pickle.dumps(generator.get_state(legacy=False)),
            lambda state: generator.set_state(pickle.loads(state)),
        )
    bits = generator.bit_generator
    return GeneratorAccess(lambda: pickle.dumps(bits.state), lambda state: setattr(bits, "state", pickle.loads(state)))


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


class _TorchGlobal(SharedGenerator):
    """PyTorch's generator of the CPU. A `look` at an unchanged state copies it once, a read twice."""

    def look(self) -> Any:
        known = self._known[1]
        same = known is not None and _get_dispatch_mode(_FAKE) is None
        return known if same and known.startswith(torch.default_generator.get_state().numpy()) else self.read()

    def _read(self) -> tuple[None, bytes]:
        return None, _state_of(torch.default_generator)

    def set(self, state: bytes) -> None:
        _set_state(torch.default_generator, state)


class _PythonGlobal(SharedGenerator):
    """Python's global generator. A read of its state takes 20 us; a `look` at an unchanged state takes 1 us.

    The state consists of the words of a Mersenne twister and, at times, a buffered normal number. CPython has the words
    at the end of an object. Where they are not found there, `look` reads all.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
        self._words = self._find_words()

    def look(self) -> Any:
        words, state = self._known
        if words and state[2] is self._generator.gauss_next and words.startswith(self._words):
            return state
        return self.read()

    def _read(self) -> tuple[bytes, Any]:
        words = b"" if self._words is None else bytes(self._words)
        state = random.getstate()
        return words if words and words.startswith(self._words) else b"", state

    def set(self, state: Any) -> None:
        self._known = b"", self._known[1]
        random.setstate(state)

    def _find_words(self) -> Any:
        """Return the memory of the position in the words, and of the words; None where they are not found."""
        base: Any = random.Random.__base__
        if sys.implementation.name != "cpython" or base.__basicsize__ < object.__basicsize__ + _MT19937_NBYTES:
            return None
        memory = _memory(id(self._generator) + object.__basicsize__)
        *words, position = random.getstate()[1]
        return memory if struct.pack(f"{1 + len(words)}I", position, *words).startswith(memory) else None


class _NumpyGlobal(SharedGenerator):
    """NumPy's global generator. A read of its state takes 40 us; a `look` at an unchanged state takes 1 us.

    The state consists of the words of the bit generator and, at times, a buffered normal number (they are drawn in
    pairs). A draw cannot buffer a number and leave the words as they are. While a number is buffered, `look` reads all.
    """

    def look(self) -> Any:
        words, state = self._known
        if words is not None and words[0] == self._address() and words[1].startswith(_memory(words[0])):
            return state
        return self.read()

    def _read(self) -> tuple[tuple[int, bytes] | None, Any]:
        address = self._address()
        if not address:
            return None, pickle.dumps(_numpy_random.get_state(legacy=False))
        words = bytes(_memory(address))
        name, key, position, has_gauss, gauss = _numpy_random.get_state()
        stable = not has_gauss and self._address() == address and words.startswith(_memory(address))
        return (address, words) if stable else None, (name, key.tobytes(), position, has_gauss, gauss)

    def set(self, state: Any) -> None:
        self._known = None, self._known[1]
        if isinstance(state, bytes):
            _numpy_random.set_state(pickle.loads(state))
        else:
            name, key, *rest = state
            _numpy_random.set_state((name, np.frombuffer(key, np.uint32), *rest))

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


class _DeviceGlobal(SharedGenerator):
    """The generator of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        module: Any = torch.get_device_module(device)
        generators: Any = getattr(module, "default_generators", None)  # CUDA and XPU; one for each device
        if generators:
            self._own = _source_of(generators[device.index])
        else:
            self._own = GeneratorAccess(
                lambda: module.get_rng_state().cpu().numpy().tobytes(),
                lambda state: module.set_rng_state(_tensor_of(state)),
            )

    def _read(self) -> tuple[None, Any]:
        return None, self._own.read()

    def set(self, state: Any) -> None:
        self._own.set(state)


@cache
def _device_generator(device: torch.device) -> SharedGenerator:
    return _DeviceGlobal(device)


_numpy_random: Any = np.random
_CLASSES = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_MT19937_NBYTES = 625 * 4  # of the structs of NumPy and CPython: 624 words and the position in them
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_GLOBALS: tuple[SharedGenerator, ...] = (_TorchGlobal(), _PythonGlobal(), _NumpyGlobal())
