"""The partitioner: marks of recomputed modules, PyTorch's own partitioner, then the edits of the policy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from actstore.compiled.budget.plan import GraphPlan
from actstore.compiled.budget_partition import Attempts, BudgetPartition
from actstore.compiled.edit import Decompositions, Editor, set_outputs
from actstore.compiled.exact import depending_on_gradients
from actstore.compiled.graph import (
    COPIES,
    GETITEM,
    NORM,
    boundary_of,
    is_training_backward,
    name_of,
    operator_of,
    origin_of,
    outputs_of,
    readers_of_overwritten,
    root_of,
    sources_of,
)
from actstore.compiled.names import NodeNames, tagged
from actstore.compiled.plain_partition import Saved, is_extra, plain_saved, rows_again, saved_by
from actstore.compiled.rules import ANY, GraphRules
from actstore.compiled.table import PAYLOAD, TOKEN, Table, attach, attach_plan, metadata_of_partition, running_plan
from actstore.compiled.treater import Treater
from actstore.errors import StateError
from actstore.policy import Recompute, Rules

_OF_BATCH = 0, 1, 2  # of a norm's results: the normalized batch, its mean and its deviation; running statistics follow


def mark_recomputed(joint: GraphModule, rules: GraphRules, names: NodeNames) -> None:
    """Mark the operators of recomputed modules. Each call of such a module is a region, whose inputs are saved.

    Results of operators that have a rule of their own, and tensors whose tags have one, are saved, and wait by it. What
    is computed from an input that the graph overwrites is saved, too: in backward the input is another one.
    """
    if not rules.roots:
        return
    nodes = list(joint.graph.nodes)
    late = depending_on_gradients(nodes)
    forward = [node for node in nodes if node not in late and node.meta.get("partitioner_tag") != "is_backward"]
    stale = readers_of_overwritten(nodes)
    saved = stale | _excepted(forward, rules, names)
    needed = sources_of({source for node in late for source in node.all_input_nodes} - late, saved)
    regions: dict[str, int] = {}
    for node in forward:
        call = _region_of(node, rules, names) if node.op == "call_function" else ""
        if call:
            again = node not in saved and (node in needed or not _is_random(node))
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
            node.meta["ac_graph_id"] = regions.setdefault(call, len(regions) + 1)
        elif node in stale:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _excepted(forward: list[Node], rules: GraphRules, names: NodeNames) -> set[Node]:
    """Return the results that wait by a rule for their operator, or for their tag, although their module runs again.

    Of an operator that the compiler took apart they are what other operators read.
    """
    policy, tags = rules.policy, tagged(forward)
    if not (tags or (isinstance(policy, Rules) and policy.names_operators)):
        return set()
    inner, found = set(forward), set[Node]()
    for node in forward:
        copies = name_of(node) in COPIES and origin_of(node) in COPIES
        other = node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor)
        if other or (node not in tags and (copies or root_of(node) is not node)):
            continue
        if node not in tags and _is_part(node, inner):
            continue
        name = names.of(node) or ""
        own, _ = rules.decide(names, name, 0, ANY, operator_of(node), tags.get(node, ""))
        if not isinstance(own, Recompute) and own != rules.decide(names, name, 0, ANY)[0]:
            found.add(node)
    for several in {node.all_input_nodes[0] for node in found if name_of(node) == GETITEM}:
        found |= {several, *several.users}  # PyTorch saves all results of an operator, or none
    return found


def _is_part(node: Node, forward: Set[Node]) -> bool:
    """Return whether other parts alone read a node, of an operator that the compiler has taken apart."""
    producer = node.all_input_nodes[0] if name_of(node) == GETITEM else node
    if name_of(producer) == origin_of(producer):
        return False
    call = origin_of(producer), producer.meta.get("seq_nr")
    readers = [(origin_of(user), user.meta.get("seq_nr")) for user in node.users if user in forward]
    return bool(readers) and all(reader == call for reader in readers)


def _is_random(node: Node) -> bool:
    """Return whether an operator draws random numbers: PyTorch expects each that is to run again in backward."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def leave_statistics_out(forward: GraphModule, backward: GraphModule, num_outputs: int) -> None:
    """Let norms of training that run again read the batch alone: other forwards may have written to the statistics.

    Kernels ignore running statistics in training, but for their update, which was that of forward.
    """
    if not _norms(backward):
        return
    for node in backward.graph.nodes:
        if is_training_backward(node):
            node.args = (*node.args[:3], None, None, *node.args[5:])
    backward.graph.eliminate_dead_code()
    for node in _norms(backward):
        if any(user.args[1] not in _OF_BATCH for user in node.users):
            continue
        x, weight, bias, _, _, training, momentum, eps = node.args
        with backward.graph.inserting_before(node):
            arguments = (x, weight, bias, training, momentum, eps)
            again = backward.graph.call_function(torch.ops.aten._native_batch_norm_legit.no_stats, arguments)
        again.meta = {**node.meta, "val": node.meta["val"][: len(_OF_BATCH)]}
        node.replace_all_uses_with(again)
        backward.graph.erase_node(node)
    returned, saved = outputs_of(forward)[:num_outputs], outputs_of(forward)[num_outputs:]
    names = {node.name for node in saved if isinstance(node.meta.get("val"), Tensor)}
    placeholders = backward.graph.find_nodes(op="placeholder")
    unread = {node.name: node for node in placeholders if node.name in names and not node.users}
    set_outputs(forward.graph, [*returned, *(node for node in saved if node.name not in unread)], num_outputs)
    for placeholder in unread.values():
        backward.graph.erase_node(placeholder)
    for module in (forward, backward):
        module.recompile()


def _norms(backward: GraphModule) -> list[Node]:
    return [node for node in backward.graph.nodes if name_of(node) == NORM and node.args[5] is True]


def _region_of(node: Node, rules: GraphRules, names: NodeNames) -> str:
    """Return the identity of the recomputed call that a node belongs to; empty for none."""
    region = ""
    if not names.has_outside and _is_inside(names.base, rules.roots, rules.parts):
        region = names.base or "base"
    for call, name in names.calls(node):
        if name in rules.roots:
            region = call
        elif name in rules.parts:
            region = ""
    return region


def _is_inside(name: str, roots: frozenset[str], parts: frozenset[str]) -> bool:
    """Return whether a module, or one around it, is recomputed, and no module in between is left out."""
    inside = False
    steps = name.split(".")
    for end in range(len(steps) + 1):
        outer = ".".join(steps[:end])
        inside = outer in roots or (inside and outer not in parts)
    return inside


DONATES = "donated_buffer"  # whether backward may write over what forward has saved: then it cannot run twice


class Partitioner:
    """The partitioner of one region.

    Parameters
    ----------
    rules : the policy for the region
    names : of its nodes
    decompositions : returns those of the compiler of the graphs
    fuses : whether that compiler fuses operators
    attempts : of earlier plans under a budget, where the compiler's code is counted

    Attributes
    ----------
    table : what the region saves; None until it is partitioned
    budget_partition : the partition under a budget; None for no budget
    """

    def __init__(
        self,
        rules: GraphRules,
        names: NodeNames,
        decompositions: Callable[[], Decompositions],
        *,
        fuses: bool = False,
        attempts: Attempts | None = None,
    ) -> None:
        self.table: Table | None = None
        self.budget_partition = (
            None if rules.budget is None else BudgetPartition(rules.budget, names, fuses=fuses, attempts=attempts)
        )
        self._rules = rules
        self._names = names
        self._decompositions = decompositions
        self._fuses = fuses

    def __call__(self, joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        metadata = metadata_of_partition()
        num_outputs: int = options["num_fwd_outputs"]
        plain: Saved = plain_saved(joint, inputs, self._names, options) if self._rules.roots else {}
        mark_recomputed(joint, self._rules, self._names)
        treater = Treater(self._rules, self._names, metadata, options)
        if self.budget_partition is None:
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        else:
            forward, backward = self.budget_partition(joint, inputs, treater, **options)
            plain = self.budget_partition.plain_saved
        leave_statistics_out(forward, backward, num_outputs)
        try:
            boundary = boundary_of(forward, backward, num_outputs)
        except StateError as error:
            warnings.warn(f"compiled as without a store: {error}", RuntimeWarning, stacklevel=2)
            return forward, backward
        if not boundary.tensors or not any(isinstance(node, Node) for node in outputs_of(backward)):
            return forward, backward
        decisions = {} if self.budget_partition is None else self.budget_partition.decisions
        treatments = treater.treat((forward, backward), boundary, lambda root, _: decisions.get(root))
        decompositions, samples = self._decompositions(), self._rules.samples
        editor = Editor(forward, backward, boundary, num_outputs, decompositions, fuses=self._fuses, samples=samples)
        kept = saved_by(forward, self._names, num_outputs)
        extra = {each.node for each in boundary.tensors if plain and is_extra(each.node, plain)}
        table = editor.apply(treatments, self._rules, extra)
        self.table = (*table, *rows_again(plain, kept, table, self._rules, self._names))
        if any(row.kind in (PAYLOAD, TOKEN) for row in self.table):
            setattr(config, DONATES, False)  # until the backend puts it back; nearly every payload would be one
        if metadata is not None:
            attach(metadata, self.table)
            if self.budget_partition is not None and self.budget_partition.plan is not None:
                attach_plan(metadata, self.budget_partition.saved_plan)
            metadata.bw_donated_idxs = []  # None would stand for unknown
        return forward, backward

    def find(self) -> Table | None:
        """Return the table, as a region saves its first tensor, and tell the budget of the plan."""
        budget = self._rules.budget
        if budget is not None and self.budget_partition is not None:
            found = self.budget_partition.plan
            if found is None and (cached := running_plan()) is not None:
                found = GraphPlan.from_dict(cached)
            budget.plan = found or budget.plan
        return self.table
