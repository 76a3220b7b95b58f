"""The autograd graph of a model, as numbers that do not keep it alive."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Parameter

from actstore.autograd.protect import MAX_NODES_INSPECTED, TRANSPARENT
from actstore.base.operators import ACCUMULATE_GRAD

BUILT_IN_NODE = re.compile(r"\w+Backward\d+")  # PyTorch's own operators; other nodes may have side effects
WEIGHT = -1  # in an edge, in place of a node's number

# Number of the next node and index of its output, or WEIGHT and the weight's identity; None: no gradient is required.
Edge = tuple[int, int] | None


@dataclass
class GraphNode:
    """An autograd node.

    name : name of its class
    edges : destinations of the gradients that it computes
    once : whether it must not run twice: a custom function, in Python or in C++
    """

    name: str
    once: bool
    edges: list[Edge] = field(default_factory=list)

    @property
    def weights(self) -> list[int]:
        """Indices of the edges that lead to weights."""
        return [k for k, edge in enumerate(self.edges) if edge is not None and edge[0] == WEIGHT]


class Walk:
    """Nodes between outputs of a model and its weights, by sequence number. Leaves other than weights do not count.

    Attributes
    ----------
    points : the nodes by number
    full : whether the graph has more nodes than Python may look at
    """

    def __init__(self) -> None:
        self.points: dict[int, GraphNode] = {}
        self.full = False

    def add(self, roots: Iterable[Any], meet: Callable[[int, Any], None]) -> None:
        """Walk from these nodes, and call `meet` with each new one."""
        stack = list(roots)
        while stack:
            node = stack.pop()
            number = node._sequence_nr()
            if number in self.points or node.name() == ACCUMULATE_GRAD:
                continue
            if len(self.points) == MAX_NODES_INSPECTED:
                self.full = True
                return
            point = self.points[number] = GraphNode(node.name(), BUILT_IN_NODE.fullmatch(node.name()) is None)
            for following, output in node.next_functions:
                edge: Edge = None
                if following is not None and (weight := weight_behind(following)) is not None:
                    edge = (WEIGHT, id(weight))
                elif following is not None and following.name() != ACCUMULATE_GRAD:
                    edge = (following._sequence_nr(), output)
                    stack.append(following)
                point.edges.append(edge)
            meet(number, node)

    def first_weights_first(self) -> list[int]:
        """Return the numbers of all nodes, each after those that its edges lead to.

        A number stands for one node of each thread that ran forward; apparent cycles are cut.
        """
        entered, done = set[int](), dict[int, None]()
        for root in self.points:
            stack = [root]
            while stack:
                number = stack[-1]
                if number in entered:
                    done[stack.pop()] = None
                    continue
                entered.add(number)
                ahead = (edge[0] for edge in self.points[number].edges if edge is not None)
                stack += [n for n in ahead if n in self.points]
        return list(done)


def weight_behind(node: Any) -> Parameter | None:
    """Return the parameter that a gradient goes to from here, with no node between that changes its values."""
    while node is not None and node.name() in TRANSPARENT:
        node = node.next_functions[0][0]
    if node is None or node.name() != ACCUMULATE_GRAD or not isinstance(node.variable, Parameter):
        return None
    return node.variable


def is_compiled(name: str) -> bool:
    """Return whether a node of this name is a region of torch.compile."""
    return name.startswith("CompiledFunction")


def roots_of(leaves: Iterable[Any]) -> list[Any]:
    """Return the nodes that computed these outputs."""
    return [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
