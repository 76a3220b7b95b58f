"""The partitioner and the loops of a plan as options of Inductor, with an identity for its caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch._inductor import compile_fx, config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

from actstore.compiled.generated_code import itemsizes_of
from actstore.compiled.partition import Partitioner

_SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)


def counting(partitioner: Partitioner) -> Callable[..., Any]:
    """Return Inductor's compiler of one graph, which counts the bytes of what it wrote for a plan."""

    def compile_and_count(gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        names, itemsizes = [node.name for node in gm.graph.find_nodes(op="placeholder")], itemsizes_of(gm.graph)
        compiled: Any = compile_fx.compile_fx_inner(gm, inputs, **options)
        if partitioner.budget_partition is not None and not options.get("is_inference"):
            tensors = {name: value for name, value in zip(names, inputs, strict=True) if isinstance(value, Tensor)}
            partitioner.budget_partition.count(
                compiled.source_code, itemsizes, tensors, backward=bool(options.get("is_backward"))
            )
        return compiled

    return compile_and_count


class _Identified:
    """A pass of Inductor for one region. Those of one `digest` and one graph share compiled code, in all processes."""

    def __init__(self, partitioner: Partitioner, digest: str) -> None:
        self._partitioner = partitioner
        self._digest = digest

    def uuid(self) -> str:
        """Return the digest."""
        return self._digest

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self._digest,)  # the caches hash Inductor's options as a pickle

    def __deepcopy__(self, memo: Any) -> _Identified:
        return self


class InductorPartitioner(_Identified, CustomPartitionerFn):
    """A `Partitioner` for Inductor."""

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        return self._partitioner(gm, joint_inputs, **kwargs)


class LoopsApart(_Identified, _SchedulerPass):  # type: ignore[misc]
    """The loops of a plan, in its order, where of two in one loop neither needs the other.

    None writes a large result: Inductor would run an operator again in the loop of the gradient that reads the same
    tensor, where all of their inputs and results exist at once. And none joins an earlier one that would have to wait
    for what it needs, with its inputs in memory.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        budgeted = self._partitioner.budget_partition
        if nodes and budgeted is not None and budgeted.apart is not None:
            scheduler = nodes[0].scheduler
            orders = {node.get_name(): node.min_order for node in nodes}
            scheduler.can_fuse = partial(_can_fuse, scheduler.can_fuse, budgeted.apart, orders)
            for name in settings_of_plans():
                setattr(config, name, False)
        return nodes


def settings_of_plans() -> dict[str, Any]:
    """Return the settings of Inductor that are off in the graphs of a plan, with their present values.

    Inductor would choose another order by an estimate of its own, and hold a buffer until a later result of its size.
    """
    return {name: getattr(config, name) for name in ("reorder_for_peak_memory", "allow_buffer_reuse")}


def _can_fuse(
    inner: Callable[..., bool], apart: int, orders: dict[str, int], one: Any, other: Any, *rest: Any, **options: Any
) -> bool:
    if _are_apart(one, other):
        early, late = sorted((one, other), key=lambda node: node.min_order)
        if max((orders[name] for name in late.ancestors), default=-1) >= early.min_order:
            return False
    pairs = ((one, other), (other, one))
    for first, second in (
        (first, second) for a, b in pairs for first in _writers(a, apart) for second in b.get_nodes()
    ):
        if _are_apart(first, second):
            return False
    return inner(one, other, *rest, **options)


def _are_apart(one: Any, other: Any) -> bool:
    """Return whether neither of two nodes, of one loop or several, needs the other."""
    return not (one.get_operation_names() & other.ancestors or other.get_operation_names() & one.ancestors)


def _writers(node: Any, nbytes: int) -> list[Any]:
    """Return the loops of a node that write a result of `nbytes` or more, element by element."""
    from torch._inductor.scheduler import SchedulerNode

    loops = [each for each in node.get_nodes() if isinstance(each, SchedulerNode) and not each.is_reduction()]
    return [each for each in loops if any(_nbytes(output.node) >= nbytes for output in each.get_outputs())]


def _nbytes(buffer: Any) -> Any:
    return buffer.get_numel() * buffer.get_dtype().itemsize
