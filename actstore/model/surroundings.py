"""The context of a forward beside its inputs and its module: autocast, and the default device of new tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_CPU = torch.device("cpu")
_NOTHING = nullcontext()


class Autocast(NamedTuple):
    """The state of autocast for one type of devices."""

    kind: str
    enabled: bool
    dtype: torch.dtype


class Surroundings:
    """The autocast state and the default device of this thread, to run a forward under them again.

    Notes
    -----
    Thread-safe. `again` acts on the thread that enters it.
    """

    __slots__ = ("_autocast", "_cache", "_device")

    def __init__(self) -> None:
        self._autocast = _autocast()
        self._cache = torch.is_autocast_cache_enabled()
        self._device = _device_of(_device_context())

    @classmethod
    def now(cls, last: Surroundings | None) -> Surroundings:
        """Return the surroundings of now: `last`, if they are the same."""
        now = cls()
        if last is None or (now._autocast, now._cache, now._device) != (last._autocast, last._cache, last._device):
            return now
        return last

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


def _device_context() -> Any:
    """Return the innermost ``with torch.device(...)``, or the one of `torch.set_default_device`."""
    if not _len_torch_function_stack():
        return None
    modes: list[Any] = _get_current_function_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, DeviceContext)), None)
