"""The partition of a joint graph under a budget."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch import config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from actstore.base.units import format_nbytes
from actstore.codecs import Raw
from actstore.compiled.arrange import arrange, copy_for_readers, write_in_place
from actstore.compiled.budget.costs import Costs
from actstore.compiled.budget.ladder import PlanLadder, Rung, ladder_of
from actstore.compiled.budget.lossy import LossyPayload
from actstore.compiled.budget.plan import GraphPlan, GraphUnit, RegionBudget
from actstore.compiled.budget.step import RegionEvaluation, RegionStep
from actstore.compiled.formats.sizes import hinted_nbytes
from actstore.compiled.generated_code import GraphFacts, peak_of
from actstore.compiled.graph import outputs_of, sources_of
from actstore.compiled.joint import JointReader
from actstore.compiled.names import NodeNames
from actstore.compiled.plain_partition import Saved, copied, saved_by
from actstore.compiled.treater import Graphs, Treater
from actstore.errors import CapacityError, ConfigError
from actstore.policy import Encode, Offload

FUSED_MARGIN = 0.1  # of the peak: what loops hold beyond the model of them, where the code is not counted
LEAST_MARGIN = 0.01  # of what a refusal names: times differ from run to run, and so do plans
APART_SHARE = 1 / 256  # of the budget
SHARES = 0.9, 0.5  # of saved bytes: PyTorch's partitioner then recomputes what it else takes for too expensive
REFUSED_RUNGS = 8  # the last ones, tried before the budget is refused


@dataclass
class Attempts:
    """Figures of earlier plans of a region in the code of a compiler.

    Attributes
    ----------
    ratio : the largest quotient of the peak of its code and that of the plan
    only_least : whether the plan of the least memory is the only one left
    choices : of the region
    """

    ratio: float = 1.0
    only_least: bool = False
    choices: Choices | None = None


class Choices(NamedTuple):
    """The choices of a region.

    Attributes
    ----------
    exact : the step of the region, without a loss
    step : the same, with the payloads that may stand for saved tensors
    ladder : of the step
    """

    exact: RegionStep
    step: RegionStep
    ladder: PlanLadder


class _Partitioned(NamedTuple):
    """The graphs of a choice, the choice as they have it, and its payloads with a loss."""

    rung: Rung
    graphs: Graphs
    found: RegionEvaluation
    payloads: dict[str, LossyPayload]


class _Joint(NamedTuple):
    """A joint graph with all that its partition takes."""

    graph: GraphModule
    inputs: Any
    options: dict[str, Any]
    reader: JointReader
    treater: Treater

    def saved(self, forward: GraphModule) -> frozenset[int]:
        """Return the indices of what a forward graph saves."""
        return self.reader.indices(_saved_names(forward, self.options["num_fwd_outputs"]))

    def partition(self, marked: GraphModule) -> Graphs:
        """Partition a copy of the graph as PyTorch does."""
        return min_cut_rematerialization_partition(marked, self.inputs, **self.options)


class OverBudgetError(Exception):
    """The compiler wrote code that needs more bytes than the budget."""


class BudgetPartition:
    """The partition of one region under a budget.

    Parameters
    ----------
    budget : of the region
    names : of its nodes
    fuses : whether the compiler of the graphs fuses operators
    attempts : of a compiler whose code is counted; None for any other compiler

    Attributes
    ----------
    plan : of the region; None until it is partitioned
    saved_plan : the same for PyTorch's caches
    refusal : the error of a budget that is too small; None for no error
    apart : bytes of a result from which on the compiler must not make two in one loop; None where it may
    decisions : of the plan on saved tensors that leave the device or are encoded, by the node whose memory waits
    plain_saved : what PyTorch's own partition saves
    """

    def __init__(
        self, budget: RegionBudget, names: NodeNames, *, fuses: bool, attempts: Attempts | None = None
    ) -> None:
        self.plan: GraphPlan | None = None
        self.saved_plan: dict[str, Any] = {}
        self.refusal: CapacityError | None = None
        self.apart: int | None = None
        self.decisions: dict[str, Encode | Offload] = {}
        self.plain_saved: Saved = {}
        self._budget = budget.nbytes
        self._lane_of = budget.lane_of
        self._lossy = budget.lossy
        self._names = names
        self._fuses = fuses
        self._attempts = attempts
        self._facts: GraphFacts | None = None
        self._predicted = self._counted = 0
        self._strides: dict[str, Any] = {}  # of what the caller brings

    def __call__(self, joint: GraphModule, inputs: Any, treater: Treater, **options: Any) -> Graphs:
        """Partition a joint graph as PyTorch's partitioner does, with the saved tensors of the fastest plan.

        treater : of what a partition saves

        Raises
        ------
        CapacityError : no plan fits into the budget; the error names the least possible
        ConfigError : a size of the graph is known in the run alone
        """
        joint.graph.eliminate_dead_code()
        if config.cse:
            joint.graph = _merged(joint, options["num_fwd_outputs"])
        plain = min_cut_rematerialization_partition(copied(joint), inputs, **options)
        self.plain_saved = saved_by(plain[0], self._names, options["num_fwd_outputs"])
        try:
            reader = JointReader(joint, options["num_fwd_outputs"], Costs(), fuses=self._fuses)
            rerun = _names_of(plain[0]) & _names_of(plain[1])
            step = reader.step(rerun, self._lane_of(_device_of(joint)))
        except ValueError as error:
            raise ConfigError(f"no plan for a compiled model: {error} Compile it with dynamic=False.") from error
        whole = _Joint(joint, inputs, options, reader, treater)
        found = step.evaluate(whole.saved(plain[0]), loops=True)
        attempts = self._attempts
        only_least = attempts is not None and attempts.only_least
        if self._needed(found) <= self._budget and not only_least:
            self._set_plan(self._plan(found, found, 0, "", ()), reader.facts(step, found))
            return plain
        choices = None if attempts is None else attempts.choices
        if choices is None or choices.exact != step:
            choices = self._search(whole, step, plain)
        if attempts is not None:
            attempts.choices = choices
        ladder = choices.ladder
        for rung in () if only_least else ladder.rungs:
            if self._needed(rung.evaluation) > self._budget:
                continue
            chosen = self._partitioned(whole, choices, rung)
            if self._needed(chosen.found) <= self._budget:
                return self._chosen(whole, choices, chosen)
        lowest = [self._partitioned(whole, choices, rung) for rung in ladder.rungs[-REFUSED_RUNGS:]]
        if attempts is None:
            least = min(max(self._needed(each.rung.evaluation), self._needed(each.found)) for each in lowest)
            self.refusal = self._refused(least)
            raise self.refusal
        attempts.only_least = True
        return self._chosen(whole, choices, min(lowest, key=lambda each: each.found.peak))

    def _search(self, whole: _Joint, exact: RegionStep, plain: Graphs) -> Choices:
        """Return the choices of a region, where `plain` is PyTorch's partition."""
        others = list(_shares(whole))
        step, payloads = exact, dict[str, LossyPayload]()
        if self._lossy is not None:
            for graphs in (plain, *others):
                for name, payload in whole.treater.lossy(graphs, self._lossy)[0].items():
                    payloads[name] = max(payload, payloads.get(name, payload), key=lambda each: sum(each.sizes))
            step = whole.reader.encoding(exact, payloads)
        saved = [whole.saved(forward) for forward, _ in (plain, *others)]
        return Choices(exact, step, ladder_of(step, saved[0], saved[1:]))

    def _partitioned(self, whole: _Joint, choices: Choices, rung: Rung) -> _Partitioned:
        """Return the graphs of a choice, and what PyTorch and the treatment of its tensors have made of it."""
        step, reader, wanted = choices.step, whole.reader, rung.evaluation
        graphs, payloads, masks = whole.partition(_marked(whole.graph, reader, rung)), dict[str, LossyPayload](), 0
        if wanted.encoded and self._lossy is not None:
            names = {reader.nodes[owner].name for owner in wanted.encoded}
            payloads, masks = whole.treater.lossy(graphs, self._lossy, names)
            step = reader.encoding(choices.exact, payloads)  # it may save other parts of a result than the search knew
        found = step.encoding(step.evaluate(whole.saved(graphs[0])), reader.indices(payloads.keys()))
        found = step.leaving(found, wanted.away.keys(), wanted.window).with_masks(masks)
        if step.ordered:
            arrange(graphs[1].graph, [reader.nodes[index].name for index in found.backward])
        return _Partitioned(rung, graphs, found, payloads)

    def _chosen(self, whole: _Joint, choices: Choices, chosen: _Partitioned) -> Graphs:
        """Return the graphs of a plan, with what the compiler must respect."""
        step, reader, graphs, found = choices.step, whole.reader, chosen.graphs, chosen.found
        self._set_plan(self._described(choices, chosen, reader), reader.facts(step, found))
        if step.lane is not None:
            waits = Offload(Raw(), (step.lane.tier,))
            self.decisions |= {reader.nodes[owner].name: waits for owner in found.away}
        if self._lossy is not None:
            encoded = Encode(self._lossy.codec)
            self.decisions |= {reader.nodes[owner].name: encoded for owner in found.encoded}
        if self._fuses:
            self.apart = int(APART_SHARE * self._budget)
            copy_for_readers(graphs[1], reader.is_elementwise, self.apart)
            write_in_place(graphs[1].graph, {reader.nodes[index].name for index in step.loops_of(found)}, self.apart)
        graphs[1].recompile()
        return graphs

    def _set_plan(self, plan: GraphPlan, facts: GraphFacts) -> None:
        self.plan, self._facts, self._predicted = plan, facts, plan.predicted_peak
        self.saved_plan.update(plan.to_dict())

    def count(
        self,
        source: str,
        itemsizes: Mapping[tuple[int, ...], int],
        inputs: Mapping[str, Tensor],
        *,
        backward: bool,
    ) -> None:
        """Count the bytes of a graph of the plan in the code that the compiler wrote: of forward, then of backward.

        itemsizes : of the results of the graph, by their shapes
        inputs : of the graph, by name, without data

        Raises
        ------
        OverBudgetError : they are more than the budget. The next attempt knows it
        """
        plan, facts, attempts = self.plan, self._facts, self._attempts
        if plan is None or facts is None or attempts is None:
            return
        # what the caller brings, such as parameters, is not in the budget: but a copy is that forward has laid out anew
        given = {name: value.stride() for name, value in inputs.items() if name.startswith("primals")}
        self._strides = self._strides if backward else given
        copies = {name for name, strides in given.items() if strides != self._strides.get(name)}
        nbytes = {name: facts.nbytes_of(hinted_nbytes(value)) for name, value in inputs.items()}
        own = {name: size for name, size in nbytes.items() if name not in given or name in copies}
        facts = facts.of_graph(itemsizes, copies)
        counted = peak_of(source, own, facts if backward else facts.of_forward())
        if counted is None:
            counted = ceil(self._predicted * max(1 + FUSED_MARGIN, attempts.ratio))
        self._counted = max(self._counted, counted)
        if not backward and attempts.only_least:
            return  # what a refusal names holds for both graphs
        if self._counted <= self._budget:
            self.plan = replace(plan, predicted_peak=self._counted)
            self.saved_plan["predicted_peak"] = self._counted
            return
        attempts.ratio = max(attempts.ratio, self._counted / self._predicted)
        if attempts.only_least:
            self.refusal = self._refused(ceil((1 + LEAST_MARGIN) * self._counted))
        raise OverBudgetError

    def _needed(self, found: RegionEvaluation) -> int:
        """Return the smallest budget of a choice: its peak, and what the compiler may add."""
        if self._attempts is not None:
            return ceil(self._attempts.ratio * found.peak)
        return ceil((1 + FUSED_MARGIN) * found.peak) if self._fuses else found.peak

    def _refused(self, least: int) -> CapacityError:
        budget = self._budget
        return CapacityError(
            f"no plan for the compiled model fits: at least {format_nbytes(least)} of device memory are needed, "
            f"gradients included, and {format_nbytes(budget)} are allowed. Raise the budget by "
            f"{format_nbytes(least - budget)}, use a smaller batch, or compute the loss in parts.",
            least=least,
            limit=budget,
        )

    def _described(self, choices: Choices, chosen: _Partitioned, reader: JointReader) -> GraphPlan:
        step, ladder, rung, found = choices.step, choices.ladder, chosen.rung, chosen.found
        firsts = [unit.first for unit in rung.units]
        again = [0] * len(firsts)
        for index in found.again - ladder.plain.again:
            again[bisect_right(firsts, index) - 1] += not step.operators[index].view
        units = []
        for unit, count in zip(rung.units, again, strict=True):
            modules = [
                self._names.of(node) for node in reader.nodes[unit.first : unit.last] if node.op != "placeholder"
            ]
            ends = dict.fromkeys(name or "loss" for name in (modules[0], modules[-1]))
            saved, held, away, encoded = (
                sum(nbytes for owner, nbytes in each.items() if unit.first <= owner < unit.last)
                for each in (ladder.plain.held, found.held, found.away, found.encoded)
            )
            units.append(GraphUnit(" to ".join(ends), saved, held, count, away, encoded))
        least = self._needed(ladder.rungs[-1].evaluation)
        tier = "" if step.lane is None else step.lane.tier
        plan = self._plan(found, ladder.plain, least, rung.certificate, tuple(units), tier)
        if self._lossy is None or not found.encoded:
            return plan
        payloads = [chosen.payloads[reader.nodes[owner].name] for owner in found.encoded]
        return replace(
            plan,
            encoded=sum(found.encoded.values()),
            codec=str(Encode(self._lossy.codec)),
            noise=self._lossy.noise_of(name for payload in payloads for name in payload.modules),
        )

    def _plan(
        self,
        found: RegionEvaluation,
        plain: RegionEvaluation,
        least: int,
        certificate: str,
        units: tuple[GraphUnit, ...],
        tier: str = "",
    ) -> GraphPlan:
        return GraphPlan(
            self._budget,
            found.peak,
            sum(found.held.values()),
            found.ms,
            plain.peak,
            sum(plain.held.values()),
            plain.ms,
            least,
            certificate,
            units,
            found.moved,
            tier if found.moved else "",
            found.window,
        )


def _merged(joint: GraphModule, num_outputs: int) -> Graph:
    """Return the graph with equal operators merged as PyTorch's partitioner does, so that its nodes are these."""
    apart: dict[str, Any] = {}
    if "extra_node_key" in signature(fx_graph_cse).parameters:  # from PyTorch 2.14 on
        gradients = [node for node in outputs_of(joint)[num_outputs:] if isinstance(node, Node)]
        apart = {"extra_node_key": sources_of(gradients).__contains__}
    return fx_graph_cse(joint.graph, **apart)


def _device_of(joint: GraphModule) -> torch.device:
    """Return the device of a graph's tensors, an accelerator where there are several."""
    values = [node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")]
    devices = {value.device for value in values if isinstance(value, Tensor)}
    return min(devices, key=lambda device: device.type == "cpu", default=torch.device("cpu"))


def _shares(whole: _Joint) -> Iterator[Graphs]:
    """Yield the graphs of PyTorch's partitioner under budgets of its own, which are shares of the saved bytes."""
    for share in SHARES:
        with config.patch(activation_memory_budget=share):
            yield whole.partition(copied(whole.graph))


def _marked(joint: GraphModule, reader: JointReader, rung: Rung) -> GraphModule:
    """Return a copy of a joint graph with the marks that PyTorch's partitioner follows."""
    saved = {reader.nodes[index].name for index in rung.evaluation.saved}
    again = {reader.nodes[index].name for index in rung.evaluation.again}
    copy = copied(joint)
    for node in copy.graph.nodes:
        if node.op == "call_function" and node.name in saved:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif node.op == "call_function" and node.name in again:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return copy


def _names_of(module: GraphModule) -> set[str]:
    return {node.name for node in module.graph.nodes if node.op == "call_function"}


def _saved_names(forward: GraphModule, num_outputs: int) -> set[str]:
    return {node.name for node in outputs_of(forward)[num_outputs:] if isinstance(node, Node)}
