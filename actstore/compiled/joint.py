"""Steps of compiled regions, read from their joint graphs."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from actstore.codecs import Raw
from actstore.compiled.arrange import turns_images
from actstore.compiled.budget.costs import Cost, Costs
from actstore.compiled.budget.lane import MIN_NBYTES, TierLane
from actstore.compiled.budget.lossy import LossyPayload
from actstore.compiled.budget.operator import Operator
from actstore.compiled.budget.step import RegionEvaluation, RegionStep
from actstore.compiled.exact import depending_on_gradients
from actstore.compiled.formats.codecs import graph_codec
from actstore.compiled.formats.sizes import hint, hinted_nbytes, is_fixed
from actstore.compiled.generated_code import GraphFacts
from actstore.compiled.graph import (
    GETITEM,
    IMAGES,
    SPLITS,
    VIEWS,
    name_of,
    outputs_of,
    positions,
    readers_of_overwritten,
    root_of,
    views_between,
)
from actstore.devices.cpu_memory import most_counted

MAX_DIMENSIONS = 3  # of tensors whose strides Inductor leaves as they are
# Inductor makes loops of them, too; PyTorch's partitioner does not know them.
_SCATTERED = frozenset({"select_scatter", "slice_scatter"})


GRAIN_NBYTES = 512  # of the allocators of accelerators


class Blocks:
    """The sizes of the tensors of one graph. An allocator may give a tensor the idle block of a larger one."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        values = [value for node in nodes for value in tree_leaves(node.meta.get("val"))]
        self._sizes = {hinted_nbytes(value) for value in values if isinstance(value, Tensor)}
        self._on_cpu = cache(lambda nbytes: most_counted(nbytes, self._sizes))

    def nbytes(self, tensor: Tensor) -> int:
        """Return the upper bound of what the allocator takes for a tensor."""
        return self.of(hinted_nbytes(tensor), tensor.device.type)

    def of(self, nbytes: int, kind: str) -> int:
        """Return the upper bound of what the allocator of a kind of device takes for `nbytes`."""
        if kind == "cpu":
            return self._on_cpu(nbytes)
        return -(-nbytes // GRAIN_NBYTES) * GRAIN_NBYTES


class JointReader:
    """The reader of one joint graph.

    Parameters
    ----------
    num_outputs : outputs that forward returns; the remaining ones are gradients
    fuses : whether the compiler fuses operators
    costs : of operators
    """

    def __init__(self, joint: torch.fx.GraphModule, num_outputs: int, costs: Costs, *, fuses: bool) -> None:
        self.nodes = list(joint.graph.nodes)[:-1]
        self._places = positions(self.nodes)
        self._outputs = outputs_of(joint)
        self._num_outputs = num_outputs
        self._costs = costs
        self._blocks = Blocks(self.nodes)
        self._reads: dict[Node, frozenset[Node]] = {}  # what the loop of a result reads
        self._stale = readers_of_overwritten(self.nodes)
        self._types: Any = None
        self._turns_images = fuses and turns_images(joint)
        if fuses:
            from torch._functorch.partitioners import get_default_op_list

            self._types = get_default_op_list()

    def step(self, rerun: Collection[str], lane: TierLane | None = None) -> RegionStep:
        """Return the step.

        rerun : names of operators that PyTorch itself runs twice
        lane : the way to the tier that saved tensors may wait in
        """
        late = depending_on_gradients(self.nodes) | {
            node for node in self.nodes if node.meta.get("partitioner_tag") == "must_be_in_backward"
        }
        operators = [self._operator(node, late=node in late, rerun=node.name in rerun) for node in self.nodes]
        returned = self._outputs[: self._num_outputs]
        gradients = self._outputs[self._num_outputs :]
        fixed = any(operator.late and operator.barred for operator in operators)
        return RegionStep(operators, self._indices(returned), self._indices(gradients), not fixed, lane)

    def encoding(self, step: RegionStep, payloads: Mapping[str, LossyPayload]) -> RegionStep:
        """Return the step with the payloads that may stand for saved tensors, by the node that owns the memory."""
        operators = [*step.operators]
        for index, node in enumerate(self.nodes):
            payload = payloads.get(node.name)
            if payload is None:
                continue
            value = node.meta["val"]
            nbytes = sum(self._blocks.of(size, value.device.type) for size in payload.sizes)
            cost = self._costs.of_codec(payload.codec, value, fused=self._types is not None)
            code_ms = cost.ms + (
                self._costs.of_masks(payload.decisions, value.device) if self._types is not None else 0.0
            )
            if nbytes < operators[index].nbytes:
                operators[index] = replace(
                    operators[index], encoded=nbytes, code_ms=code_ms, code_workspace=cost.workspace
                )
        return replace(step, operators=operators, encodes=True)

    def indices(self, names: Collection[str]) -> frozenset[int]:
        """Return the indices of nodes by their names."""
        return frozenset(index for index, node in enumerate(self.nodes) if node.name in names)

    def facts(self, step: RegionStep, found: RegionEvaluation) -> GraphFacts:
        """Return what the code of the backward graph of a choice does not say."""
        operators = step.operators
        kept = {operators[index].owner for index in step.returned}
        workspaces: dict[tuple[str, int], int] = {}
        kind = "cpu"
        for node, operator in zip(self.nodes, operators, strict=True):
            values = [each for each in tree_leaves(node.meta.get("val")) if isinstance(each, Tensor)]
            kind = values[0].device.type if values else kind
            if operator.workspace:
                owners = {operators[index].owner for index in operator.inputs}
                mine = [operators[each] for each in owners if operators[each].late or not operators[each].given]
                key = name_of(node), sum(each.nbytes for each in mine)
                workspaces[key] = max(workspaces.get(key, 0), self._measured(node).workspace)
        return GraphFacts(
            sum(operators[owner].nbytes for owner in kept if owner not in found.held),
            {self.nodes[index].name for index in found.saved if operators[index].owner in kept},
            {
                self.nodes[index].name: (self.nodes[owner].name, operators[owner].nbytes)
                for index in found.saved
                for owner in [operators[index].owner]
            },
            lambda nbytes: self._blocks.of(nbytes, kind),
            {},
            workspaces,
            {self.nodes[owner].name: nbytes for owner, nbytes in found.away.items()},
            int if step.lane is None else step.lane.buffers(found.away.values(), found.window),
        )

    def _indices(self, outputs: list[Any]) -> tuple[int, ...]:
        return tuple(self._places[node] for node in outputs if isinstance(node, Node))

    def _operator(self, node: Node, *, late: bool, rerun: bool) -> Operator:
        index, value = self._places[node], node.meta.get("val")
        inputs = tuple(self._places[source] for source in node.all_input_nodes)
        if node.op != "call_function":
            nbytes = self._blocks.nbytes(value) if late and isinstance(value, Tensor) else 0
            return Operator(inputs, index, nbytes, given=True, late=late)
        name = name_of(node)
        of_split = name == GETITEM and name_of(node.all_input_nodes[0]) in SPLITS
        view = name in VIEWS or of_split or not isinstance(value, Tensor)
        fused = self._is_fused(node)
        none = name in VIEWS or name == GETITEM
        cost = Cost(0.0) if none else self._cost(node, fused=fused)
        nbytes, taken = (0, 0) if name in VIEWS or of_split else self._nbytes(node)
        return Operator(
            inputs,
            self._places[root_of(node)],
            nbytes,
            cost.ms,
            self._costs.by_bytes(node).ms if fused and not none else 0.0,
            workspace=cost.workspace + (taken if cost.workspace else 0),
            view=view,
            fused=fused,
            inlined=not view and self.is_elementwise(node) and not self._is_realized(node),
            barred=(_is_barred(node) and not rerun) or (node in self._stale and not late),
            late=late,
            layout=_layout(node),
            movable=0 if late else _movable(node),
        )

    def is_elementwise(self, node: Node) -> bool:
        """Return whether the compiler computes a node in the loops that read it."""
        is_tensor = isinstance(node.meta.get("val"), Tensor)
        return is_tensor and name_of(node) not in VIEWS and self._is_fused(node) and _is_elementwise(node)

    def _is_realized(self, node: Node) -> bool:
        """Return whether Inductor writes a result that several loops read, because its own loop reads too much."""
        from torch._inductor.config import realize_reads_threshold

        roots = {root_of(source) for source in node.all_input_nodes}
        reads = frozenset[Node]().union(*(self._reads.get(root, {root}) for root in roots))
        realized = len(node.users) > 1 and len(reads) > realize_reads_threshold
        if not realized:
            self._reads[node] = reads
        return realized

    def _is_fused(self, node: Node) -> bool:
        if self._types is None or node.op != "call_function":
            return False
        return name_of(node) in _SCATTERED or bool(self._types.is_fusible(node))

    def _cost(self, node: Node, *, fused: bool) -> Cost:
        tensors = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
        if not tensors:
            return Cost(0.0)
        return self._costs.computed(node) if fused else self._measured(node)

    def _measured(self, node: Node) -> Cost:
        """Return the cost of an operator alone. What the caller brings is not turned: images, and weights."""
        images = [node.args[at] for at in IMAGES.get(name_of(node), ())] if self._turns_images else []
        turned = [each for each in images if isinstance(each, Node) and each.op != "placeholder"]
        return self._costs.measured(node, turned)

    def _nbytes(self, node: Node) -> tuple[int, int]:
        """Return the bytes of a result; of several results those that no node takes out, and those that nodes do."""
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return self._blocks.nbytes(value), 0
        taken = {user.args[1] for user in node.users if name_of(user) == GETITEM}
        left = found = 0
        for at, part in enumerate(value if isinstance(value, tuple | list) and name_of(node) not in SPLITS else ()):
            nbytes = self._blocks.nbytes(part) if isinstance(part, Tensor) else 0
            left, found = (left, found + nbytes) if at in taken else (left + nbytes, found)
        return left, found


def _is_barred(node: Node) -> bool:
    """Return whether an operator must not run twice: it communicates, writes, is unknown, or draws random numbers.

    Attention that draws some runs again from the same state of the generator: so PyTorch's partitioner has it.
    """
    if name_of(node) == GETITEM:
        return _is_barred(node.all_input_nodes[0])
    target = node.target
    if not isinstance(target, OpOverload):
        return any(isinstance(value, Tensor) for value in tree_leaves(node.meta.get("val")))
    if target.namespace == "aten" and target._schema.name.startswith("aten::_scaled_dot_product"):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return True
    return target.namespace not in ("aten", "prims", "inductor_prims") or node.is_impure()


def _movable(node: Node) -> int:
    """Return the bytes of the elements of a node, where the memory under it can wait in a tier; 0 where it cannot."""
    root, value = root_of(node), node.meta.get("val")
    whole = root.meta.get("val")
    if not isinstance(whole, Tensor) or not isinstance(value, Tensor) or root.op != "call_function":
        return 0
    if not is_fixed(whole) or not whole.dtype.is_floating_point or whole.nbytes < MIN_NBYTES:
        return 0
    by_place = any(name_of(user) == "as_strided" for user in node.users)
    known = views_between(root, node, parts=True) is not None and graph_codec(Raw(), whole)[0] is not None
    return value.nbytes if known and not by_place else 0


def _layout(node: Node) -> Hashable:
    """Return what a tensor has in common with those that a loop of Inductor may write over it.

    None for parts of results of one operator, and for images, whose strides Inductor chooses.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or name_of(node) == GETITEM or value.dim() > MAX_DIMENSIONS:
        return None
    return (value.dtype, hint(value.numel())) if value.is_contiguous() else None


def _is_elementwise(node: Node) -> bool:
    """Return whether an operator computes each element of its result where that is read."""
    if name_of(node) == "cat":
        return False
    sizes = [
        hint(source.meta["val"].numel())
        for source in node.all_input_nodes
        if isinstance(source.meta.get("val"), Tensor)
    ]
    return hint(node.meta["val"].numel()) >= max(sizes, default=0)
