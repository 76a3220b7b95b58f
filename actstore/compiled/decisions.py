"""Decisions of the backward graph by saved floats: comparisons, signs, roundings.

A payload with a loss may move a float to the other side of a comparison. Three means prevent it:

* the payload keeps signs, where the comparison is with zero and reads the tensor itself;
* the forward graph decides, from exact values, and saves the result in one bit an element;
* the tensor is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from actstore.autograd.sensitive import CHOICES, COMPARISONS, POLES, SIGNS, decides_in_backward
from actstore.compiled.graph import CONVERSIONS, VIEWS, name_of

# Operators with a pole: they divide by an argument, and a small number that comes back as zero gives infinity.
_POLES = {name: place for name, place in POLES.items() if name not in ("pow", "log1p")}
# Operators that read the sign of one argument, by its position.
_BY_SIGN = {
    **dict.fromkeys(SIGNS, 0), "leaky_relu_backward": 1, "log_sigmoid_backward": 1, "elu_backward": 5,
    "_prelu_kernel_backward": 1, **_POLES,
}  # fmt: skip
_MORE_THAN_SIGN = frozenset(_POLES) | {"elu_backward", "log_sigmoid_backward"}  # they compute with the value, too
_WITH_INDICES = frozenset({"max", "min", "median", "nanmedian"})  # without a dimension they are smooth
_KEEP_SIGN = VIEWS | {"relu", "neg", "abs", "clone", "tanh"}
_FLOATS = (torch.float32, torch.bfloat16, torch.float64)


class Means(NamedTuple):
    """The means for each decision.

    Attributes
    ----------
    signed : placeholders whose payloads must keep signs
    exact : placeholders that must be kept, with the operator that decides by them
    masks : nodes that the forward graph computes instead, each with the placeholders that it depends on
    """

    signed: set[Node]
    exact: dict[Node, str]
    masks: dict[Node, set[Node]]


def settle(nodes: list[Node], lossy: Mapping[Node, bool], tangents: Set[Node]) -> Means:
    """Choose the means for each decision of a backward graph.

    Parameters
    ----------
    nodes : of the backward graph, in its order
    lossy : placeholders of payloads with a loss, and whether their codecs can keep signs
    tangents : nodes that depend on a gradient, and so cannot be computed in forward
    """
    exact: dict[Node, str] = {}
    while True:
        walk = _Decided(tangents)
        for node in nodes:
            if node in lossy and node not in exact:
                walk.start(node, can_sign=lossy[node])
            else:
                walk.visit(node)
        if not walk.exact:
            return Means(walk.signed, exact, walk.masks)
        exact.update(walk.exact)  # fewer payloads have a loss: look again


class _Decided:
    """One walk through a backward graph."""

    def __init__(self, tangents: Set[Node]) -> None:
        self.signed = set[Node]()
        self.exact: dict[Node, str] = {}
        self.masks: dict[Node, set[Node]] = {}
        self._tangents = tangents
        self._sources: dict[Node, set[Node]] = {}  # of nodes with an error: the payloads that it comes from
        self._signs: dict[Node, Node] = {}  # of nodes with the sign of a payload: that payload

    def start(self, read: Node, *, can_sign: bool) -> None:
        self._sources[read] = {read}
        if can_sign:
            self._signs[read] = read

    def visit(self, node: Node) -> None:
        wrong = [source for source in node.all_input_nodes if source in self._sources]
        if node.op != "call_function" or not wrong:
            return
        name = name_of(node)
        decided = [source for source in _deciding(node, name) if source in self._sources]
        signs = [self._signs.get(source) for source in decided]
        if decided and _asks_signs(node, name) and None not in signs:
            self.signed.update(sign for sign in signs if sign is not None)
            if name not in _MORE_THAN_SIGN and not self._reads_more(node, decided):
                return  # as exact as with exact values
        elif decided and name not in _POLES:
            self._decide(node, name, decided)
            if node in self.masks:
                return
        self._sources[node] = set().union(*(self._sources[source] for source in wrong))
        if name in _KEEP_SIGN or (name in CONVERSIONS and _value_dtype(node) in _FLOATS):
            sign = self._signs.get(node.all_input_nodes[0])
            if sign is not None:
                self._signs[node] = sign

    def _decide(self, node: Node, name: str, decided: list[Node]) -> None:
        in_forward = [source for source in decided if source not in self._tangents]
        sources = set[Node]().union(*(self._sources[source] for source in in_forward))
        if node not in self._tangents and _value_dtype(node) is torch.bool:
            self.masks[node] = sources
        else:
            self.exact.update(dict.fromkeys(sources, name))

    def _reads_more(self, node: Node, decided: list[Node]) -> bool:
        return any(source in self._sources for source in node.all_input_nodes if source not in decided)


def _deciding(node: Node, name: str) -> list[Node]:
    """Return the arguments of a node by which it decides."""
    if name in _BY_SIGN:
        arguments = node.args[_BY_SIGN[name] : _BY_SIGN[name] + 1]
        return [argument for argument in arguments if isinstance(argument, Node)]
    if name == "threshold_backward":
        return [argument for argument in node.args[1:2] if isinstance(argument, Node)]
    smooth = name in _WITH_INDICES and len(node.args) == 1
    if name in COMPARISONS or (name.strip("_") in CHOICES and not smooth) or decides_in_backward(name):
        return node.all_input_nodes
    if name in CONVERSIONS and not _is_float(_value_dtype(node)):
        return node.all_input_nodes
    return []


def _asks_signs(node: Node, name: str) -> bool:
    """Return whether signs are all that a node decides by."""
    if name == "threshold_backward":
        return bool(node.args[2] == 0)
    if name in COMPARISONS:
        return not isinstance(node.args[1], Node) and bool(node.args[1] == 0)
    return name in _BY_SIGN or (name in CONVERSIONS and _value_dtype(node) is torch.bool)


def _value_dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _is_float(dtype: torch.dtype | None) -> bool:
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)
