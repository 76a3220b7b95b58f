"""actstore under torch.compile: modules that it must not compile, and its modes that trace."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch._C import _get_dispatch_mode

from actstore.base import extensions

_PACKAGES = [
    "accuracy",
    "base",
    "codecs",
    "compiled",
    "devices",
    "kernels",
    "model",
    "recompute",
    "store",
    "tiers",
    "transfer",
]
# Without `modules`, whose hooks are compiled with a model (they do nothing then), and `tagging`, which models call.
_AUTOGRAD = [
    "composite",
    "deciders",
    "derived",
    "encoder",
    "handles",
    "hooks",
    "protect",
    "readers",
    "regions",
    "sharing",
    "storages",
    "unpack",
    "verdict",
]
_KERNEL_COMPILER = ["numba", "llvmlite"]  # torch.compile recurses without end in llvmlite's constants
_SESSION = [file.stem for file in Path(__file__).parents[1].glob("session/[!_]*.py") if file.stem != "tagging"]
_OURS = [*_PACKAGES, *(f"autograd.{name}" for name in _AUTOGRAD), *(f"session.{name}" for name in _SESSION)]
_told = set[str]()


def tell_compiler() -> None:
    """Tell the compiler to skip these modules, once it is imported. The import takes seconds: only its user pays it."""
    rules = getattr(sys.modules.get("torch._dynamo"), "trace_rules", None)
    skip: Any = getattr(rules, "add", None)
    if skip is not None:
        for module in {*(f"actstore.{name}" for name in _OURS), *_KERNEL_COMPILER, *extensions.modules} - _told:
            _told.add(module)
            skip(module)


_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


def is_traced() -> bool:
    """Return whether a compiler's mode is active, whose tensors have no values."""
    return any(_get_dispatch_mode(mode) is not None for mode in _TRACING)
