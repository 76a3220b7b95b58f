"""Settings of PyTorch for the process, on which the operators of a forward and their bits depend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch

from actstore.base import cpu_threads
from actstore.errors import StateError

_torch_c: Any = torch._C
_HAS_CUDA = torch.backends.cuda.is_built()
_NOTHING = nullcontext()


class Switch(NamedTuple):
    """One setting: its name, and the functions that read it and set it."""

    name: str
    read: Callable[[], Any]
    set: Callable[[Any], object]


class Switches:
    """The settings when this object is made, for a forward that runs again later.

    They are the number of CPU threads, whether these flush denormals, the default dtype, deterministic algorithms, the
    backends of attention, cuDNN and oneDNN, and the precision of float32 products. The last one is compared only: its
    parts inherit from each other, and one that is set back to a value no longer does.
    """

    __slots__ = ("_precisions", "_states", "_threads")

    def __init__(self) -> None:
        self._states, self._precisions, self._threads = _states(), _precisions(), cpu_threads.number()

    @classmethod
    def now(cls, last: Switches | None) -> Switches:
        """Return the settings of now: `last`, if they are the same."""
        now = cls()
        return last if last is not None and now._same(last) else now

    def _same(self, other: Switches) -> bool:
        same = self._states == other._states and self._threads == other._threads
        return same and self._precisions == other._precisions

    def again(self) -> AbstractContextManager[None]:
        """Return a context with these settings; those of now come back afterwards.

        Raises
        ------
        StateError : the precision of float32 products is another one
        """
        cpu_threads.settle()  # else an operator of the second run might do so half way
        now = Switches()
        if now._precisions != self._precisions:
            place, was, found = next(
                each for each in zip(_PRECISIONS, self._precisions, now._precisions, strict=True) if each[1] != each[2]
            )
            raise StateError(
                f"the precision of float32 products changed between forward and backward: {'.'.join(place)} was "
                f"{was!r} and is {found!r}, so that a recomputed module would compute other values. Set it before the "
                "first forward, and leave it until the last backward."
            )
        return _NOTHING if now._same(self) else self._placed(now)

    @contextmanager
    def _placed(self, now: Switches) -> Iterator[None]:
        with ExitStack() as stack:
            if now._threads != self._threads:
                stack.enter_context(cpu_threads.using(self._threads))
            for switch, was, found in zip(_SWITCHES, self._states, now._states, strict=True):
                if was != found:
                    stack.callback(switch.set, found)
                    switch.set(was)
            yield


def _states() -> tuple[Any, ...]:
    return tuple([read() for read in _READS])


def _precisions() -> tuple[str, ...]:
    return tuple([_torch_c._get_fp32_precision_getter(*place) for place in _PRECISIONS])


def _of_torch(name: str, read: str, put: str) -> list[Switch]:
    """Return a switch of PyTorch's C module, if this version has it."""
    has_it = hasattr(_torch_c, read) and hasattr(_torch_c, put)
    return [Switch(name, getattr(_torch_c, read), getattr(_torch_c, put))] if has_it else []


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
_SWITCHES = (
    Switch("flushed denormals", lambda: _SMALLEST * 0.5 == 0.0, torch.set_flush_denormal),
    Switch("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Switch(
        "deterministic algorithms",
        lambda: (_torch_c._get_deterministic_algorithms(), _torch_c._get_deterministic_algorithms_warn_only()),
        lambda state: _torch_c._set_deterministic_algorithms(state[0], warn_only=state[1]),
    ),
    *(switch for each in (*_ALWAYS, *(_WITH_CUDA if _HAS_CUDA else ())) for switch in _of_torch(*each)),
)
_READS = tuple(switch.read for switch in _SWITCHES)
_PRECISIONS = (
    tuple(product(("mkldnn", "cuda") if _HAS_CUDA else ("mkldnn",), ("matmul", "conv", "rnn")))
    if hasattr(_torch_c, "_get_fp32_precision_getter")
    else ()
)
