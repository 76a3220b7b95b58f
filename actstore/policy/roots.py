"""Modules of a model that a policy recomputes, whose forward is wrapped."""

from __future__ import annotations

from collections.abc import Sequence

from actstore.errors import PolicyError
from actstore.policy.decision import Decision, Recompute
from actstore.policy.pattern import EVERYTHING, Pattern, ancestry

Rule = tuple[Pattern, Decision]


def recompute_roots(ordered: Sequence[Rule], names: Sequence[str], blocks: Sequence[str]) -> dict[str, Recompute]:
    """Return the outermost modules that each Recompute rule matches itself and decides; see `Rules.recompute_roots`.

    Parameters
    ----------
    ordered : the rules, in the order of matching; the last covers everything
    """
    if isinstance(ordered[-1][1], Recompute) and not blocks:
        raise PolicyError(
            f"'{ordered[-1][0]} : {ordered[-1][1]}' recomputes the repeated blocks of the model, and it has none; name "
            f"the modules to recompute instead, such as 'encoder : {ordered[-1][1]}'"
        )
    names = [name for name in names if name]
    owners = {name: next(rule for rule in ordered if rule[0].covers(name)) for name in names}  # without rules for tags
    matched = {
        name
        for name, (pattern, decision) in owners.items()
        if isinstance(decision, Recompute) and (name in blocks if pattern == EVERYTHING else pattern.matches(name))
    }
    roots: dict[str, Recompute] = {}
    inside: set[str] = set()  # the roots and all modules in them
    for name in names:
        around = [outer for outer in ancestry(name) if outer in matched]
        if not around:
            continue
        inside.add(name)
        root = around[-1]
        if owners[name] is not owners[root]:
            raise _conflict(owners[name], owners[root], f"{root} holds {name}")
        if name == root and isinstance(decision := owners[name][1], Recompute):
            roots[name] = decision
    _require_live_tags(ordered, owners, inside)
    return roots


def _require_live_tags(ordered: Sequence[Rule], owners: dict[str, Rule], inside: set[str]) -> None:
    """Refuse a rule for a tag whose modules are all recomputed."""
    for rule in ordered:
        if rule[0].tag and not rule[0].any_module:
            covered = [name for name in owners if rule[0].matches(name)]
            if covered and inside.issuperset(covered):
                raise _conflict(rule, owners[covered[0]], covered[0])


def _conflict(inner: Rule, outer: Rule, where: str) -> PolicyError:
    return PolicyError(
        f"rule '{inner[0]} : {inner[1]}' lies inside the recomputed region of rule '{outer[0]} : {outer[1]}' "
        f"({where}): nothing inside a recomputed region is saved; leave that rule out, or write patterns for the other "
        "parts instead of the whole"
    )
