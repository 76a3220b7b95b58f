"""A store's policy for compiled graphs."""

from __future__ import annotations

from torch.nn import Module

from actstore.compiled.budget.plan import RegionBudget
from actstore.compiled.rules import GraphRules
from actstore.errors import ConfigError
from actstore.model.blocks import repeated_blocks
from actstore.model.names import named_modules
from actstore.policy import Auto, Bits, Policy, Recompute, Rules


def graph_rules(
    policy: Policy,
    chooser: Auto | Bits | None,
    model: Module | None,
    part: Module | None,
    min_nbytes: int,
    *,
    samples: bool,
) -> GraphRules:
    """Return the policy of a store for a compiled module.

    Parameters
    ----------
    chooser : the policy that chooses; None for rules
    model : the store's; None for none
    part : the module that is compiled, `model` or one inside of it; None where it is unknown
    samples : whether graphs measure the errors of their payloads

    Raises
    ------
    ConfigError : the policy is `Bits`, or `Auto` with arguments that graphs do not follow, or for a part of the model;
        it recomputes chains; or `part` is not a part of `model`
    """
    if chooser is not None:
        budget = _budget(chooser, whole=part is model)
        return GraphRules(
            Rules([]), lambda: [] if model is None else named_modules(model), "", min_nbytes, budget=budget
        )
    for decision in policy.decisions if isinstance(policy, Rules) else ():
        if isinstance(decision, Recompute) and (decision.replays or decision.first is not None):
            raise ConfigError(
                f"decision={decision}: segment, schedule and first are not for compiled graphs. Leave them out, or "
                "compile the modules inside of the recomputed ones by Module.compile()."
            )
    whole = part if model is None else model
    named = [] if whole is None else named_modules(whole)
    targets = [""] if part is None else [name for name, module in named if module is part]
    if not targets:
        raise ConfigError(
            f"model={type(part).__name__}: is not a part of the store's model, {type(whole).__name__}. Compile that, "
            "or modules of it."
        )
    roots, parts = frozenset[str](), frozenset[str]()
    if model is not None and isinstance(policy, Rules) and policy.recomputes:
        regions = policy.regions([name for name, _ in named], repeated_blocks(model))
        inside = [
            name for name, _ in named if name == targets[0] or name.startswith(f"{targets[0]}.") or not targets[0]
        ]
        roots, parts = (frozenset(each).intersection(inside) for each in (regions.roots, regions.parts))

    def modules() -> list[tuple[str, Module]]:  # when a graph is compiled: users replace modules
        return [] if whole is None else named_modules(whole)

    return GraphRules(policy, modules, targets[0], min_nbytes, roots, parts, samples=samples)


def _budget(chooser: Auto | Bits, *, whole: bool) -> RegionBudget:
    if isinstance(chooser, Bits):
        raise ConfigError(f"policy={chooser}: does not choose for compiled graphs. Give rules, such as 'int8'.")
    if chooser.group is not None:
        raise ConfigError(
            f"policy={chooser}: group is not for compiled models. Leave it out: Auto({chooser.budget!r})."
        )
    if not whole:
        raise ConfigError(f"policy={chooser}: a budget is for the whole model. Compile it by store.compile().")
    return RegionBudget(chooser.budget_nbytes)
