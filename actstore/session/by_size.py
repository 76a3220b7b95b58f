"""Rules by size: a decision for the modules that saved more than a number of bytes in the last forward."""

from __future__ import annotations

from collections import Counter

from torch.nn import Module

from actstore.base.ledger import Ledger
from actstore.base.units import parse_nbytes
from actstore.errors import PolicyError, StateError
from actstore.model.names import named_modules
from actstore.policy import Decision, Keep, Rules, parse_decision
from actstore.policy.aliases import expand
from actstore.policy.pattern import EVERYTHING, Pattern, ancestry


def rules_by_size(
    ledger: Ledger, model: Module | None, larger_than: int | str, decision: Decision | str, among: str
) -> Rules:
    """Return a rule for each module that saved more than `larger_than`; see `ActivationStore.rules_by_size`."""
    limit = parse_nbytes(larger_than, "larger_than")
    if model is None:
        raise PolicyError(
            f"among={among!r}: names modules, but no model was given. Write ActivationStore(model, policy)."
        )
    saved: Counter[str] = Counter()
    for account in ledger.accounts():
        for name in ancestry(account.site.name):
            saved[name] += account.saved
    if not saved.total():
        raise StateError(
            f"larger_than={larger_than!r}: no module has saved a tensor in the store yet. Run a forward inside of the "
            "store first: sizes are those of its last forward."
        )
    wanted = parse_decision(decision) if isinstance(decision, str) else decision
    found = [name for name in _outermost(among, model) if saved[name] > limit]
    return Rules([(name, wanted) for name in found])


def _outermost(among: str, model: Module) -> list[str]:
    """Return the outermost modules that a pattern matches, in the order of the model."""
    names = [name for name, _ in named_modules(model) if name]
    if Pattern.parse(among).tag:
        raise PolicyError(f"among={among!r}: names tensors, and a size is that of a module. Leave the tag out.")
    rules = expand(Rules([(among, Keep())]), model)
    rules.check(names)
    patterns = [Pattern.parse(text) for text, _ in rules.rules] or [EVERYTHING]
    found: dict[str, None] = {}
    for name in names:
        if any(one.matches(name) for one in patterns) and found.keys().isdisjoint(ancestry(name)):
            found[name] = None
    return list(found)
