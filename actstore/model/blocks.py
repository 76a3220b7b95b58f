"""The blocks that a model repeats."""

from __future__ import annotations

from torch.nn import Module, ModuleList, Sequential

from actstore.model.names import named_modules


def repeated_blocks(model: Module) -> list[str]:
    """Return the names of the modules that a model repeats: the children of its outermost ModuleLists and Sequentials.

    Where the model has neither, they are its direct children. Modules without parameters are left out.
    """
    names = {module: name for name, module in named_modules(model)}
    blocks: list[Module] = []

    def visit(module: Module) -> None:
        for child in module.children():
            if isinstance(module, ModuleList | Sequential):
                blocks.append(child)
            else:
                visit(child)

    visit(model)
    found = blocks or list(model.children())
    return [names[block] for block in found if any(True for _ in block.parameters())]
