"""Figures for advice, from the accounts of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from actstore.autograd.protect import COMPILED
from actstore.base.ledger import Account, Circumstances, Ledger
from actstore.policy import Policy, Rules
from actstore.session.advice import StepFigures

NO_ROOM_PREFIX = "kept: no room in "
SMALL_NOTES = ("small", "kept: small")


@dataclass(frozen=True)
class Request:
    """Choices of the user that advice must respect.

    Attributes
    ----------
    policy : the present policy
    chooser, measuring, budget : as in `StepFigures`
    hidden : names of modules that ran inside a checkpoint of the model's own, and that a rule names
    """

    policy: Policy
    chooser: str = ""
    measuring: bool = False
    budget: int = 0
    hidden: tuple[str, ...] = ()


def figures_of(ledger: Ledger, circumstances: Circumstances, request: Request) -> StepFigures:
    """Return the causes behind the figures, as far as the accounts show them."""
    accounts = ledger.accounts()
    kept = [account for account in accounts if account.saved and not account.stored]
    small = [account for account in kept if account.note in SMALL_NOTES]
    no_room = [account for account in kept if account.note.startswith(NO_ROOM_PREFIX)]
    compiled = [account for account in kept if account.note == f"kept: {COMPILED}"]
    exact = [account for account in kept if account.exact and account not in compiled]
    others = {id(account) for account in (*small, *no_room, *compiled, *exact)}
    whole = [account for account in kept if account.note.startswith("kept: ") and id(account) not in others]
    stored = [account for account in accounts if account.stored]
    hosted = [account for account in stored if circumstances.on_host and _first_tier(account) == "host"]
    moved = [a for a in stored if _first_tier(a) not in ("", "device") and a not in hosted]
    crowded = [a for a in moved if circumstances.keeps_when_full and a.note.startswith("window of ")]
    flying = [account for account in moved if account not in crowded]
    alive = [account for account in accounts if account.alive]
    rules, largest = _by_rule(request.policy, kept)
    hidden_rules, hidden_modules = _hidden(request, accounts)
    transient = ledger.transient
    in_tiers = circumstances.host_nbytes, circumstances.disk_nbytes
    hits, late, misses = (sum(getattr(account, name) for account in accounts) for name in ("hits", "late", "misses"))
    most_exact, most_whole = _most(exact, _saved), _most(whole, _saved)
    return StepFigures(
        saved_bytes=_sum(accounts, _saved),
        held_bytes=ledger.held_at_exit,
        peak_held_bytes=ledger.peak,
        peak_work="" if transient is None else transient.work,
        peak_site="" if transient is None else str(transient.site or ""),
        peak_bytes=0 if transient is None else transient.nbytes,
        chooser=request.chooser,
        measuring=request.measuring,
        budget=request.budget,
        lower="host" if not circumstances.on_host and in_tiers[0] != 0 else "disk" if in_tiers[1] != 0 else "",
        hidden_rules=hidden_rules,
        hidden_modules=hidden_modules,
        kept_small=_sum(small, _saved),
        min_bytes=circumstances.min_nbytes,
        kept_no_room=_sum(no_room, _saved),
        tiers=no_room[0].note.removeprefix(NO_ROOM_PREFIX) if no_room else "",
        host_budget=in_tiers[0],
        disk_budget=in_tiers[1],
        kept_exact=_sum(exact, _saved),
        exact_site=_site(most_exact),
        exact_reason=_reason(most_exact),
        exact_decision=_where(most_exact),
        kept_compiled=_sum(compiled, _saved),
        compiled_decision=_where(_most(compiled, _saved)),
        kept_whole=_sum(whole, _saved),
        whole_site=_site(most_whole),
        whole_reason=_reason(most_whole),
        kept_by_rule=sum(rules.values()),
        rule_bytes=rules.get(largest, 0),
        rule_pattern=largest[0],
        rule_decision=largest[1],
        kept_still_alive=_sum(alive, lambda account: account.alive),
        alive_site=_site(_most(alive, lambda account: account.alive)),
        on_host=_sum(hosted, _stored_here),
        host_decision=_where(_most(hosted, _stored_here)),
        compiled=max(ledger.compiled.values(), default=0),
        in_flight=_sum(flying, _held),
        flight_decision=_where(_most(flying, _held)),
        kept_window=_sum(crowded, _held),
        window=circumstances.window_nbytes,
        moved=bool(moved),
        bound=circumstances.bound_nbytes,
        forward_ms=circumstances.forward_ms,
        overrun_ms=circumstances.overrun_ms,
        stall_ms=sum(account.stall_ns for account in accounts) / 1e6,
        step_ms=circumstances.step_ms,
        room_ms=sum(account.room_ns for account in accounts) / 1e6,
        fetch_ms=sum(account.fetch_ns for account in accounts) / 1e6,
        fetches=hits + late + misses,
        late=late,
        misses=misses,
        first_step=circumstances.first_step,
        order=circumstances.order,
    )


def _by_rule(policy: Policy, kept: Iterable[Account]) -> tuple[dict[tuple[str, str], int], tuple[str, str]]:
    """Return the bytes that only a rule keeps, by its pattern and decision, and the rule that keeps most."""
    found: dict[tuple[str, str], int] = {}
    for account in kept:
        if account.note or account.where.startswith("recompute"):
            continue
        rule = "*", "keep"
        if isinstance(policy, Rules):
            name, tag = account.site.name, account.site.tag
            decision = str(policy.decide(name, tag))
            rule = policy.pattern_of(name, tag), decision
            if rule[0] != "*" and decision.startswith("recompute"):  # calls beyond `first`, and inputs that stay alive
                continue
        nbytes = min(account.saved, account.held_at_exit) if account.where.startswith("derive") else account.saved
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


def _first_tier(account: Account) -> str:
    return account.where.partition(" @ ")[2].partition(" ")[0]


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
    return "" if account is None else account.note.removeprefix("kept: ")
