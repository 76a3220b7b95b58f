"""The treatment of each tensor that a compiled region saves: which codec, or why none.

A payload with a loss may move a float that backward compares, signs or rounds to the other side. To prevent that:

* the payload keeps signs, where the comparison is with zero and reads the tensor itself;
* the forward graph decides, from exact values, and saves the result in one bit an element;
* the tensor is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from actstore.autograd.protect import COMPUTED, PARAMETER
from actstore.autograd.sensitive import CHOICES, COMPARISONS, POLES, SIGNS, decides_in_backward
from actstore.base.note import SMALL
from actstore.base.spec import Spec
from actstore.codecs import Bit1, Codec, Raw
from actstore.codecs.base import LOSSY_DTYPES
from actstore.compiled.exact import amplified, amplifier, depending, differentiable, exact_reason
from actstore.compiled.formats.codecs import graph_codec, why_unavailable
from actstore.compiled.formats.sizes import hint, hinted_nbytes
from actstore.compiled.graph import (
    CONVERSIONS,
    GETITEM,
    RNG_STATE,
    VIEWS,
    Boundary,
    SavedNode,
    name_of,
    operator_of,
    origin_of_copy,
    outputs_of,
    root_of,
    views_between,
)
from actstore.compiled.names import NodeNames, tagged
from actstore.compiled.rules import GraphRules
from actstore.compiled.table import INPUT, KEPT, PAYLOAD
from actstore.policy import Decision, Derive, Encode, Keep, Offload, may_be_lossy
from actstore.policy.decision import waits_as

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


Planned = Callable[[str, str | None], Encode | Offload | None]

BITS = Bit1()
OUTSIDE = "saved outside of the model: part of the loss"
OUTPUT = "an output of the compiled region, which its caller may hold"
SHARED = "its memory belongs to a tensor that is kept"


@dataclass
class Treatment:
    """The treatment of one saved tensor.

    Attributes
    ----------
    kind : an input of the region, kept, or a payload
    name : module of the site, with its name in the store's model
    tag : name that the model has given to the tensor; empty for none
    decision : of the plan or the policy; None where none was asked
    note, exact : why the decision is not followed, as in a report
    codec : of a payload
    tiers : where the payload waits; none for the compute device
    protected : whether a lossy codec skips what must stay exact
    """

    saved: SavedNode
    kind: str
    name: str = ""
    tag: str = ""
    decision: Decision | None = None
    note: str = ""
    exact: bool = False
    codec: Codec | None = None
    tiers: tuple[str, ...] = ()
    protected: bool = True

    def keep(self, reason: str, *, exact: bool = False) -> None:
        """Keep the tensor, for a reason."""
        self.kind, self.codec, self.exact = KEPT, None, exact
        self.note = reason


@dataclass(frozen=True)
class Treatments:
    """The treatments of all saved tensors, and the decisions that the forward graph takes over.

    Attributes
    ----------
    masks : nodes of the backward graph that the forward graph computes, each with the tensor whose site accounts for it
    """

    of: list[Treatment]
    masks: dict[Node, Treatment]


def payload_node(saved: Node, codec: Codec, *, parts: bool = False) -> tuple[Node, list[Node]]:
    """Return the node whose payload stands for a saved one, and the views that lead from it to that.

    It is the one that owns the memory, where the views keep all elements and the codec has a form for it.

    parts : whether views may leave elements out
    """
    root = root_of(saved)
    views = views_between(root, saved, parts=parts) if root.op == "call_function" else None
    if views is None or graph_codec(codec, root.meta["val"])[0] is None:
        return saved, []
    return root, views


def treat(
    forward: GraphModule,
    backward: GraphModule,
    boundary: Boundary,
    rules: GraphRules,
    names: NodeNames,
    *,
    num_outputs: int,
    inputs: Sequence[Node],
    active: Set[Node] | None,
    static: Set[Node],
    planned: Planned,
) -> Treatments:
    """Choose the treatment of each saved tensor.

    Parameters
    ----------
    num_outputs : outputs of the forward graph that the region returns
    inputs : of the forward graph
    active : those that require a gradient; None where that is unknown
    static : those that are parameters and buffers
    planned : returns the decision of a plan, by the name of the node whose memory waits, and by the module
    """
    nodes = list(backward.graph.nodes)
    known = {saved.read for saved in boundary.tensors} | set(boundary.symbols)
    tangents = depending(nodes, {node for node in nodes if node not in known and _begins(node)})
    parameters = static if active is None else static & active
    inner = list(forward.graph.nodes)
    given = depending(inner, {node for node in inputs if isinstance(node.meta.get("val"), Tensor)} - static)
    differentiated = None if active is None else differentiable(inner, active)
    returned = {root_of(node) for node in outputs_of(forward)[:num_outputs] if isinstance(node, Node)}
    indices = Counter[str]()
    tags = tagged(inner)
    found = []
    for saved in boundary.tensors:
        operator = operator_of(saved.node) if differentiated is None or saved.node in differentiated else ""
        tag = tags.get(root_of(saved.node), "")
        treatment = _first(saved, operator, tag, returned, rules, names, indices, planned)
        if treatment.codec is not None:
            _protect(treatment, parameters, given, differentiated, tangents)
        found.append(treatment)
    lossy = _lossy_inputs(found, rules, active, static, tangents)
    _share(found)
    masks = _decide(found, lossy, nodes, tangents)
    while _share(found):  # fewer payloads have a loss: look again
        masks = _decide(found, lossy, nodes, tangents)
    return Treatments(found, masks)


def _begins(node: Node) -> bool:
    """Return whether a node brings what forward does not have: a gradient, a seed, a random number."""
    tags = getattr(node.target, "tags", ())
    return node.op in ("placeholder", "get_attr") or torch.Tag.nondeterministic_seeded in tags


def _first(
    saved: SavedNode,
    operator: str,
    tag: str,
    returned: Set[Node],
    rules: GraphRules,
    names: NodeNames,
    indices: Counter[str],
    planned: Planned,
) -> Treatment:
    """Return the treatment by the plan or the policy, by size and by owner."""
    root = root_of(saved.node)
    if root.op == "placeholder":
        return Treatment(saved, INPUT, names.base)
    name = _module_of(saved, names)
    treatment = Treatment(saved, KEPT, name or "", tag)
    value = saved.value
    if saved.read.name.startswith(RNG_STATE):
        treatment.keep("the state of a generator")
        return treatment
    try:
        nbytes = hinted_nbytes(value)
        spec = Spec(tuple(map(hint, value.shape)), tuple(map(hint, value.stride())), value.dtype, value.device)
    except ValueError:
        treatment.keep("a size that only the run knows")
        return treatment
    decision, ambiguous = rules.decide(names, treatment.name, indices[treatment.name], spec, operator, tag)
    wanted = planned(root.name, name)
    treatment.decision = wanted or decision
    waits = wanted or waits_as(decision)
    if isinstance(decision, Derive) and isinstance(waits, Keep) and value.dtype is torch.bool:
        waits = Encode(BITS)
    if wanted is not None:
        _choose(treatment, wanted, outside=name is None)
    elif ambiguous:
        treatment.keep(ambiguous)
    elif isinstance(waits, Keep):
        return treatment
    elif nbytes < rules.min_nbytes:
        treatment.keep(SMALL)
        return treatment
    elif root in returned:
        treatment.keep(OUTPUT)
    else:
        _choose(treatment, waits, outside=name is None)
    indices[treatment.name] += 1
    return treatment


def _choose(treatment: Treatment, waits: Encode | Offload, *, outside: bool) -> None:
    """Choose the codec and the tiers of the policy, or why they cannot be."""
    value, codec = treatment.saved.value, waits.codec
    tiers = waits.tiers if isinstance(waits, Offload) else ()
    if value.dtype is torch.bool:
        codec = BITS
    if reason := why_unavailable(codec):
        treatment.keep(reason)
        return
    if isinstance(codec, Raw) and not tiers:
        treatment.keep("")  # a graph holds the tensor itself
        return
    if not codec.accepts(value.dtype):
        treatment.keep(f"{codec.name} does not take {str(value.dtype).removeprefix('torch.')}", exact=True)
        return
    if outside and waits.protected and not codec.lossless:
        treatment.keep(OUTSIDE, exact=True)
        return
    form, reason = graph_codec(codec, value)
    if form is None or any(name_of(user) == "as_strided" for user in treatment.saved.read.users):
        treatment.keep(reason or "backward reads it by its place in memory")
        return
    treatment.kind, treatment.codec, treatment.tiers, treatment.protected = PAYLOAD, codec, tiers, waits.protected


def _protect(
    treatment: Treatment,
    parameters: Set[Node],
    given: Set[Node],
    differentiated: Set[Node] | None,
    tangents: Set[Node],
) -> None:
    """Keep a tensor that must come back exactly.

    given : nodes that depend on an input of the model
    """
    assert treatment.codec is not None
    if treatment.codec.lossless:
        return
    reason = ""
    if origin_of_copy(treatment.saved.node) in parameters:  # under autocast, of each layer
        reason = PARAMETER
    elif parameters and treatment.saved.node not in given:
        reason = COMPUTED
    elif treatment.protected:
        reason = exact_reason(treatment.saved, differentiated, tangents)
    if reason:
        treatment.keep(reason, exact=True)


def _lossy_inputs(
    found: list[Treatment], rules: GraphRules, active: Set[Node] | None, static: Set[Node], tangents: Set[Node]
) -> dict[Node, Treatment]:
    """Return the inputs that the hooks around the region may store with a loss, by what reads them.

    Those whose error backward would amplify are kept.
    """
    lossy = {}
    for each in found if may_be_lossy(rules.policy) else ():
        root = root_of(each.saved.node)
        if each.kind != INPUT or root in static or (active is not None and root not in active):
            continue
        if reader := amplifier(each.saved.read, tangents):
            each.keep(amplified(reader), exact=True)
        elif each.saved.value.dtype in LOSSY_DTYPES:
            lossy[each.saved.read] = each
    return lossy


def _share(found: list[Treatment]) -> bool:
    """Keep tensors whose memory is kept for another one: payloads would only add bytes. Returns whether it kept any."""
    kept = {root_of(each.saved.node) for each in found if each.kind == KEPT}
    shared = [each for each in found if each.kind == PAYLOAD and root_of(each.saved.node) in kept]
    for each in shared:
        each.keep(SHARED)
    return bool(shared)


def _decide(
    found: list[Treatment], inputs: dict[Node, Treatment], nodes: list[Node], tangents: Set[Node]
) -> dict[Node, Treatment]:
    """Choose the means for the decisions of backward. Returns the masks that forward computes."""
    lossy = {each.saved.read: each for each in found if each.codec is not None and not each.codec.lossless}
    lossy |= {read: each for read, each in inputs.items() if each.kind == INPUT}
    can_sign = {read: each.codec is not None and each.codec.keeping_signs is not None for read, each in lossy.items()}
    means = settle(nodes, can_sign, tangents)
    for read, operator in means.exact.items():
        lossy[read].keep(f"backward decides by it in {operator}", exact=True)
    signed = {root_of(lossy[read].saved.node) for read in means.signed}
    for each in lossy.values():  # all views of one root share its payload
        if each.codec is not None and root_of(each.saved.node) in signed:
            each.codec = each.codec.keeping_signs
    return {node: lossy[min(sources, key=nodes.index)] for node, sources in means.masks.items()}


def _module_of(saved: SavedNode, names: NodeNames) -> str | None:
    """Return the module that reads a saved tensor first, as a store names sites; None for one outside of the model."""
    readers = [user for user in _readers(saved.read) if names.has_module(user)]
    if readers:
        return names.of(min(readers, key=lambda user: user.meta.get("seq_nr", inf)))
    if names.has_outside and any(True for _ in _readers(saved.read)):
        return None
    return names.of(saved.node)


def _readers(read: Node) -> Iterator[Node]:
    """Yield the operators that read a tensor, through its views."""
    for user in read.users:
        if name_of(user) in VIEWS or name_of(user) == GETITEM:
            yield from _readers(user)
        elif user.op != "output":
            yield user
