"""Modules of a model that a policy recomputes, whose forward is wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from actstore.errors import PolicyError
from actstore.policy.decision import Decision, Recompute
from actstore.policy.pattern import EVERYTHING, Pattern, ancestry

Rule = tuple[Pattern, Decision]


class Regions(NamedTuple):
    """Modules of a model that a policy recomputes, and modules inside of them that do not run again.

    Attributes
    ----------
    roots : the recomputed modules, each with its decision
    parts : the outermost modules in them that another rule decides
    """

    roots: dict[str, Recompute]
    parts: list[str]


def regions_of(ordered: Sequence[Rule], names: Sequence[str], blocks: Sequence[str]) -> Regions:
    """Return the regions of a model; see `Rules.regions`.

    Parameters
    ----------
    ordered : the rules, in the order of matching; the last covers everything
    """
    if isinstance(ordered[-1][1], Recompute) and not blocks:
        raise PolicyError(
            f"'{ordered[-1][0]} : {ordered[-1][1]}' recomputes the repeated blocks of the model, and it has none. Name "
            f"the modules to recompute instead, such as 'encoder : {ordered[-1][1]}'."
        )
    names = [name for name in names if name]
    owners = {name: next(rule for rule in ordered if rule[0].covers(name)) for name in names}  # without rules for tags
    matched = {
        name
        for name, (pattern, decision) in owners.items()
        if isinstance(decision, Recompute) and (name in blocks if pattern == EVERYTHING else pattern.matches(name))
    }
    regions = Regions({}, [])
    for name in names:
        root, part = _around(name, owners, matched)
        if name == root and isinstance(decision := owners[name][1], Recompute):
            regions.roots[name] = decision
        elif name == part:
            regions.parts.append(name)
    return regions


def _around(name: str, owners: dict[str, Rule], matched: set[str]) -> tuple[str, str]:
    """Return the region that a module is in, and the part of it that does not run again; empty for none."""
    root = part = ""
    for outer in reversed([*ancestry(name)]):
        if outer not in owners:
            continue
        if outer in matched and (part or not root):
            root, part = outer, ""
        elif root and not part and owners[outer] is not owners[root]:
            if isinstance(owners[outer][1], Recompute):
                raise _conflict(
                    owners[outer],
                    owners[root],
                    f"{root} holds {outer}",
                    "the region runs again as a whole. Leave that rule out, or write patterns for the other parts "
                    "instead of the whole",
                )
            part = outer
    return root, part


def _conflict(inner: Rule, outer: Rule, where: str, rule: str) -> PolicyError:
    return PolicyError(
        f"rule '{inner[0]} : {inner[1]}' lies inside the recomputed region of rule '{outer[0]} : {outer[1]}' "
        f"({where}): {rule}."
    )
