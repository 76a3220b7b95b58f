"""Arrangement of the operators of a graph: a wanted order, results that are written, and copies for each reader.

On a CPU Inductor writes the result of an exponential that two loops read, and then runs both as one loop. A plan lets
each of them compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from actstore.compiled.formats.sizes import hinted_nbytes, is_fixed
from actstore.compiled.graph import VIEWS, name_of

IMAGE_DIM = 4
_WRITTEN = "inductor_realize_to_strides"  # in torch/_inductor/graph.py
# `should_realize_on_reuse` in torch/_inductor/ir.py
_EXPONENTIALS = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})
MAX_READERS = 8


def arrange(graph: Graph, names: Sequence[str]) -> None:
    """Move the nodes of a graph into the order of `names`, each after what it reads.

    A node of another name stays before its first reader.
    """
    ranks = {name: float(rank) for rank, name in enumerate(names)}
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for node in reversed(nodes):
        if node.name not in ranks:
            ranks[node.name] = min((ranks.get(user.name, inf) for user in node.users), default=inf)
    output, waiting = graph.output_node(), set(nodes)

    def place(node: Node) -> None:
        todo = [node]
        while todo:
            missing = [source for source in todo[-1].all_input_nodes if source in waiting]
            if missing:
                todo += reversed(missing)
                continue
            last = todo.pop()
            if last in waiting:
                waiting.remove(last)
                output.prepend(last)

    for node in sorted(nodes, key=lambda node: ranks[node.name]):
        place(node)


def write_in_place(graph: Graph, names: Collection[str], nbytes: int) -> None:
    """Let Inductor write the named results at their places, where they have `nbytes` or more.

    It would write a result of a loop where an operator outside of loops reads it first. It lays out images anew, and so
    they stay as they are.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.name in names and isinstance(value, Tensor) and hinted_nbytes(value) >= nbytes:
            write(node)


def write(node: Node) -> None:
    """Let Inductor write the result of a loop, unless it is an image: loops that read it do not compute it again."""
    if node.meta["val"].dim() != IMAGE_DIM:
        node.meta[_WRITTEN] = True


def copy_for_readers(module: GraphModule, elementwise: Callable[[Node], bool], nbytes: int) -> None:
    """Give each reader its own copy of what is computed from an exponential, where its result has `nbytes` or more.

    Parameters
    ----------
    elementwise : whether the compiler computes an operator in the loops that read it
    """
    costly: dict[Node, None] = {}  # nodes with an exponential in their loop
    for node in module.graph.nodes:
        has_one = name_of(node) in _EXPONENTIALS or any(source in costly for source in node.all_input_nodes)
        if has_one and (name_of(node) in VIEWS or elementwise(node)):
            costly[node] = None
    for node in reversed(costly):
        readers, value = list(node.users), node.meta.get("val")
        large = isinstance(value, Tensor) and hinted_nbytes(value) >= nbytes
        if large and 1 < len(readers) <= MAX_READERS and _is_read_in_loops(node, elementwise):
            for reader in readers[1:]:
                with module.graph.inserting_before(reader):
                    reader.replace_input_with(node, module.graph.node_copy(node))
    module.recompile()


def _is_read_in_loops(node: Node, elementwise: Callable[[Node], bool]) -> bool:
    return all(
        _is_read_in_loops(user, elementwise) if name_of(user) in VIEWS else elementwise(user) for user in node.users
    )


def turns_images(module: GraphModule) -> bool:
    """Return whether Inductor lays out what the convolutions of a graph read and return with the channels last."""
    found: bool = _lowering().decide_layout_opt(module, is_inference=False)
    return found


def channels_last_nodes(forward: GraphModule) -> set[Node]:
    """Return the nodes of a forward graph whose results Inductor lays out so, by its own rule.

    A convolution on a CPU does, and what it reads and what reads its result follow. The rule ends at the last
    convolution: loops after it write as they read. A wrong guess costs time alone.
    """
    if not turns_images(forward):
        return set()
    preferred = _lowering().find_nodes_prefer_channels_last(SimpleNamespace(module=forward))
    found = set[Node]()
    for node in forward.graph.nodes:
        value = node.meta.get("val")
        if not _is_image(value):
            continue
        if node in preferred or any(
            each in found and each.meta["val"].shape == value.shape for each in node.all_input_nodes
        ):
            found.add(node)
    return found


def _lowering() -> Any:
    from torch._inductor.graph import GraphLowering

    return GraphLowering


def _is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == IMAGE_DIM and is_fixed(value) and value.is_contiguous()
