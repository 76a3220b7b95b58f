"""The partitioner: PyTorch's own, then the edits of the policy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node

from actstore.compiled.budget.plan import GraphPlan
from actstore.compiled.budget_partition import Attempts, BudgetPartition
from actstore.compiled.edit import Editor
from actstore.compiled.graph import boundary_of, outputs_of
from actstore.compiled.names import NodeNames
from actstore.compiled.plain_partition import Saved, is_extra, plain_saved, rows_again, saved_by
from actstore.compiled.recomputed import leave_statistics_out, mark_recomputed
from actstore.compiled.rules import GraphRules
from actstore.compiled.splice import Decompositions
from actstore.compiled.table import PAYLOAD, TOKEN, Table, attach, attach_plan, metadata_of_partition, running_plan
from actstore.compiled.treater import Treater
from actstore.errors import StateError

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
