"""The context of a forward beside its inputs and its module: autocast, the default device of new tensors, and modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from actstore.errors import StateError

_CPU = torch.device("cpu")
_OTHERS = frozenset({"torch", "actstore"})
_NOTHING = nullcontext()


class Autocast(NamedTuple):
    """The state of autocast for one type of devices."""

    kind: str
    enabled: bool
    dtype: torch.dtype


class Surroundings:
    """The autocast state, the default device and the modes of this thread, to run a forward under them again.

    Modes are those of the user's own: PyTorch's count and watch, and change no values.

    Notes
    -----
    Thread-safe. `again` acts on the thread that enters it.
    """

    __slots__ = ("_autocast", "_cache", "_device", "_modes")

    def __init__(self) -> None:
        self._autocast = _autocast()
        self._cache = torch.is_autocast_cache_enabled()
        self._device = _device_of(_device_context())
        self._modes = [(type(mode).__name__, ref(mode)) for mode in _modes()]

    @classmethod
    def now(cls, last: Surroundings | None) -> Surroundings:
        """Return the surroundings of now: `last`, if they are the same."""
        now = cls()
        return last if last is not None and now._all == last._all else now

    @property
    def _all(self) -> tuple[Any, ...]:
        return self._autocast, self._cache, self._device, self._modes

    def again(self) -> AbstractContextManager[Any]:
        """Return a context with this autocast state, and with gradients enabled."""
        known = zip(self._autocast, _autocast(), strict=True)
        states = [state for state, now in known if state != now or state.enabled]
        return self._again(states) if states else torch.enable_grad()

    @contextmanager
    def _again(self, states: Sequence[Autocast]) -> Iterator[None]:
        with torch.enable_grad(), ExitStack() as stack:
            for kind, enabled, dtype in states:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._cache))
            yield

    def placed(self) -> AbstractContextManager[Any]:
        """Return a context with this default device; an empty one where it is the default now."""
        now = _device_of(_device_context())
        return _NOTHING if now == self._device else self._device

    def under_modes(self) -> AbstractContextManager[Any]:
        """Return a context with these modes; an empty one without modes.

        Raises
        ------
        StateError : a mode is gone
        """
        return self._under_modes() if self._modes else _NOTHING

    @contextmanager
    def _under_modes(self) -> Iterator[None]:
        with ExitStack() as stack:
            there = _modes()
            for name, known in self._modes:
                mode = known()
                if mode is None:
                    raise StateError(
                        f"mode={name}: it was around the forward of a recomputed module and is gone in backward, where "
                        "the module would compute other values. Keep a reference to it until then, or write keep in "
                        "place of recompute."
                    )
                if all(mode is not each for each in there):
                    stack.enter_context(_entered(mode))
            yield


@cache
def _kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    others = () if accelerator is None or not torch.amp.is_autocast_available(accelerator.type) else (accelerator.type,)
    return "cpu", *others


def _autocast() -> list[Autocast]:
    return [Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds()]


def _device_of(context: Any) -> torch.device:
    device: torch.device = _CPU if context is None else context.device
    return device


def _modes() -> list[Any]:
    """Return the modes of the user's own, from the outermost one in: those of functions, and of operators."""
    functions = _get_current_function_mode_stack() if _len_torch_function_stack() else []
    operators = _get_current_dispatch_mode_stack() if _len_torch_dispatch_stack() else []
    modes: list[Any] = [*functions, *operators]
    return [mode for mode in modes if type(mode).__module__.partition(".")[0] not in _OTHERS]


@contextmanager
def _entered(mode: Any) -> Iterator[None]:
    """Enter a mode once more, without what its own `__enter__` does beside."""
    base: Any = TorchFunctionMode if isinstance(mode, TorchFunctionMode) else TorchDispatchMode
    base.__enter__(mode)
    try:
        yield
    finally:
        base.__exit__(mode, None, None, None)


def _device_context() -> Any:
    """Return the innermost ``with torch.device(...)``, or the one of `torch.set_default_device`."""
    if not _len_torch_function_stack():
        return None
    modes: list[Any] = _get_current_function_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, DeviceContext)), None)
