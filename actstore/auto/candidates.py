"""Decisions to try on a unit, and policies in one line to compare a plan with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.nn import Module
from torch.nn.modules.rnn import RNNBase, RNNCellBase

from actstore.auto.profiler import Profiler
from actstore.auto.sample import UnitCalls
from actstore.model.blocks import has_forward
from actstore.model.units import Shape
from actstore.plan.build import MIN_PART_SHARE
from actstore.plan.decisions import DERIVE, KEEP, RECOMPUTE, except_from_recompute
from actstore.plan.profile import UnitFigures
from actstore.plan.recurrent import PROBE_SEGMENT, PROBE_SLOTS, revolve_of, segments_of
from actstore.plan.values import Grants
from actstore.policy.aliases import attention_of

LOSSY = "int4(round=dither)"


class Candidates:
    """Decisions that may be tried on the units of a model, within the grants of the user.

    Attributes
    ----------
    shapes : the units, by name
    on_host : whether the compute device is the CPU
    """

    def __init__(self, profiler: Profiler, grants: Grants, calls: UnitCalls) -> None:
        self.shapes = {shape.name: shape for shape in profiler.shapes}
        self.grants, self.calls, self.on_host = grants, calls, True
        self._profiler = profiler

    def tiers(self) -> list[str]:
        """Return the granted tiers beside the device, the fastest first."""
        granted = ("host", 0 if self.on_host else self.grants.host), ("disk", self.grants.disk)
        return [tier for tier, grant in granted if grant != 0]

    def least(self) -> dict[str, str]:
        """Return the decisions with the least memory, as far as known without a plan."""
        tier = next(iter(self.tiers()), "")
        again, else_ = (f"recompute(raw @ {tier})", f"derive(raw @ {tier})") if tier else (RECOMPUTE, DERIVE)
        named = [shape for shape in self.shapes.values() if shape.named and shape.name]
        return {shape.name: again if self.frees(shape) else else_ for shape in named}

    def frees(self, shape: Shape) -> bool:
        """Return whether to recompute the unit frees more than `derive` does: not where it is one operator."""
        cell = isinstance(shape.module, RNNBase | RNNCellBase)
        return self.recomputable(shape) and (cell or not _is_simple(shape.module))

    def recomputable(self, shape: Shape) -> bool:
        """Return whether the unit can run again, as far as steps have shown."""
        return shape.recomputable and shape.name not in self._profiler.writers

    def of(self, shape: Shape, figures: Mapping[str, UnitFigures]) -> list[str]:
        """Return the decisions to try on a unit."""
        tiers = self.tiers()
        codecs = ["expack", *(["int8", LOSSY] if self.grants.max_noise else [])]
        found, late = [KEEP], list[str]()
        if not shape.named:
            return found
        if self.recomputable(shape):
            found.append(RECOMPUTE)
            if replays := self._replays(shape.name):
                return [*found, *replays]
            found += [f"recompute(raw @ {tier})" for tier in tiers]
            keep = figures.get(KEEP)
            if keep is not None:
                parts = {
                    name: of_part
                    for name, part in shape.parts.items()
                    if self._worth(f"{shape.name}.{name}", part) and (of_part := keep.parts.get(name))
                    if of_part.saved > MIN_PART_SHARE * keep.total("saved")
                }
                found += [f"{name} : recompute" for name in parts]
                late += self._profiler.separability.exceptions(shape.name, parts, figures, tiers, lossy=len(codecs) > 1)
        moved = (f"{codec} @ {tier}" for tier in tiers for codec in ("raw", *codecs[1:]))
        return [*found, *late, DERIVE, *codecs, *moved]

    def forms(self, name: str, decision: str) -> list[str]:
        """Return the forms of a decision to try, in order. For a unit with several calls, some keep part of these."""
        calls = self.calls.chained(name)
        if decision not in (KEEP, RECOMPUTE) or calls == 1:
            return [decision]
        some = [f"recompute(first={calls - kept})" for kept in (calls // 2, calls // 8, calls // 32) if kept]
        return [decision, *some] if decision == KEEP else [*some, decision]

    def finer(self, name: str) -> list[str]:
        """Return decisions on a unit that may need less memory than to recompute it as a whole."""
        shape = self.shapes[name]
        if not self.recomputable(shape):
            return []
        parts = [
            part
            for part, module in shape.parts.items()
            if self._worth(f"{name}.{part}", module) and next(module.children(), None) is not None
        ]
        by_parts = ["; ".join(f"{part} : recompute" for part in parts)] if len(parts) > 1 else []
        return self._replays(name) or by_parts

    def _replays(self, name: str) -> list[str]:
        """Return the replays to try on a unit that runs several times in a step."""
        calls = self.calls.chained(name)
        return [segments_of(PROBE_SEGMENT)] * (calls > 1) + [revolve_of(PROBE_SLOTS)] * (calls > 2 * PROBE_SLOTS)

    def _worth(self, name: str, part: Module) -> bool:
        """Return whether to try to recompute a part. PyTorch's activations and dropouts save at most an input, and some
        models change that input afterwards."""
        plain = Shape(name, part, {}, True).recomputable and has_forward(part)
        useless = _is_simple(part) and next(part.parameters(), None) is None
        return plain and not useless and name not in self._profiler.writers


def _is_simple(module: Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


OneLines = Mapping[str, Mapping[str, str]]
"""Decisions by unit, by the text of a policy."""


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
    for name in attention_of(model):
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
    if lossy:
        found["int8"] = dict.fromkeys(units, "int8")
    return {text: decisions for text, decisions in found.items() if decisions}
