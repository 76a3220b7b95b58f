"""The names of a model's modules, without the levels that wrappers add."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.nn import Module

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def named_modules(model: Module) -> list[tuple[str, Module]]:
    """(name, module), each module once, parents before children; without the levels that wrappers add to names.

    Each entry of a store asks for them: `Module.named_modules`, with its names shortened afterwards, takes three times
    as long.
    """
    names = {model: ""}

    def visit(module: Module, name: str) -> None:
        kind: Any = type(module)
        unnamed = _wrapped_in(kind)
        for last, child in module._modules.items():
            if child is not None and child not in names:
                added = last not in _WRAPPERS and last not in unnamed
                names[child] = inner = (f"{name}.{last}" if name else last) if added else name
                if child._modules:
                    visit(child, inner)

    visit(model, "")
    return [(name, module) for module, name in names.items()]


@cache
def _wrapped_in(kind: type[Module]) -> tuple[str, ...]:
    """Attributes of a wrapper that are no part of its model's names: those of DDP, DeepSpeed, and PEFT."""
    names = {base.__name__ for base in kind.__mro__}
    if names & {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine"}:
        return ("module",)
    if "PeftModel" in names:
        return ("base_model",)
    return ("model",) if "BaseTuner" in names else ()
