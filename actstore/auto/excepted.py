"""Exceptions from the recomputation of a unit: parts and operators that do not run again, or a part in tiles.

Also the policies in one line that plans are compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from actstore.base.checkpoints import CHECKPOINTS, innermost_pack
from actstore.base.operators import operator_of_node
from actstore.base.trees import flatten
from actstore.model.names import named_modules
from actstore.model.units import can_run_again
from actstore.plan.decisions import DERIVE, KEEP, RECOMPUTE, TILED, TILES, OneLines, except_from_recompute, in_tiles
from actstore.plan.profile import UnitBytes, UnitFigures
from actstore.policy.aliases import modules_of
from actstore.policy.operators import covers
from actstore.recompute.attributes import PartAttributes
from actstore.recompute.decision_modes import modes_paused
from actstore.recompute.outputs import can_wait
from actstore.recompute.running import current, running
from actstore.recompute.tiles import Slices, is_sum, runner

OPERATORS = ("matmul", "sdpa", "conv")  # dear to compute, and their results are few
UNSEEN = "autograd.Function"  # the graph does not show the operators inside
MAX_EXCEPTED_PARTS = 2  # parts of a unit to try as exceptions: those that save most
MAX_NODES = 2000  # of autograd's graph, inspected once for each unit


class Separability:
    """Record of the parts of units that can be excepted, and of the units' operators, from the first call of each.

    Attributes
    ----------
    seen : names of the units and parts that have run
    results : by unit or part, the bytes of its own results as "", and of each class of `OPERATORS` that ran in it
    bound : names of those that cannot be excepted: they change their arguments, leave objects in attributes, return
        what cannot wait, or run in a checkpoint of the model's own
    sought : by name, the modules that may run in tiles; none where plans are exact
    tiled : by name of those that can, the bytes of the results of their matrix products
    untiled : by class of those that cannot, the reason
    """

    def __init__(self) -> None:
        self.seen = set[str]()
        self.bound = set[str]()
        self.results: dict[str, dict[str, int]] = {}
        self.sought: dict[str, Module] = {}
        self.tiled: dict[str, int] = {}
        self.untiled: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.seen and name not in self.bound

    def watch(self, name: str, module: Module) -> Iterator[Any]:
        """Yield the handles of hooks on a unit or a part that has not run yet."""
        if name in self.seen:
            return
        entered: list[tuple[list[Any], list[int], PartAttributes]] = []

        def enter(_module: Module, args: Any, kwargs: Any) -> None:
            if torch._C._current_graph_task_id() == -1 and name not in self.seen:
                leaves = tree_leaves((args, kwargs))
                entered.append((leaves, _versions(leaves), PartAttributes(module.modules())))

        def leave(_module: Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1 or not entered:
                return
            leaves, versions, attributes = entered.pop()
            now = tree_leaves((args, kwargs))
            same = len(now) == len(leaves) and all(a is b for a, b in zip(now, leaves, strict=True))
            if not same or _versions(now) != versions or attributes.effects().hidden or not can_wait(output):
                self.bound.add(name)
            if _is_checkpointed():
                self.bound.add(name)
            self.results[name] = _results_between(leaves, output)
            self.seen.add(name)
            if name in self.sought:
                self._try_tiles(name, module, args, kwargs)

        yield module.register_forward_pre_hook(enter, with_kwargs=True)
        yield module.register_forward_hook(leave, with_kwargs=True)

    def exceptions(
        self,
        unit: str,
        parts: Mapping[str, UnitBytes],
        figures: Mapping[str, UnitFigures],
        tiers: Sequence[str],
        *,
        lossy: bool,
    ) -> Iterator[str]:
        """Yield the exceptions to try on a unit: those that were not tried yet, and those whose first try has gained.

        Parameters
        ----------
        parts : bytes of the parts that are worth it
        figures : of all decisions that were measured
        lossy : whether payloads of parts may lose; the effect of operators' results with an error is not measured
        """
        keep, recompute = figures.get(KEEP), figures.get(RECOMPUTE)
        if keep is None or recompute is None:
            return
        separable = (name for name in parts if f"{unit}.{name}" in self)
        chosen = sorted(separable, key=lambda name: -parts[name].saved)[:MAX_EXCEPTED_PARTS]
        operators = (f"@{name}" for name in OPERATORS if name in self.results.get(unit, ()))
        derive = figures.get(DERIVE, keep).parts
        for what in (*operators, *chosen):
            first = figures.get(except_from_recompute(what, KEEP))
            waits = [KEEP]
            if first is not None and first.total("held") > recompute.total("held"):
                moved = [f"raw @ {tier}" for tier in tiers]
                derives = what in parts and what in derive and derive[what].held < parts[what].saved
                waits += [*([DERIVE] if derives else []), *moved, *(["int8"] if lossy and what in parts else [])]
            for wait in waits:
                decision = except_from_recompute(what, wait)
                found = figures.get(decision)
                if found is None or _gains(found, recompute, keep):
                    yield decision

    def _try_tiles(self, name: str, module: Module, args: Any, kwargs: Any) -> None:
        """Check that a module treats each token by itself, given the arguments of a call that has ended."""
        why = "it writes to its arguments, leaves or returns objects, or runs in a checkpoint of the model's own"
        if name not in self.bound:
            leaves, form = flatten(args, kwargs)
            try:
                with running(None), modes_paused():
                    slices = Slices(leaves, TILES, f"{name} ({TILED})")
                    sums = is_sum(slices.check(runner(module.forward, leaves, form), {}))
                why = "it returns sums over tokens" if sums else ""
            except Exception as error:  # a refusal, or the module's own, of slices of its arguments
                why = f"{type(error).__name__}: {error}"
        if why:
            self.untiled.setdefault(type(module).__name__, f"{name} is not planned in tiles: {why}")
        else:
            self.tiled[name] = self.results[name].get("matmul", 0)

    def part_in_tiles(self, unit: str) -> str:
        """Return the part of a unit that can run in tiles, by its name relative to that; the largest of several."""
        inside = [name for name in self.tiled if name.startswith(f"{unit}.")]
        return max(inside, key=self.tiled.__getitem__, default="")[len(unit) + 1 :]

    def one_line(self, model: Module, blocks: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return the decisions with one part of each block in tiles, by their text; nothing if `@mlp` are others."""
        tiled = {block: in_tiles(part, RECOMPUTE) for block in blocks if (part := self.part_in_tiles(block))}
        is_whole = tiled and len(tiled) == len(blocks) == len(modules_of("@mlp", model))
        return {f"@mlp : {TILED}; @blocks : recompute": tiled} if is_whole else {}

    def in_tiles(self, unit: str, again: Sequence[str], figures: Mapping[str, UnitFigures]) -> Iterator[str]:
        """Yield the decisions with a part of a unit in tiles: those that were not tried yet, and those that need less.

        Parameters
        ----------
        again : decisions that recompute the unit
        figures : of all decisions that were measured
        """
        if part := self.part_in_tiles(unit):
            for decision in again:
                found, whole = figures.get(in_tiles(part, decision)), figures.get(decision)
                if found is None or whole is None or found.transient < whole.transient:
                    yield in_tiles(part, decision)


def one_lines(
    model: Module, units: Iterable[str], blocks: Sequence[str], tiers: Iterable[str], *, lossy: bool
) -> OneLines:
    """Return policies in one line, the most common ones first.

    Parameters
    ----------
    units : all units that a rule can name
    blocks : those that can be recomputed
    """
    units = list(units)
    inner = {block: [] for block in blocks}  # type: dict[str, list[str]]
    for name in modules_of("@attention", model):
        for block in blocks:
            if name.startswith(f"{block}."):
                inner[block].append(name[len(block) + 1 :])
    attention = {block: except_from_recompute(names[0], KEEP) for block, names in inner.items() if len(names) == 1}
    recompute = dict.fromkeys(blocks, RECOMPUTE)
    found = {
        "@blocks : recompute": recompute,
        "@blocks : recompute; * : derive": dict.fromkeys(units, DERIVE) | recompute,
        "derive": dict.fromkeys(units, DERIVE),
        "@attention : keep; @blocks : recompute": recompute | attention if attention else {},
        "*/@sdpa : keep; @blocks : recompute": dict.fromkeys(blocks, except_from_recompute("@sdpa", KEEP)),
    }
    for tier in tiers:
        found[f"raw @ {tier}"] = dict.fromkeys(units, f"raw @ {tier}")
        found[f"@blocks : recompute(raw @ {tier})"] = dict.fromkeys(blocks, f"recompute(raw @ {tier})")
    for text in ("int8", "derive(int8)") if lossy else ():
        found[text] = dict.fromkeys(units, text)
    return {text: decisions for text, decisions in found.items() if decisions}


def mlps_of(model: Module) -> dict[str, Module]:
    """Return the modules of ``@mlp`` with modules inside, which tiles may take."""
    named = dict(named_modules(model))
    found = {name: named[name] for name in modules_of("@mlp", model)}
    return {name: mlp for name, mlp in found.items() if next(mlp.children(), None) is not None and can_run_again(mlp)}


def mlp_for_tiles(model: Module, unit: str) -> str:
    """Return the name of the first module of `mlps_of` in a unit that tiles need not refuse; empty for none."""
    inside = {name: mlp for name, mlp in mlps_of(model).items() if name.startswith(f"{unit}.")}
    return next((name for name, mlp in inside.items() if not any(map(_refuses_tiles, mlp.modules()))), "")


def _refuses_tiles(module: Module) -> bool:
    """Return whether tiles refuse a module of PyTorch: its results depend on other tokens, or on random numbers."""
    return module.training and (isinstance(module, _NormBase) or (isinstance(module, _DropoutNd) and module.p > 0))


def _gains(found: UnitFigures, recompute: UnitFigures, keep: UnitFigures) -> bool:
    """Return whether an exception may do better than whole units that are kept, beside recomputed ones.

    Such units buy time for bytes at one rate, and the exception must not be below it.
    """
    bytes_bought = found.total("held") - recompute.total("held")
    rate = _work(recompute) / max(1, keep.total("held") - recompute.total("held"))
    saved = _work(recompute) - _work(found)
    return saved > 0 and saved >= rate * bytes_bought


def _work(f: UnitFigures) -> float:
    return f.work_forward + f.work_backward


def _is_checkpointed() -> bool:
    """Return whether a checkpoint of the model's own is the innermost one now."""
    pack, run = innermost_pack(), current()
    return getattr(pack, "__module__", "") in CHECKPOINTS and (run is None or pack is not run.hook)


def _results_between(inputs: Sequence[Any], output: Any) -> dict[str, int]:
    """Return the bytes of a module's output, and of each class of `OPERATORS` in autograd's graph before it.

    `UNSEEN` has the number of custom functions.
    """
    found = {"": sum(leaf.nbytes for leaf in tree_leaves(output) if type(leaf) is Tensor)}
    seen = {leaf.grad_fn for leaf in inputs if isinstance(leaf, Tensor)} | {None}
    waiting = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if issubclass(type(node), BackwardCFunction):
            found[UNSEEN] = found.get(UNSEEN, 0) + 1
        operator = f"aten.{operator_of_node(node.name())}"
        for name in OPERATORS:
            if covers(name, operator):
                nbytes = sum(prod(each.shape) * each.dtype.itemsize for each in node._input_metadata)
                found[name] = found.get(name, 0) + nbytes
        waiting += [following for following, _ in node.next_functions]
    return found


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
