"""A step of a store as advice reads it: its accounts, by what happened to their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING

from torch.nn import Module

from actstore.autograd.protect import COMPILED
from actstore.base.ledger import Account, Circumstances, Ledger
from actstore.base.note import SMALL
from actstore.base.units import format_nbytes
from actstore.policy import Derive, Offload, Policy, Recompute, Rules

if TYPE_CHECKING:
    from actstore.accuracy.bits.payloads import Choice
    from actstore.compiled.budget.plan import GraphPlan
    from actstore.plan.plan import Plan
    from actstore.session.applied_policy import AppliedPolicy
    from actstore.session.controllers import StepPolicy

_saved, _held_at_exit = attrgetter("saved"), attrgetter("held_at_exit")
PLANNING_CHOOSERS = ("auto", "plan")  # they plan for bytes on their way, and for decoded and recomputed tensors
BACKWARD_WORK = ("compiled", "decoding", "derivation", "recomputation")


@dataclass(frozen=True)
class Request:
    """Choices of the user that advice must respect.

    Attributes
    ----------
    policy : the present policy
    chooser : "auto", "plan" or "bits" where one of these chooses decisions, "function" for a user's function
    measuring : whether the chooser has not chosen yet
    budget : of a chooser; 0 for none
    hidden : names of modules that ran inside a checkpoint of the model's own, and that a rule names
    named : names of the modules in the model
    runs : False where the store has a model that has not run
    around_layers : modules around the recomputed ones, where these are single layers
    """

    policy: Policy
    chooser: str = ""
    measuring: bool = False
    budget: int = 0
    hidden: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    runs: bool = True
    around_layers: tuple[str, ...] = ()

    @property
    def by_rules(self) -> bool:
        """True if the user's own rules decide what moves."""
        return self.chooser not in PLANNING_CHOOSERS


def request_of(
    applied: AppliedPolicy, controller: StepPolicy | None, plan: Plan | GraphPlan | Choice | None, model: Module | None
) -> Request:
    """Return the request of a store whose `plan`, if any, comes from its `controller` or was given."""
    places = applied.places.values()
    request = Request(
        applied.policy,
        "" if isinstance(applied.policy, Rules) else "function",
        hidden=tuple(place.name for place in places if place.hidden),
        named=tuple(place.name for place in places),
        runs=model is None or any(place.has_run for place in places),
        around_layers=applied.around_layers,
    )
    if controller is None and plan is None:
        return request
    chooser = "plan" if controller is None else controller.name
    return replace(request, chooser=chooser, measuring=plan is None, budget=int(getattr(plan, "budget", 0)))


def _kept_nbytes(account: Account) -> int:
    """Return the bytes that are kept of those that an account saved: of a recomputed region, its inputs."""
    return min(account.saved, account.held_at_exit or account.saved)


class AccountGroup:
    """Accounts that have one cause in common.

    Attributes
    ----------
    most : the largest account; None without accounts
    nbytes : the bytes of all
    """

    def __init__(self, accounts: Iterable[Account], nbytes_of: Callable[[Account], int]) -> None:
        self.accounts = list(accounts)
        self.most = max(self.accounts, key=nbytes_of, default=None)
        self.nbytes = sum(map(nbytes_of, self.accounts))

    def __iter__(self) -> Iterator[Account]:
        return iter(self.accounts)

    @property
    def where(self) -> str:
        """The decision on most of the bytes."""
        return "" if self.most is None else self.most.where


class Step:
    """A step of a store, as diagnoses read it.

    Attributes
    ----------
    ledger : the books of the step
    facts : the conditions that its figures depend on
    request : the user's choices
    accounts : of all sites
    saved : bytes that plain autograd holds
    """

    def __init__(self, ledger: Ledger, facts: Circumstances, request: Request) -> None:
        self.ledger = ledger
        self.facts = facts
        self.request = request
        self.accounts = ledger.accounts()
        self.saved = sum(account.saved for account in self.accounts)
        self._kept = [account for account in self.accounts if account.saved and not account.stored]
        self._stored = [account for account in self.accounts if account.stored]

    # -- kept accounts; each is in at most one of these groups ---------------------------------------------------------

    @cached_property
    def small(self) -> AccountGroup:
        return AccountGroup((a for a in self._kept if a.note.reason == SMALL), _kept_nbytes)

    @cached_property
    def no_room(self) -> AccountGroup:
        return AccountGroup((a for a in self._kept if a.note.kept and a.note.full), _kept_nbytes)

    @cached_property
    def compiled(self) -> AccountGroup:
        return AccountGroup((a for a in self._kept if a.note.reason == COMPILED), _saved)

    @cached_property
    def exact(self) -> AccountGroup:
        return AccountGroup((a for a in self._kept if a.exact and a.note.reason != COMPILED), _kept_nbytes)

    @cached_property
    def whole(self) -> AccountGroup:
        known = {id(a) for group in (self.small, self.no_room, self.compiled, self.exact) for a in group}
        return AccountGroup((a for a in self._kept if a.note.kept and a.note and id(a) not in known), _kept_nbytes)

    @cached_property
    def by_rule(self) -> dict[tuple[str, str], int]:
        """Bytes that only a rule keeps, by its pattern and decision."""
        found: dict[tuple[str, str], int] = {}
        policy = self.request.policy
        for account in self._kept:
            if account.note or isinstance(account.decision, Recompute):
                continue
            rule = "*", "keep"
            if isinstance(policy, Rules):
                tensor = account.site.name, account.site.tag, account.operator
                decision = policy.decide(*tensor)
                rule = policy.pattern_of(*tensor), str(decision)
                if rule[0] != "*" and isinstance(decision, Recompute):  # calls beyond `first`, inputs that stay alive
                    continue
            nbytes = _held(account) if isinstance(account.decision, Derive) else account.saved
            found[rule] = found.get(rule, 0) + nbytes
        return found

    def derives(self, account: Account) -> bool:
        """Return whether the rule for a site derives what it can, also where the site itself waits."""
        policy, site = self.request.policy, account.site
        return isinstance(policy, Rules) and isinstance(policy.decide(site.name, site.tag, account.operator), Derive)

    # -- stored accounts -----------------------------------------------------------------------------------------------

    @cached_property
    def on_host(self) -> AccountGroup:
        """Payloads in host memory, where that is the compute device's own."""
        stored = self._stored if self.facts.on_host else []
        return AccountGroup((a for a in stored if _first_tier(a) == "host"), lambda a: min(a.stored, a.held_at_exit))

    @cached_property
    def moved(self) -> AccountGroup:
        hosted = {id(account) for account in self.on_host}
        return AccountGroup(
            (a for a in self._stored if _first_tier(a) not in ("", "device") and id(a) not in hosted), _held_at_exit
        )

    @cached_property
    def crowded(self) -> AccountGroup:
        """Payloads that stayed on the device, because the window was full."""
        keeps = self.facts.keeps_when_full
        return AccountGroup((a for a in self.moved if keeps and a.note.full and not a.note.kept), _held_at_exit)

    @cached_property
    def in_flight(self) -> AccountGroup:
        crowded = {id(account) for account in self.crowded}
        return AccountGroup((a for a in self.moved if id(a) not in crowded), _held_at_exit)

    # -- what remedies depend on ---------------------------------------------------------------------------------------

    @property
    def lower(self) -> str:
        """The fastest tier that may be used and frees memory of the compute device: "host", "disk", or empty."""
        facts = self.facts
        return "host" if not facts.on_host and facts.host_nbytes != 0 else "disk" if facts.disk_nbytes != 0 else ""

    @property
    def window_counts(self) -> bool:
        """True where a larger window has an effect: not where the bound is a share of the moved bytes."""
        return self.facts.bound_nbytes >= self.facts.window_nbytes

    @property
    def bound(self) -> str:
        """The bound on payloads that wait on the device although a tier has them or is about to."""
        facts = self.facts
        return (
            f"Window({format_nbytes(facts.window_nbytes)})" if self.window_counts else format_nbytes(facts.bound_nbytes)
        )

    @cached_property
    def freed_before_peak(self) -> int:
        """Bytes held at the end of forward that backward had freed when the step reached its peak.

        A remedy for no more than these cannot lower the peak, and may raise it.
        """
        peak, at_exit = self.ledger.transient, self.ledger.held_at_exit
        if peak is None or peak.work not in BACKWARD_WORK or self.ledger.peak <= at_exit:
            return 0
        return max(0, at_exit - (peak.peak - peak.nbytes))


def _held(account: Account) -> int:
    return min(account.saved, account.held_at_exit)


def _first_tier(account: Account) -> str:
    return account.decision.tiers[0] if isinstance(account.decision, Offload) else ""
