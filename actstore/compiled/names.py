"""Names in compiled regions: of the modules that operators belong to, and those that a model gives to tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import Module

from actstore.compiled.graph import GETITEM, name_of, root_of
from actstore.policy.pattern import check_tag

_VARIABLE = re.compile(r"^[LG]\['[^']*'\]")
_PARTS = re.compile(r"[^.\[\]'\"]+")

Stack = dict[str, tuple[str, Any]]


class NodeNames:
    """The module of each node of one compiled region.

    Dynamo notes the running modules in each node: an identity, and the path from a variable of the traced function.

    Parameters
    ----------
    named : names of the store's model and its modules
    target : the name of the module that the user compiled
    graph : as Dynamo traced it

    Attributes
    ----------
    base : the name of the module whose method Dynamo traced: `target`, or one inside of it after a graph break
    has_outside : whether the region has operators outside of `target`, such as a loss
    """

    def __init__(self, named: Iterable[tuple[str, Module]], target: str, graph: Graph) -> None:
        self._modules = {str(id(module)): (name, module) for name, module in named}
        self._target = target
        stacks = [stack for node in graph.nodes if (stack := node.meta.get("nn_module_stack"))]
        entries = [(*self._modules[key], path) for stack in stacks for key, path in _known(stack, self._modules)]
        self.has_outside = any(name == target for name, _, _ in entries)
        bases = [base for name, _, path in entries if (base := _base(name, path)) is not None]
        self.base = target if self.has_outside or not bases else min(bases, key=len)

    def of(self, node: Node) -> str | None:
        """Return the name of the innermost module that a node belongs to; None where it is outside of the target."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        for key, _ in reversed(_known(stack, self._modules)):
            return self._modules[key][0]
        return None if self.has_outside else self.base

    def has_module(self, node: Node) -> bool:
        """Return whether the compiler notes a module for a node."""
        return bool(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"))

    def calls(self, node: Node) -> list[tuple[str, str]]:
        """Return the calls that a node of forward is inside of, the outermost first: their identities and modules."""
        stack = node.meta.get("nn_module_stack") or {}
        calls = [(full, full.partition("@")[0]) for full in stack]
        return [(full, self._modules[key][0]) for full, key in calls if key in self._modules]

    def twins(self) -> list[str]:
        """Return the names of all modules for which Dynamo may run this region, because they have the same code."""
        if self.base == self._target:
            return [self.base]
        own = next(module for name, module in self._modules.values() if name == self.base)
        return [name for name, module in self._modules.values() if type(module) is type(own)]


def _known(stack: Stack, modules: dict[str, Any]) -> list[tuple[str, str]]:
    """Return identity and path of the known modules of a stack. Dynamo adds the number of the call to an identity."""
    return [(key, path) for full, (path, _) in stack.items() if (key := full.partition("@")[0]) in modules]


def _base(name: str, path: str) -> str | None:
    """Return the name of the variable of a path that leads to the module `name`; None where the path is unknown."""
    variable = _VARIABLE.match(path)
    if variable is None:
        return None
    inner = ".".join(_PARTS.findall(path[variable.end() :].replace("_modules", "")))
    if not inner:
        return name
    if name == inner:
        return ""
    return name.removesuffix(f".{inner}") if name.endswith(f".{inner}") else None


MARK, _TAGGED = "actstore_tag", "actstore_tagged"  # in a node's "custom", which nodes that it becomes inherit
_CUSTOM = "custom"


def take_marks(graph: Graph) -> list[tuple[int, str]]:
    """Replace the marks of a traced graph by names of the nodes that made the tensors.

    Returns
    -------
    list : the number of each such node in the graph, and its name

    Raises
    ------
    ConfigError : a name is not one word
    """
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    found: list[tuple[int, str]] = []
    for node in list(graph.nodes):
        name = node.meta.get(_CUSTOM, {}).get(MARK)
        if name is None:
            continue
        check_tag(name)
        source = node.all_input_nodes[0]
        number = numbers[source]
        source.meta[_CUSTOM] = source.meta.get(_CUSTOM, {}) | {_TAGGED: (number, name)}
        found.append((number, name))
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    return found


def tagged(nodes: Iterable[Node]) -> dict[Node, str]:
    """Return the names of the roots of tagged tensors. Of the operators that a tagged one became, the last made it.

    Of several results of that it is the first one.
    """
    last: dict[int, tuple[Node, str]] = {}
    for node in nodes:
        found = node.meta.get(_CUSTOM, {}).get(_TAGGED)
        if found is None or node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        known = last.get(found[0])
        if known is None or not name_of(node) == name_of(known[0]) == GETITEM or node.args[0] is not known[0].args[0]:
            last[found[0]] = node, found[1]
    return {root_of(node): name for node, name in last.values()}
