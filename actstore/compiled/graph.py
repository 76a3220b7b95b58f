"""The two graphs of a compiled region, and what the first saves for the second."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, NamedTuple

from torch import SymBool, SymFloat, SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from actstore.base import operators
from actstore.errors import StateError

VIEWS = operators.VIEWS | {"reshape", "narrow", "movedim"}  # Inductor's passes make operators of other operators, too
SPLITS = frozenset({"split", "split_with_sizes", "unbind", "chunk"})
CONVERSIONS = frozenset({"_to_copy", "convert_element_type"})
COPIES = CONVERSIONS | {"clone"}
GETITEM = "getitem"
IMAGES = {"convolution": (0,), "convolution_backward": (0, 1)}  # places of images among the arguments
NORM = "_native_batch_norm_legit_functional"
NORM_BACKWARD = "native_batch_norm_backward"
# Norms of training, each with the place of its first updated statistic: the results before do not depend on statistics.
_NORMS = {NORM: 3, "_batch_norm_with_update_functional": 4}
RNG_STATE = "rng_state_output"  # states of generators, for recomputed operators that draw random numbers


class SavedNode(NamedTuple):
    """A tensor that the forward graph saves for the backward graph.

    Attributes
    ----------
    node : in the forward graph
    read : the placeholder in the backward graph that brings it
    """

    node: Node
    read: Node

    @property
    def value(self) -> Tensor:
        """Tensor without data: its shape, strides, dtype and device."""
        value: Tensor = self.node.meta["val"]
        return value


class Boundary(NamedTuple):
    """Tensors and sizes that pass from forward to backward.

    Attributes
    ----------
    tensors : saved tensors, in the order of autograd
    symbols : sizes, by their placeholder in the backward graph
    """

    tensors: list[SavedNode]
    symbols: dict[Node, Node]


def boundary_of(forward: GraphModule, backward: GraphModule, num_outputs: int) -> Boundary:
    """Return the tensors and sizes that pass between two partitioned graphs.

    Parameters
    ----------
    num_outputs : outputs of the forward graph that the region returns; the remaining ones are saved

    Raises
    ------
    StateError : the graphs are not in the order that PyTorch 2.10 to 2.14 write
    """
    saved = outputs_of(forward)[num_outputs:]
    symbols = [node for node in saved if isinstance(_value(node), SymInt | SymFloat | SymBool)]
    tensors = [node for node in saved if isinstance(_value(node), Tensor)]
    read = backward.graph.find_nodes(op="placeholder")
    first = len(symbols)
    in_order = [*symbols, *tensors]
    names = [node.name for node in read[: len(in_order)]]
    wanted = [other if other.startswith(RNG_STATE) else node.name for node, other in zip(in_order, names, strict=False)]
    if names != wanted or len(names) < len(in_order) or saved[: len(tensors)] != tensors:
        raise StateError(
            f"names={names}: the backward graph reads other tensors than {[node.name for node in in_order]}, which the "
            "forward graph saves. Use a version of PyTorch that actstore knows: 2.10 to 2.14.",
            found=names,
        )
    pairs = [SavedNode(node, other) for node, other in zip(tensors, read[first:], strict=False)]
    return Boundary(pairs, dict(zip(read, symbols, strict=False)))


def outputs_of(module: GraphModule) -> list[Any]:
    """Return the outputs of a graph, nodes and constants."""
    outputs: Any = module.graph.output_node().args[0]
    return list(outputs)


def name_of(node: Node) -> str:
    """Return the operator of a node without its namespace and overload: ``"mm"``; empty for no operator."""
    if node.op != "call_function":
        return ""
    target: Any = node.target
    if isinstance(target, OpOverload):
        return target._schema.name.partition("::")[2]
    return getattr(target, "__name__", "")


def origin_of(node: Node) -> str:
    """Return the operator of the model that a node is a part of, where the compiler took that apart."""
    original = node.meta.get("original_aten")
    return original._schema.name.partition("::")[2] if isinstance(original, OpOverload) else name_of(node)


def root_of(node: Node) -> Node:
    """Return the node that owns the memory of a view."""
    while True:
        name = name_of(node)
        if name in VIEWS:
            node = node.all_input_nodes[0]
        elif name == GETITEM and name_of(node.all_input_nodes[0]) in SPLITS:
            node = node.all_input_nodes[0].all_input_nodes[0]
        else:
            return node


def origin_of_copy(node: Node) -> Node:
    """Return the node whose elements a chain of views, copies and casts has."""
    while name_of(root := root_of(node)) in COPIES:
        node = root.all_input_nodes[0]
    return root


def operator_of(node: Node) -> str:
    """Return the operator whose result a chain of views, copies and casts has, as a policy names it; empty for none."""
    node = origin_of_copy(node)
    name = origin_of(node.all_input_nodes[0] if name_of(node) == GETITEM else node)
    return f"aten.{name}" if name else ""


def views_between(root: Node, node: Node, *, parts: bool = False) -> list[Node] | None:
    """Return the views that lead from a root to a node, where each keeps all elements and needs nothing else.

    parts : whether they may leave elements out
    """
    views: list[Node] = []
    last = node
    while node is not root:
        name = name_of(node)
        leaves_out = parts and (name in SPLITS or name == GETITEM)
        if len(node.all_input_nodes) != 1 or name == "as_strided" or not (name in VIEWS or leaves_out):
            return None
        views.append(node)
        node = node.all_input_nodes[0]
        if name_of(node) in SPLITS:
            continue
        if not _same_elements(node, last, parts=parts):
            return None
        last = node
    return views[::-1]


def sources_of(nodes: Iterable[Node], ends: Set[Node] = frozenset()) -> set[Node]:
    """Return nodes and all that they are computed from, where `ends` are computed already."""
    found, todo = set[Node](), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += () if node in ends else node.all_input_nodes
    return found


def positions(nodes: Iterable[Node]) -> dict[Node, int]:
    """Return the position of each node in its graph."""
    return {node: index for index, node in enumerate(nodes)}


def _same_elements(first: Node, second: Node, *, parts: bool) -> bool:
    """Return whether a tensor has as many elements as another one; with `parts`, or more."""
    a, b = _value(first), _value(second)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dtype != b.dtype:
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a.numel() >= b.numel() if parts else a.numel() == b.numel()))


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def readers_of_overwritten(nodes: Iterable[Node]) -> set[Node]:
    """Return the operators that read an input which the graph writes to, such as a vector of spectral norm.

    In backward that input is another one: they must not run there.
    """
    nodes, found = list(nodes), set[Node]()
    memory = {node.args[0] for node in nodes if name_of(node) == "copy_"}
    for node in nodes:
        name = name_of(node)
        if name == GETITEM and node.args[0] in found:
            found.add(node)
        elif name in ("", "copy_") or memory.isdisjoint(node.all_input_nodes):
            continue
        elif name not in _NORMS or _is_read_updated(node, _NORMS[name]):
            (memory if name in VIEWS else found).add(node)
    return found


def _is_read_updated(norm: Node, first: int) -> bool:
    """Return whether an operator reads the updated statistics: `first`, or a later result."""
    results: list[Any] = [user for user in norm.users if name_of(user) == GETITEM]
    updated = [result for result in results if result.args[1] >= first]
    readers = [reader for statistic in updated for reader in statistic.users if reader.op != "output"]
    return any(name_of(each) != "copy_" and not is_training_backward(each) for each in readers)


def is_training_backward(node: Node) -> bool:
    """Return whether an operator is the backward of a norm of training, which does not read running statistics."""
    return name_of(node) == NORM_BACKWARD and node.args[7] is True
