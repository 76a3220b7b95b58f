"""Settings of PyTorch on which the operators of a forward and their bits depend, and modes of the user's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from itertools import product
from operator import call
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from actstore.base import cpu_threads
from actstore.errors import StateError
from actstore.model.snapshot import AS_IT_IS, Snapshot

_torch_c: Any = torch._C
_HAS_CUDA = torch.backends.cuda.is_built()
_CPU = torch.device("cpu")
_OTHERS = frozenset({"torch", "actstore"})


class Setting(NamedTuple):
    """One setting: its name, and the functions that read it and set it. None sets it that is compared only."""

    name: str
    read: Callable[[], Any]
    set: Callable[[Any], object] | None


class TorchSettings(Snapshot):
    """PyTorch's settings when this object is made: of the process, and of this thread.

    They are the number of CPU threads, whether these flush denormals, the default dtype, deterministic algorithms, the
    backends of attention, cuDNN and oneDNN, the precision of float32 products, autocast, and the default device. The
    precision is compared only: its parts inherit from each other, and one that is set back to a value no longer does.

    Notes
    -----
    Thread-safe. `rewound` acts on the thread that enters it.
    """

    __slots__ = ("_values",)

    def __init__(self, values: list[Any]) -> None:
        self._values = values  # in the order of `_reads`

    @classmethod
    def now(cls, last: TorchSettings | None) -> TorchSettings:
        """Return the settings of now: `last`, if they are the same."""
        values = _now()
        return last if last is not None and values == last._values else cls(values)

    def rewound(self) -> AbstractContextManager[Any]:
        """Return a context with these settings, and with gradients enabled.

        Raises
        ------
        StateError : the precision of float32 products is another one
        """
        cpu_threads.settle()  # else an operator of the second run might do so half way
        now = _now()
        if now == self._values and not any(now[_AUTOCAST:-1:2]):
            return _GradientsEnabled()
        return self._placed(now)

    @contextmanager
    def _placed(self, now: list[Any]) -> Iterator[None]:
        with _GradientsEnabled(), ExitStack() as stack:
            threads, device = self._values[_THREADS], self._values[_DEVICE]
            if now[_THREADS] != threads:
                stack.enter_context(cpu_threads.using(threads))
            for setting, was, found in zip(_SETTINGS, self._values, now, strict=False):
                if was == found:
                    continue
                if setting.set is None:
                    raise StateError(
                        f"the precision of float32 products changed between forward and backward: {setting.name} was "
                        f"{was!r} and is {found!r}, so that a recomputed module would compute other values. Set it "
                        "before the first forward, and leave it until the last backward."
                    )
                stack.callback(setting.set, found)
                setting.set(was)
            if now[_DEVICE] != device:
                stack.enter_context(device or _CPU)
            self._enter_autocast(stack, now)
            yield

    def _enter_autocast(self, stack: ExitStack, now: list[Any]) -> None:
        caches = self._values[-1]
        for kind, i in zip(_kinds(), range(_AUTOCAST, len(now) - 1, 2), strict=True):
            enabled, dtype = was = self._values[i : i + 2]
            if enabled or was != now[i : i + 2]:
                stack.enter_context(torch.autocast(kind, dtype, enabled, caches))


class _GradientsEnabled:
    """Context with gradients enabled, faster than `torch.enable_grad`."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


class UserModes(Snapshot):
    """The modes of the user's own on this thread. PyTorch's count and watch, and change no values."""

    __slots__ = ("_modes",)

    def __init__(self) -> None:
        self._modes = [(type(mode).__name__, ref(mode)) for mode in _modes()]

    def rewound(self) -> AbstractContextManager[Any]:
        """Return a context with these modes.

        Raises
        ------
        StateError : a mode is gone
        """
        return self._entered() if self._modes else AS_IT_IS

    @contextmanager
    def _entered(self) -> Iterator[None]:
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


@cache
def _reads() -> tuple[Callable[[], Any], ...]:
    """Return what reads all settings: `_SETTINGS`, the number of CPU threads, the default device, and autocast.

    The device is that of the innermost ``with torch.device(...)`` or `torch.set_default_device`; 0 without one.

    Autocast is, for each kind of device, whether it is enabled and its dtype there; at last its cache.
    """
    reads = [partial(read, kind) for kind in _kinds() for read in (torch.is_autocast_enabled, torch.get_autocast_dtype)]
    others = (cpu_threads.number, _len_torch_function_stack, *reads, torch.is_autocast_cache_enabled)
    return *(setting.read for setting in _SETTINGS), *others


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


def _now() -> list[Any]:
    """Return the values of all settings."""
    values = [*map(call, _reads())]
    if values[_DEVICE]:
        modes: list[Any] = _get_current_function_mode_stack()
        values[_DEVICE] = next((mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), 0)
    return values


def _of_torch(name: str, read: str, put: str) -> list[Setting]:
    """Return a setting of PyTorch's C module, if this version has it."""
    has_it = hasattr(_torch_c, read) and hasattr(_torch_c, put)
    return [Setting(name, getattr(_torch_c, read), getattr(_torch_c, put))] if has_it else []


_ALWAYS = (
    ("flash attention", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("memory-efficient attention", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("attention by products", "_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("attention of a backend of yours", "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("order of attentions", "_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("oneDNN", "_get_mkldnn_enabled", "_set_mkldnn_enabled"),
)
_WITH_CUDA = (
    ("attention of cuDNN", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("cuDNN", "_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("cuDNN's search", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("deterministic cuDNN", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
)
_SMALLEST = sys.float_info.min  # half of it is subnormal
_SETTINGS = (
    Setting("flushed denormals", lambda: _SMALLEST * 0.5 == 0.0, torch.set_flush_denormal),
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting(
        "deterministic algorithms",
        _torch_c._get_deterministic_algorithms,
        lambda on: _torch_c._set_deterministic_algorithms(
            on, warn_only=_torch_c._get_deterministic_algorithms_warn_only()
        ),
    ),
    Setting(
        "warnings of algorithms that are not deterministic",
        _torch_c._get_deterministic_algorithms_warn_only,
        lambda warns: _torch_c._set_deterministic_algorithms(_torch_c._get_deterministic_algorithms(), warn_only=warns),
    ),
    *(setting for each in (*_ALWAYS, *(_WITH_CUDA if _HAS_CUDA else ())) for setting in _of_torch(*each)),
    *(
        Setting(".".join(place), partial(_torch_c._get_fp32_precision_getter, *place), None)
        for place in product(("mkldnn", "cuda") if _HAS_CUDA else ("mkldnn",), ("matmul", "conv", "rnn"))
        if hasattr(_torch_c, "_get_fp32_precision_getter")
    ),
)
_THREADS = len(_SETTINGS)  # places in the values: these, the number of threads,
_DEVICE = _THREADS + 1  # the default device,
_AUTOCAST = _DEVICE + 1  # and autocast
