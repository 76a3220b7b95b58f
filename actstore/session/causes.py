"""Figures for advice, from the accounts of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from actstore.autograd.protect import COMPILED
from actstore.base.ledger import Account, Circumstances, Ledger, Transient
from actstore.base.note import SMALL
from actstore.policy import Derive, Keep, Offload, Policy, Recompute, Rules
from actstore.session.step_figures import StepFigures
from actstore.transfer.engine import most_parcel_nbytes

if TYPE_CHECKING:
    from actstore.accuracy.bits.payloads import Choice
    from actstore.compiled.budget.plan import GraphPlan
    from actstore.plan.plan import Plan
    from actstore.session.controllers import StepPolicy
    from actstore.session.fitted import Fitted


@dataclass(frozen=True)
class Request:
    """Choices of the user that advice must respect.

    Attributes
    ----------
    policy : the present policy
    chooser, measuring, budget : as in `StepFigures`
    hidden : names of modules that ran inside a checkpoint of the model's own, and that a rule names
    named : names of the modules in the model
    runs : False where the store has a model that has not run
    around_layers : as in `StepFigures`
    """

    policy: Policy
    chooser: str = ""
    measuring: bool = False
    budget: int = 0
    hidden: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    runs: bool = True
    around_layers: tuple[str, ...] = ()


def request_of(
    fitted: Fitted, controller: StepPolicy | None, plan: Plan | GraphPlan | Choice | None, model: Module | None
) -> Request:
    """Return the request of a store whose `plan`, if any, comes from its `controller` or was given."""
    places = fitted.places.values()
    request = Request(
        fitted.policy,
        "" if isinstance(fitted.policy, Rules) else "function",
        hidden=tuple(place.name for place in places if place.hidden),
        named=tuple(place.name for place in places),
        runs=model is None or any(place.has_run for place in places),
        around_layers=fitted.around_layers,
    )
    if controller is None and plan is None:
        return request
    chooser = "plan" if controller is None else controller.name
    return replace(request, chooser=chooser, measuring=plan is None, budget=int(getattr(plan, "budget", 0)))


class _Groups:
    """Accounts by what happened to their tensors. Each kept account is in at most one group."""

    def __init__(self, accounts: list[Account], circumstances: Circumstances) -> None:
        self.kept = kept = [account for account in accounts if account.saved and not account.stored]
        self.small = [account for account in kept if account.note.reason == SMALL]
        self.no_room = [account for account in kept if account.note.kept and account.note.full]
        self.compiled = [account for account in kept if account.note.reason == COMPILED]
        self.exact = [account for account in kept if account.exact and account not in self.compiled]
        known = {id(account) for account in (*self.small, *self.no_room, *self.compiled, *self.exact)}
        self.whole = [account for account in kept if account.note.kept and account.note and id(account) not in known]
        stored = [account for account in accounts if account.stored]
        self.hosted = [account for account in stored if circumstances.on_host and _first_tier(account) == "host"]
        self.moved = [a for a in stored if _first_tier(a) not in ("", "device") and a not in self.hosted]
        full = circumstances.keeps_when_full
        self.crowded = [a for a in self.moved if full and a.note.full and not a.note.kept]
        self.flying = [account for account in self.moved if account not in self.crowded]
        self.alive = [account for account in accounts if account.alive]


def figures_of(ledger: Ledger, circumstances: Circumstances, request: Request) -> StepFigures:
    """Return the causes behind the figures, as far as the accounts show them."""
    accounts = ledger.accounts()
    groups = _Groups(accounts, circumstances)
    rules, largest = _by_rule(request.policy, groups.kept)
    hidden_rules, hidden_modules = _hidden(request, accounts)
    transient = ledger.transient or Transient("", None, 0, 0)
    host, disk = circumstances.host_nbytes, circumstances.disk_nbytes
    most_exact, most_whole = _most(groups.exact, _saved), _most(groups.whole, _saved)
    return StepFigures(
        saved_bytes=_sum(accounts, _saved),
        held_bytes=ledger.held_at_exit,
        peak_held_bytes=ledger.peak,
        peak_work=transient.work,
        peak_site=str(transient.site or ""),
        peak_bytes=transient.nbytes,
        chooser=request.chooser,
        measuring=request.measuring,
        budget=request.budget,
        lower="host" if not circumstances.on_host and host != 0 else "disk" if disk != 0 else "",
        hidden_rules=hidden_rules,
        hidden_modules=hidden_modules,
        unseen_rules=() if ledger.compiled else _unseen(request, accounts),
        around_layers=request.around_layers,
        outside=0 if request.runs else _sum((each for each in accounts if not each.site.name), _saved),
        kept_small=_sum(groups.small, _saved),
        min_bytes=circumstances.min_nbytes,
        kept_no_room=_sum(groups.no_room, _saved),
        tiers=" > ".join(groups.no_room[0].note.full) if groups.no_room else "",
        host_budget=host,
        disk_budget=disk,
        kept_exact=_sum(groups.exact, _saved),
        exact_site=_site(most_exact),
        exact_reason=_reason(most_exact),
        exact_decision=_where(most_exact),
        kept_compiled=_sum(groups.compiled, _saved),
        compiled_decision=_where(_most(groups.compiled, _saved)),
        kept_whole=_sum(groups.whole, _saved),
        whole_site=_site(most_whole),
        whole_reason=_reason(most_whole),
        kept_by_rule=sum(rules.values()),
        rule_bytes=rules.get(largest, 0),
        rule_pattern=largest[0],
        rule_decision=largest[1],
        kept_still_alive=_sum(groups.alive, lambda account: account.alive),
        alive_site=_site(_most(groups.alive, lambda account: account.alive)),
        on_host=_sum(groups.hosted, _stored_here),
        host_decision=_where(_most(groups.hosted, _stored_here)),
        compiled=max(ledger.compiled.values(), default=0),
        in_flight=_sum(groups.flying, _held),
        parcel_nbytes=most_parcel_nbytes(on_host=circumstances.on_host),
        flight_decision=_where(_most(groups.flying, _held)),
        kept_window=_sum(groups.crowded, _held),
        window=circumstances.window_nbytes,
        moved=bool(groups.moved),
        bound=circumstances.bound_nbytes,
        first_step=circumstances.first_step,
        order=circumstances.order,
        **_times(accounts, circumstances),
    )


def _times(accounts: list[Account], circumstances: Circumstances) -> dict[str, Any]:
    """Return the figures of time, and of fetches."""
    hits, late, misses = (sum(getattr(account, name) for account in accounts) for name in ("hits", "late", "misses"))
    sums = {
        f"{name}_ms": sum(getattr(account, f"{name}_ns") for account in accounts) / 1e6
        for name in ("stall", "room", "fetch")
    }
    times = {name: getattr(circumstances, name) for name in ("forward_ms", "overrun_ms", "step_ms")}
    return {**times, **sums, "fetches": hits + late + misses, "late": late, "misses": misses}


def _by_rule(policy: Policy, kept: Iterable[Account]) -> tuple[dict[tuple[str, str], int], tuple[str, str]]:
    """Return the bytes that only a rule keeps, by its pattern and decision, and the rule that keeps most."""
    found: dict[tuple[str, str], int] = {}
    for account in kept:
        if account.note or isinstance(account.decision, Recompute):
            continue
        rule = "*", "keep"
        if isinstance(policy, Rules):
            tensor = account.site.name, account.site.tag, account.operator
            decision = policy.decide(*tensor)
            rule = policy.pattern_of(*tensor), str(decision)
            if rule[0] != "*" and isinstance(decision, Recompute):  # calls beyond `first`, and inputs that stay alive
                continue
        derives = isinstance(account.decision, Derive)
        nbytes = min(account.saved, account.held_at_exit) if derives else account.saved
        found[rule] = found.get(rule, 0) + nbytes
    return found, max(found, key=lambda rule: found[rule], default=("*", "keep"))


def _hidden(request: Request, accounts: Iterable[Account]) -> tuple[tuple[str, ...], int]:
    """Return the rules without effect, because their modules ran inside a checkpoint, and the number of modules."""
    policy = request.policy
    if not isinstance(policy, Rules) or not request.hidden:
        return (), 0
    seen = {policy.pattern_of(account.site.name) for account in accounts if account.count}
    blind = [name for name in request.hidden if policy.pattern_of(name) not in seen]
    rules = dict.fromkeys(f"{policy.pattern_of(name)} : {policy.decide(name)}" for name in blind)
    return tuple(rules), len(blind)


def _unseen(request: Request, accounts: Iterable[Account]) -> tuple[str, ...]:
    """Return the rules of the user, but for `keep` and those of `_hidden`, whose modules saved nothing."""
    policy = request.policy
    if not isinstance(policy, Rules) or request.chooser:
        return ()
    seen = {policy.pattern_of(account.site.name) for account in accounts if account.count or account.saved}
    found = [
        name for name in request.named if name not in request.hidden and policy.pattern_of(name) not in seen | {"*"}
    ]
    decided = {policy.pattern_of(name): policy.decide(name) for name in found}
    return tuple(f"{pattern} : {each}" for pattern, each in decided.items() if not isinstance(each, Keep))


def _first_tier(account: Account) -> str:
    return account.decision.tiers[0] if isinstance(account.decision, Offload) else ""


def _sum(accounts: Iterable[Account], figure: Callable[[Account], int]) -> int:
    return sum(map(figure, accounts))


def _most(accounts: Iterable[Account], figure: Callable[[Account], int]) -> Account | None:
    return max(accounts, key=figure, default=None)


def _saved(account: Account) -> int:
    return account.saved


def _held(account: Account) -> int:
    return account.held_at_exit


def _stored_here(account: Account) -> int:
    return min(account.stored, account.held_at_exit)


def _site(account: Account | None) -> str:
    return "" if account is None else str(account.site)


def _where(account: Account | None) -> str:
    return "" if account is None else account.where


def _reason(account: Account | None) -> str:
    return "" if account is None else account.note.reason
