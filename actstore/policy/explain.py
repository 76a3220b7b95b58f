"""Table of the rules of a policy, and of the modules that each covers in a model."""

from __future__ import annotations

from torch.nn import Module

from actstore.display.naming import short
from actstore.display.text import columns
from actstore.model.blocks import repeated_blocks
from actstore.model.names import named_modules
from actstore.policy.choosers import Auto, Bits
from actstore.policy.decision import Decision, Policy, Recompute
from actstore.policy.pattern import EVERYTHING, Pattern, ancestry
from actstore.policy.rules import Rules

_NAMES_WIDTH = 72  # characters


def explain(policy: Policy | Auto | Bits, model: Module | None) -> str:
    """Return a table: each rule in its order, and what it covers in a model; a sentence for a policy without rules.

    Raises
    ------
    PolicyError : as `Rules.regions`
    """
    if not isinstance(policy, Rules):
        when = "after the first steps" if isinstance(policy, Auto | Bits) else "for each tensor when it is saved"
        return f"{policy}: decides {when}."
    names = [] if model is None else [name for name, _ in named_modules(model)]
    regions = policy.regions(names, [] if model is None else repeated_blocks(model))
    owners = {name: policy.pattern_of(name) for name in names if name}
    lines = [("rule", "covers in this model")]
    everything = "everything else" if policy.rules else "everything"
    for text, decision in (*policy.rules, (str(EVERYTHING), policy.default)):
        pattern = Pattern.parse(text)
        own = [name for name, owner in owners.items() if owner == str(pattern)]
        roots = [name for name in own if name in regions.roots]
        parts = [name for name in own if name in regions.parts]
        tiled = [name for name in own if name in regions.tiled]
        lines.append((f"{pattern} : {decision}", _covered(pattern, decision, own, roots, parts, tiled) or everything))
    return "\n".join(columns(lines))


def _covered(
    pattern: Pattern, decision: Decision, own: list[str], roots: list[str], parts: list[str], tiled: list[str]
) -> str:
    """Return what a rule covers; empty for a default, which covers all that is left."""
    if pattern.tensors:
        what = f"results of {pattern.tensors}" if pattern.operator else f"tensors tagged {pattern.tag}"
        return f"{what}, {'anywhere' if pattern.any_module else f'saved in {pattern.module}'}"
    if isinstance(decision, Recompute):
        found = [f"runs again in backward: {short(roots, _NAMES_WIDTH)}"] if roots else []
        if tiled:
            found.append(f"runs in tiles inside of recomputed modules: {short(tiled, _NAMES_WIDTH)}")
        again = "; ".join(found) or "nothing"
        return f"{again}; everything else is kept" if pattern.any_module else again
    if pattern.any_module:
        return ""
    found = [f"does not run again: {short(parts, _NAMES_WIDTH)}"] if parts else []
    outermost = [name for name in own if {*ancestry(name)}.isdisjoint({*parts, *own} - {name})]
    if tensors := [name for name in outermost if name not in parts]:
        found.append(f"what is saved in {short(tensors, _NAMES_WIDTH)}")
    return "; ".join(found) or "nothing"
