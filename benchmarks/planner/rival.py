"""PyTorch's `activation_memory_budget`, as a backend of `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config


def rival(share: float, backend: str, mode: str = "") -> Callable[..., Any]:
    """Return a backend with PyTorch's budget: a share of the bytes that backward may get from forward.

    `mode` is Inductor's.

    A model of the same class runs no code that Dynamo has compiled for another backend: under the name of one backend,
    with the budget as a setting, it would run plain's.
    """
    compile_graph: Callable[..., Any] = torch._dynamo.lookup_backend(backend)
    if mode:
        compile_graph = torch._TorchCompileInductorWrapper(mode, None, None)

    def compiled_within(*args: Any, **kwargs: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=share):
            return compile_graph(*args, **kwargs)

    return compiled_within
