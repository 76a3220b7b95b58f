"""The names of a model's modules, without the levels that wrappers add."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.nn import Module

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_OWN_PACKAGES = frozenset({"torch", "builtins", "abc", "typing", "collections"})


@cache
def is_of_torch(kind: Any) -> bool:
    """Return whether a class of modules and all of its bases are PyTorch's own."""
    return all(base.__module__.partition(".")[0] in _OWN_PACKAGES for base in kind.__mro__)


def named_modules(model: Module) -> list[tuple[str, Module]]:
    """Return (name, module) pairs, each module once, parents before children, without the name levels of wrappers.

    Each entry of a store calls this. `Module.named_modules`, with its names shortened afterwards, takes three times as
    long.
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


def names_by_caller(named: list[tuple[str, Module]]) -> dict[Module, dict[str, str]]:
    """Return the names of modules without children that several modules have, by the name of the one that has them.

    Parameters
    ----------
    named : as `named_modules` returns
    """
    found: dict[Module, dict[str, str]] = {}
    for name, module in named:
        for last, child in module._modules.items():
            if child is not None and not child._modules:
                found.setdefault(child, {}).setdefault(name, f"{name}.{last}" if name else last)
    return {child: names for child, names in found.items() if len(names) > 1}


@cache
def _wrapped_in(kind: type[Module]) -> tuple[str, ...]:
    """Return the attributes of a wrapper that its model's names leave out: those of DDP, DeepSpeed, Fabric, PEFT."""
    names = {base.__name__ for base in kind.__mro__}
    if names & {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine"}:
        return ("module",)
    if "_FabricModule" in names:
        return ("_forward_module",)
    if "PeftModel" in names:
        return ("base_model",)
    return ("model",) if "BaseTuner" in names else ()
