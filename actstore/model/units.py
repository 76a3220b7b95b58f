"""The units of a model, each planned as one, found from the model's structure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch.jit import ScriptModule
from torch.nn import Module, ModuleDict, ModuleList, Sequential

from actstore.model.blocks import has_forward, repeated_blocks
from actstore.model.names import named_modules

RULE_NAME = re.compile(r"[\w.-]+")  # the names that the grammar of rules accepts


@dataclass(frozen=True)
class Shape:
    """A unit found from the model's structure: its modules, and whether it is one of the model's repeated blocks."""

    name: str
    module: Module
    parts: dict[str, Module]
    repeated: bool

    @property
    def named(self) -> bool:
        """True where a rule can name the unit."""
        return RULE_NAME.fullmatch(self.name) is not None

    @property
    def recomputable(self) -> bool:
        return self.repeated and self.named and can_run_again(self.module)

    @property
    def inner(self) -> dict[str, Module]:
        """The parts of the unit by their full names."""
        return {f"{self.name}.{name}": part for name, part in self.parts.items()}


def shapes_of(model: Module) -> list[Shape]:
    """Return the units of a model: its repeated blocks, the outermost modules without a block inside, and the model.

    A module without a forward of its own (a list of lists, a dict) gives the units inside it. A compiled module is one
    unit without parts. Parts leave out a module that several others have: rules name it in the first one alone.
    """
    named = dict(named_modules(model))
    names = {module: name for name, module in named.items()}
    blocks = {named[name] for name in repeated_blocks(model)}
    whole = set(_compiled(model))
    parents = Counter(child for module in model.modules() for child in module.children())
    found: list[Shape] = []

    def parts_of(unit: Module) -> dict[str, Module]:
        return {name: part for name, part in _parts(unit).items() if parents[part] == 1}

    def visit(module: Module, repeated: bool) -> None:
        for child in module.children():
            block = child in blocks or (repeated and next(child.parameters(), None) is not None)
            if not has_forward(child):
                visit(child, block)
            elif child in whole or block or not blocks.intersection(child.modules()):
                if child in names:
                    found.append(Shape(names[child], child, {} if child in whole else parts_of(child), block))
            else:
                visit(child, False)

    if model not in whole and original(model) is None:
        visit(model, False)
    return [*(shape for shape in found if shape.name), Shape("", model, {}, False)]


def original(module: Module) -> Module | None:
    """Return the module that `torch.compile(module)` was given; None for another module."""
    inner: dict[str, Any] = dict(module._modules.items())  # `_modules` of a TorchScript module is not a dict
    return inner.get("_orig_mod")


def _compiled(model: Module) -> Iterator[Module]:
    for module in model.modules():
        inner = original(module)
        if inner is not None:
            yield inner
        elif module._compiled_call_impl is not None:
            yield module


def can_run_again(module: Module) -> bool:
    """Return whether the module's forward can run again in backward, as far as its structure tells."""
    if any(isinstance(inner, ScriptModule) for inner in module.modules()) or any(_compiled(module)):
        return False  # checkpoint rejects ScriptModules, and runs compiled modules eagerly: other last bits
    while isinstance(module, Sequential) and len(module):
        module = module[0]
    return not getattr(module, "inplace", False)  # an in-place module changes the input that recompute needs


def _parts(module: Module) -> dict[str, Module]:
    """Return the children of a unit that have a forward, those in lists included, by name relative to the unit."""
    found = {}
    for name, child in module.named_children():
        if isinstance(child, ModuleList | ModuleDict):
            found.update({f"{name}.{inner}": part for inner, part in _parts(child).items()})
        elif has_forward(child) and RULE_NAME.fullmatch(name):
            found[name] = child
    return found


def digest_of(model: Module) -> str:
    """Return a digest of a model's structure: its modules, their classes, and its parameters' shapes and dtypes."""
    lines = [f"{name} {type(module).__qualname__}" for name, module in named_modules(model)]
    lines += [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


def device_of(model: Module | None) -> torch.device | None:
    """Return the device of a model's parameters; None without a model or parameters, and while they have no data."""
    first = next(model.parameters(), None) if model is not None else None
    return first.device if first is not None and not first.is_meta else None
