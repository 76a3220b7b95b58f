"""The note on errors about memory: the held bytes, the modules that hold most of them, and a next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from torch.nn import Module
from torch.optim import Optimizer

from actstore.auto.local import OOM_BUDGET_SHARE
from actstore.auto.machine import ran_out
from actstore.base.ledger import Account, Ledger
from actstore.base.units import format_nbytes
from actstore.errors import ActstoreError, CapacityError
from actstore.model.units import device_of
from actstore.policy import Offload, Policy, Recompute, Rules
from actstore.policy.decision import waits_as
from actstore.session.arguments import read_policy
from actstore.session.outlook import HALF, LEAST, LOSSY, WHOLE, FailedForward, Outlook, away_from, outlook_of

NOTE_PREFIX = "actstore: held "
MAX_MODULES = 3


def explain(
    error: BaseException,
    ledger: Ledger,
    policy: Policy,
    model: Module | None,
    optimizers: Sequence[Optimizer] = (),
    *,
    has_budget: bool,
) -> None:
    """Add the note to `error` if it is about memory and has no such note. Raises nothing, and keeps nothing.

    Parameters
    ----------
    optimizers : of the model, as far as they are known without a search
    has_budget : whether the policy was made for a budget, by "auto" or a Plan
    """
    if not (isinstance(error, CapacityError) or ran_out(error)):
        return
    if isinstance(error, CapacityError) and not any(account.saved for account in ledger.accounts()):
        return  # of a plan, before any forward ran
    with suppress(Exception):  # memory may be too short for a note, too
        if not any(note.startswith(NOTE_PREFIX) for note in getattr(error, "__notes__", ())):
            forward, outlook = FailedForward.of(ledger, policy, model, optimizers), None
            with suppress(Exception):  # the prediction needs more memory than the rest of the note
                outlook = outlook_of(error, forward)
            error.add_note(_note(forward, outlook, has_budget=has_budget))


def _note(forward: FailedForward, outlook: Outlook | None, *, has_budget: bool) -> str:
    ledger = forward.ledger
    accounts = ledger.accounts()
    held, saved = sum(account.held for account in accounts), sum(account.saved for account in accounts)
    lines = [
        f"{NOTE_PREFIX}{format_nbytes(held)} of {format_nbytes(saved)} that this forward saved, "
        f"{format_nbytes(ledger.peak)} at its peak"
    ]
    largest = _largest(accounts)
    if largest:
        lines.append(f"  most is held by {', '.join(largest)}")
    if outlook is not None:
        lines += outlook.lines()
    lines.append(f"  try next: {_next(forward, accounts, outlook, has_budget=has_budget)}")
    return "\n".join(lines)


def _largest(accounts: list[Account]) -> list[str]:
    """Return the modules that hold most, each with its bytes and the decision on most of them."""
    modules: dict[str, Counter[str]] = {}
    for account in accounts:
        if account.held > 0:
            decision = f"{account.where or 'keep'}{f'; {account.note}' if account.note else ''}"
            modules.setdefault(account.site.name or "(top)", Counter())[decision] += account.held
    most = sorted(modules.items(), key=lambda module: module[1].total(), reverse=True)[:MAX_MODULES]
    return [f"{name} {format_nbytes(held.total())} ({held.most_common(1)[0][0]})" for name, held in most]


def _next(forward: FailedForward, accounts: list[Account], outlook: Outlook | None, *, has_budget: bool) -> str:
    peak = forward.ledger.peak
    if not peak:
        return "a smaller batch: activations are not what fills memory"
    if outlook is not None and outlook.hopeless:
        return outlook.hopeless
    budget = int(OOM_BUDGET_SHARE * peak)
    if outlook is not None:
        budget = min(budget, outlook.budget)
    chooser = f'the policy "auto({_written(budget)})"'
    if has_budget:
        return f"{chooser}, or a smaller batch" if budget else "a smaller batch"
    stays = _stays_in_blocks(forward, accounts)
    texts = [text for text in _texts(forward, stays=stays) if _accepts(forward, text)]
    if outlook is not None:
        texts = [text for text in texts if outlook.fits(text)]
    elif HALF in texts:
        texts.remove(HALF)
    if not texts and outlook is not None and outlook.lossy and _accepts(forward, outlook.lossy):
        return (
            f'the policy "{outlook.lossy}", which is lossy, as no exact policy is predicted to fit: a value becomes '
            f"{LOSSY[outlook.lossy][1]}"
        )
    if not texts:
        return "a smaller batch" + ("" if outlook is None else ", as no exact policy is predicted to fit")
    chosen = f", or {chooser}" if stays and budget else ""
    return f'the policy "{texts[0]}"{chosen}; gradients are then exact'


def _stays_in_blocks(forward: FailedForward, accounts: list[Account]) -> bool:
    """Return whether most held bytes were saved in blocks, under a decision that neither recomputes nor offloads."""
    inside = tuple(f"{block}." for block in forward.blocks)
    stays = sum(a.held for a in accounts if f"{a.site.name}.".startswith(inside) and _stays(a, forward.policy))
    return 2 * stays > sum(account.held for account in accounts)


def _stays(account: Account, policy: Policy) -> bool:
    if not isinstance(policy, Rules):
        return not isinstance(account.decision, Offload)
    decision = policy.decide(account.site.name, account.site.tag, account.operator)
    return not isinstance(decision, Recompute) and not isinstance(waits_as(decision), Offload)


def _texts(forward: FailedForward, *, stays: bool) -> list[str]:
    """Return exact policies that hold less, the fastest first."""
    away = away_from(device_of(forward.model))
    if not forward.blocks:
        return [away]
    return [HALF, WHOLE, LEAST.format(away)] if stays else [LEAST.format(away)]


def _accepts(forward: FailedForward, text: str) -> bool:
    """Return whether the model accepts a policy that differs from the present one."""
    try:
        rules = read_policy(text, forward.model)
        if isinstance(rules, Rules) and forward.named:
            rules.check(forward.named)
            rules.regions(list(forward.named), forward.blocks)
    except ActstoreError:
        return False
    return rules != forward.policy


def _written(nbytes: int) -> str:
    """Format bytes as `parse_budget` reads them."""
    return f"{nbytes >> 20}MiB" if nbytes >> 20 else f"{nbytes}B"
