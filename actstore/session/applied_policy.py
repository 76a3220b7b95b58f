"""A policy applied to a model: the modules that it wraps, and the record of each module for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

from torch.nn import Module

from actstore.autograd import compiled
from actstore.autograd.compiled import NamedCall
from actstore.autograd.tracker import ModuleSites
from actstore.base.ledger import Ledger
from actstore.errors import PolicyError
from actstore.model.blocks import has_forward, repeated_blocks
from actstore.model.names import named_modules, names_by_caller
from actstore.policy import Keep, Policy, Recompute, Rules
from actstore.policy.operators import COLLECTIVE
from actstore.policy.pattern import Pattern, ancestry
from actstore.session.entries import StoreEntry, innermost_of

if TYPE_CHECKING:
    from actstore.recompute.checkpoints import RegionWarnings
    from actstore.recompute.forwards import ForwardWrapper
    from actstore.recompute.inner_rules import InnerRules

GROUPED_NBYTES = 2**20  # under `keep`, smaller tensors are accounted for in groups


class AppliedPolicy:
    """A policy on a model.

    Attributes
    ----------
    policy : as a value
    places : the record of each module, with the accounts of its tensors
    top : the record of tensors that are saved outside of all modules

    Parameters
    ----------
    owner : the store whose entries count
    warned : the warnings of recomputed modules

    Raises
    ------
    PolicyError : the policy does not fit the model
    """

    def __init__(
        self,
        policy: Policy,
        model: Module | None,
        owner: object,
        ledger: Ledger,
        warned: RegionWarnings,
        min_nbytes: int,
    ) -> None:
        self.policy = policy
        self._ledger = ledger
        self._min_nbytes = min_nbytes
        self._wrap = partial(_wrap, policy, model, ref(owner), warned)
        self._wrapped = self._wrap()
        self._compiled: list[str] = []  # modules whose graphs follow the policy
        self.places: dict[Module, ModuleSites] = {}
        self.top = self._place("")
        if model is not None:
            self.name_modules(named_modules(model))

    def enter(self, entry: StoreEntry) -> None:
        """Wrap the forwards and the compiled calls of the modules for an entry, until its undo."""
        named: list[NamedCall] = []
        entry.undos += [partial(compiled.unwrap, named, entry), partial(self.exit, entry)]
        compiled.wrap(self.places, entry, named)
        if self._wrapped and not hasattr(entry, "calls"):
            from actstore.recompute.replay import Calls

            entry.calls = Calls()
            entry.undos.append(entry.calls.state.close)
        for wrapped in self._wrapped:
            wrapped.enter(entry)

    def exit(self, entry: StoreEntry) -> None:
        """Restore the forwards."""
        for wrapped in self._wrapped:
            wrapped.exit(entry)

    def name_modules(self, named: list[tuple[str, Module]]) -> None:
        """Update the records from the model's modules, because users replace modules between steps.

        Raises
        ------
        PolicyError : the policy no longer fits the model
        """
        by_name = {place.name: place for place in self.places.values()}
        places, replaced = {}, False
        for name, module in named:
            place = self.places.get(module)
            if place is None or place.name != name:
                replaced = bool(self.places)
                place = by_name.get(name)
                if place is None:
                    place = by_name[name] = self._place(name)
            places[module] = place
        if self.places.keys() != places.keys():
            for module, names in names_by_caller(named).items():
                places[module].rename({at: by_name.get(name) or self._place(name) for at, name in names.items()})
        self.places = places
        if replaced:
            self._wrapped = self._wrap()
            for name in self._compiled:
                self.leave_to_graphs(name)

    @property
    def around_layers(self) -> tuple[str, ...]:
        """Names of the modules around the recomputed ones, where each of these is a single layer."""
        if not self._wrapped:
            return ()
        from actstore.recompute.recomputed_module import RecomputedModule

        regions = {each.name for each in self._wrapped if isinstance(each, RecomputedModule)}
        names = {place.name: module for module, place in self.places.items()}
        if any(next(names[name].children(), None) is not None for name in regions if name in names):
            return ()
        around = dict.fromkeys(name.rpartition(".")[0] for name in regions)
        return tuple(name for name in names if name and name in around and has_forward(names[name]))

    def leave_to_graphs(self, name: str) -> None:
        """Wrap no module in `name`, because compiled graphs recompute what the policy says."""
        if name not in self._compiled:
            self._compiled.append(name)
        inside = f"{name}." if name else ""
        self._wrapped = [each for each in self._wrapped if each.name != name and not each.name.startswith(inside)]

    def _place(self, name: str) -> ModuleSites:
        policy, keep_below = self.policy, self._min_nbytes
        if not isinstance(policy, Rules):
            return ModuleSites(name, self._ledger, None, keep_below, watched=False)
        decision = policy.decide(name)
        asks = any(pattern.operator for pattern, _ in policy.tensor_rules(name))
        if isinstance(decision, Keep) and not (policy.names_tags or asks):
            keep_below = max(keep_below, GROUPED_NBYTES)
        watched = policy.pattern_of(name) != "*" or isinstance(decision, Recompute)
        return ModuleSites(name, self._ledger, None if asks else decision, keep_below, watched=watched)


def _wrap(policy: Policy, model: Module | None, owner: ref[object], warned: RegionWarnings) -> list[ForwardWrapper]:
    if not isinstance(policy, Rules):
        return []
    if model is None:
        if policy.recomputes or any(not pattern.startswith("*/") for pattern, _ in policy.rules):
            raise PolicyError(
                f"the policy names modules or recomputes them, but no model was given: {str(policy)!r}. "
                "Write ActivationStore(model, policy)."
            )
        _require_regions(policy, [])
        return []
    named = dict(named_modules(model))
    policy.check(named)
    roots, parts, tiled = policy.regions(list(named), repeated_blocks(model) if policy.recomputes else [])
    if not roots and not parts:
        _require_regions(policy, [])
        return []
    from actstore.recompute.excepted import ExceptedPart
    from actstore.recompute.recomputed_module import RecomputedModule

    excepted = dict(part for name in parts for part in _callable_parts(name, named[name]))
    once = _modules_of(excepted.values())
    alike = Counter(roots.values())
    inner = {name: _inner_rules(name, named, policy, excepted) for name in roots}
    _require_regions(policy, [rules for rules in inner.values() if rules is not None])

    def entry_of() -> StoreEntry | None:
        return innermost_of(owner())

    return [
        *(ExceptedPart(name, part, policy.decide(name), once, warned) for name, part in excepted.items()),
        *(
            RecomputedModule(
                name,
                named[name],
                decision,
                entry_of,
                warned,
                alike[decision],
                once,
                _modules_of(part for inside, part in excepted.items() if name in [*ancestry(inside)][1:]),
                inner[name],
                any(name in [*ancestry(inside)][1:] for inside in tiled),
            )
            for name, decision in roots.items()
        ),
        *(RecomputedModule(name, named[name], decision, entry_of, warned) for name, decision in tiled.items()),
    ]


def _modules_of(parts: Iterable[Module]) -> frozenset[Module]:
    return frozenset(inner for part in parts for inner in part.modules())


def _inner_rules(root: str, named: Iterable[str], policy: Rules, excepted: Container[str]) -> InnerRules | None:
    """Return the rules for tensors inside of a recomputed module, without its parts; None for none."""
    from actstore.recompute.inner_rules import InnerRules

    names = []
    for name in named:
        around = [*ancestry(name)]
        if root in around and not any(outer in excepted for outer in around[: around.index(root)]):
            names.append(name)
    return InnerRules(policy, names) or None


def _require_regions(policy: Rules, inner: Sequence[InnerRules]) -> None:
    """Refuse a rule for collectives outside of recomputed modules, where nothing communicates again."""
    for text, decision in policy.rules:
        pattern = Pattern.parse(text)
        if pattern.operator == COLLECTIVE and not any(rules.has(pattern) for rules in inner):
            raise PolicyError(
                f"rule '{text} : {decision}' is for collectives that a recomputed module would call again, and "
                f"'{pattern.module}' holds no such module. Add a rule such as '{pattern.module} : recompute', or leave "
                "this one out.",
                pattern=text,
            )


def _callable_parts(name: str, module: Module) -> Iterator[tuple[str, Module]]:
    """Yield a module, or the outermost ones inside of it, that have a forward."""
    if type(module).forward is not Module.forward:
        yield name, module
        return
    for key, child in module.named_children():
        yield from _callable_parts(f"{name}.{key}", child)
