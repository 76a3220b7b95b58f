"""Has torch.compile leave the store's own code alone: what runs between compiled regions is not to be compiled."""

from __future__ import annotations

import sys
from typing import Any

from actstore.base import extensions

_PACKAGES = [
    "accuracy",
    "base",
    "codecs",
    "devices",
    "kernels",
    "model",
    "recompute",
    "session",
    "store",
    "tiers",
    "transfer",
]
# Without `tracker`, whose hooks are compiled with a model: they do nothing then.
_AUTOGRAD = ["census", "composite", "derived", "handles", "hooks", "protect", "readers", "regions"]
_OURS = [*_PACKAGES, *(f"autograd.{name}" for name in _AUTOGRAD)]
_told = set[str]()


def tell_compiler() -> None:
    """Tell the compiler, once it is there: importing it takes seconds, and that is left to who uses it."""
    rules = getattr(sys.modules.get("torch._dynamo"), "trace_rules", None)
    skip: Any = getattr(rules, "add", None)
    if skip is not None:
        for module in {*(f"actstore.{name}" for name in _OURS), *extensions.modules} - _told:
            _told.add(module)
            skip(module)
