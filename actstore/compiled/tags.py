"""Names that a model gives to tensors inside of compiled regions."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.fx import Graph, Node

from actstore.compiled.graph import GETITEM, name_of, root_of
from actstore.policy.pattern import check_tag

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
