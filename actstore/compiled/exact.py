"""Tensors of a graph that must come back exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import Any

from torch import Tensor
from torch.fx import Node

from actstore.autograd.protect import MAX_STEPS, STATISTIC, WITHOUT_GRADIENT, is_reduced
from actstore.autograd.sensitive import EXACT_RESULTS, EXPONENTIALS, POLES, SIGNS
from actstore.codecs.base import LOSSY_DTYPES
from actstore.compiled.formats.sizes import hint
from actstore.compiled.graph import GETITEM, SavedNode, name_of, origin_of, root_of

# They average over errors.
_REDUCTIONS = frozenset({"sum", "mean", "var", "var_mean", "std", "std_mean", "linalg_vector_norm"})
# They read the shape of a tensor alone.
_SHAPED_ALIKE = frozenset(
    {
        "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
        "new_full", "new_empty",
    }
)  # fmt: skip
# A product averages over errors. What follows it in backward reads it as in a recomputed module.
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution", "matmul", "linear", "_scaled_mm"})


def exact_reason(saved: SavedNode, active: Set[Node] | None, tangents: Set[Node]) -> str:
    """Return the reason why a saved tensor must not be encoded with a loss; empty where it may.

    Parameters
    ----------
    active : nodes of the forward graph through which a gradient flows to an input; None where that is unknown
    tangents : nodes of the backward graph that depend on a gradient
    """
    dtype, root = saved.value.dtype, root_of(saved.node)
    if dtype not in LOSSY_DTYPES:
        return f"{str(dtype).removeprefix('torch.')} is never lossy"
    if active is not None and saved.node not in active:
        return WITHOUT_GRADIENT
    if name_of(root) == GETITEM:
        maker = root.all_input_nodes[0]
        if root.args[1] != 0 or name_of(maker).strip("_") in EXACT_RESULTS:
            return f"a statistic or a further output of {name_of(maker)}"
    if name_of(root) in SIGNS:
        return f"output of {name_of(root)}: a decision"
    for operator in (name_of(root), origin_of(root)):
        if operator.strip("_") in EXACT_RESULTS:
            return f"output of {operator}: its error is amplified"
    value = saved.value
    if is_reduced(_hints(value.shape), _hints(value.stride()), _shapes_before(saved.node)):
        return STATISTIC
    reader = amplifier(saved.read, tangents)
    return amplified(reader) if reader else ""


def _shapes_before(node: Node) -> Iterator[list[int]]:
    """Yield the shapes of what a tensor is computed from, from one node to the next."""
    for _ in range(MAX_STEPS):
        source = next((each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)), None)
        if source is None:
            return
        node = source
        yield _hints(node.meta["val"].shape)


def _hints(sizes: Iterable[Any]) -> list[int]:
    """Return sizes or strides as numbers; none where only the run knows them."""
    try:
        return list(map(hint, sizes))
    except ValueError:
        return []


def amplified(reader: str) -> str:
    """Return the reason why a tensor that `reader` reads again must be exact."""
    return f"backward computes {reader} from it again, which amplifies its error"


def amplifier(read: Node, tangents: Set[Node]) -> str:
    """Find an operator that backward computes again from a saved tensor, and that amplifies its error; empty for none.

    tangents : nodes of the backward graph that depend on a gradient
    """
    todo, seen = [(read, True)], {(read, True)}
    while todo:
        node, alone = todo.pop()  # whether each element still has the error of one
        for user in node.users:
            name = name_of(user)
            if alone and _divides(user, name, node):
                return name
            if user in tangents or user.op == "output" or name in PRODUCTS:
                continue
            if origin_of(user).strip("_") in EXPONENTIALS:
                return origin_of(user)
            step = user, alone and name not in _REDUCTIONS
            if step not in seen:
                seen.add(step)
                todo.append(step)
    return ""


def _divides(user: Node, name: str, node: Node) -> bool:
    """Return whether an operator of the model or of its backward divides by `node`, or takes a power below 1 of it.

    A quotient of tensors of one size counts for both of them.
    """
    place = POLES.get(name)
    if place is None or origin_of(user) != name:
        return False
    if user.args[place] is not node:
        values = [each.meta["val"] for each in user.all_input_nodes]
        sizes = [_hints(value.shape) for value in values if isinstance(value, Tensor)]
        return name == "div" and len(sizes) == 2 and sizes[0] == sizes[1]
    exponent = user.args[1] if name == "pow" else None
    return not isinstance(exponent, int | float) or exponent < 1


def depending(nodes: list[Node], sources: Set[Node]) -> set[Node]:
    """Return the nodes that depend on `sources`, and these themselves. `nodes` are in the order of their graph."""
    found = set(sources)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def differentiable(nodes: list[Node], active: Set[Node]) -> set[Node]:
    """Return the nodes of a forward graph through which a gradient flows to `active`: none flows through integers."""
    found = set(active)
    for node in nodes:
        value = node.meta.get("val")
        ends = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
        if not ends and name_of(node) not in _SHAPED_ALIKE and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def depending_on_gradients(nodes: list[Node]) -> set[Node]:
    """Return the nodes of a joint graph that depend on a gradient of its outputs, which AOTAutograd calls tangents."""
    return depending(nodes, {node for node in nodes if node.op == "placeholder" and "tangents" in node.name})
