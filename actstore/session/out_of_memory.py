"""Memory ran out: the limit that an error ran into, the needs of a step under exact policies, and the note that says
what holds most and a next step."""

from __future__ import annotations

import re
import resource
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch.nn import Module
from torch.optim import Optimizer

from actstore.auto.machine import OOM_BUDGET_SHARE, ran_out
from actstore.base.ledger import Account, Ledger
from actstore.base.units import format_nbytes
from actstore.codecs import Codec, Int4, Int8
from actstore.devices import cpu_memory, refusals
from actstore.devices.host_memory import cgroup_limit, machine_bytes
from actstore.errors import ActstoreError, CapacityError
from actstore.model.blocks import repeated_blocks
from actstore.model.names import named_modules
from actstore.model.units import device_of
from actstore.policy import Offload, Policy, Recompute, Rules
from actstore.policy.decision import waits_as
from actstore.rerun.optimizers import live_optimizers, serving
from actstore.session.arguments import read_policy
from actstore.session.process import status_bytes
from actstore.session.would_fit import Needs, needs_of
from actstore.transfer.engine import DEVICE_WINDOW_NBYTES, HOST_WINDOW_NBYTES

NOTE_PREFIX = "actstore: held "
MAX_MODULES = 3
HALF, WHOLE, LEAST = "@blocks[::2] : recompute", "@blocks : recompute", "@blocks : recompute({0}); * : {0}"
LOSSY: dict[str, tuple[Codec, str]] = {  # the least error first
    "int8": (Int8(), "one of 255 levels up to the largest magnitude in its group of 128"),
    "int4": (Int4(), "one of 16 levels from the least to the most in its group of 32"),
}
MARGIN = 0.1  # of a prediction, by which it must be below what is there
_ASKED = re.compile(r"you tried to allocate (\d+) bytes")


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


class FailedForward(NamedTuple):
    """A forward that ran out of memory.

    Attributes
    ----------
    policy : of its store
    model : of its store; None for none
    named : modules of the model by name
    blocks : names of those that the model repeats
    optimizers : of the model, as far as they are known without a search
    """

    ledger: Ledger
    policy: Policy
    model: Module | None
    named: dict[str, Module]
    blocks: list[str]
    optimizers: Sequence[Optimizer] = ()

    @classmethod
    def of(
        cls, ledger: Ledger, policy: Policy, model: Module | None, optimizers: Sequence[Optimizer] = ()
    ) -> FailedForward:
        if model is None:
            return cls(ledger, policy, None, {}, [])
        return cls(ledger, policy, model, dict(named_modules(model)), repeated_blocks(model), optimizers)


class Outlook(NamedTuple):
    """Needs of a step under each policy, and the memory for them.

    Attributes
    ----------
    shortage : of memory
    needs : of a step; None where the forward did not come far enough to tell
    there : bytes for these needs: what was free, and what activations held
    peaks : bytes at once for each policy, by its text
    lossy : the policy of `LOSSY` that fits where no exact one does; empty otherwise
    """

    shortage: Shortage
    needs: Needs | None
    there: int
    peaks: dict[str, int]
    lossy: str = ""

    def lines(self) -> list[str]:
        """Return the lines for a note."""
        lines = [f"  memory: {self.shortage}"]
        if self.peaks:
            found = ", ".join(
                f'"{text}" {"at most " * (text == self.lossy)}{format_nbytes(peak)}'
                for text, peak in self.peaks.items()
            )
            lines.append(f"  predicted for a whole step: {found}; there are {format_nbytes(self.there)} for it")
        return lines

    def fits(self, text: str) -> bool:
        """Return whether a step fits under a policy, by a margin. True where that is unknown."""
        return text not in self.peaks or (1 + MARGIN) * self.peaks[text] <= self.there

    @property
    def budget(self) -> int:
        """Bytes for activations."""
        return max(0, int(self.there / (1 + MARGIN)) - (0 if self.needs is None else self.needs.fixed))

    @property
    def hopeless(self) -> str:
        """Text for a step that no policy and no batch makes fit; empty for another one."""
        if self.needs is None or (coming := self.needs.fixed - self.needs.moving) <= self.there:
            return ""
        return (
            f"a smaller model, or an optimizer with smaller states: gradients and optimizer states that are still to "
            f"come need {format_nbytes(coming)}, where there are {format_nbytes(self.there)}. No policy changes that"
        )


def outlook_of(error: BaseException, forward: FailedForward) -> Outlook | None:
    """Return the outlook after an error; None where the memory that ran out is unknown."""
    shortage = shortage_of(error, device := device_of(forward.model))
    if shortage is None:
        return None
    there = shortage.free + forward.ledger.held
    policy, blocks = forward.policy, forward.blocks
    now = {name for name in blocks if isinstance(policy, Rules) and isinstance(policy.decide(name), Recompute)}
    needs = _needs(forward, shortage.asked, now)
    peaks: dict[str, int] = {}
    if needs is not None:
        if shortage.asked <= shortage.free and needs.peak(now) <= there:
            return None  # it would have fitted: the limit is one that we do not know
        on_host = device is None or device.type == "cpu"
        window = HOST_WINDOW_NBYTES if on_host else DEVICE_WINDOW_NBYTES
        peaks = {
            "keep": needs.peak(),
            HALF: needs.peak(blocks[::2]),
            WHOLE: needs.peak(blocks),
            LEAST.format(away_from(device)): needs.peak(blocks, window),
        }
    elif shortage.asked <= shortage.free:
        return None
    return _with_lossy(Outlook(shortage, needs, there, peaks))


def _with_lossy(outlook: Outlook) -> Outlook:
    """Return the outlook with the first lossy policy that fits, where no exact one does."""
    if outlook.needs is not None and not any(map(outlook.fits, outlook.peaks)):
        for text, (codec, _) in LOSSY.items():
            found = outlook._replace(peaks={**outlook.peaks, text: outlook.needs.peak(codec=codec)}, lossy=text)
            if found.fits(text):
                return found
    return outlook


def away_from(device: torch.device | None) -> str:
    """Return the exact decision that holds least on a device."""
    return "raw @ disk" if device is None or device.type == "cpu" else "raw @ host > disk"


def _needs(forward: FailedForward, asked: int, again: set[str]) -> Needs | None:
    if forward.model is None:
        return None
    live = {*live_optimizers(), *forward.optimizers}  # gc.freeze hides some from the search
    optimizers = serving(forward.model, live)
    return needs_of(forward.named, forward.blocks, forward.ledger.accounts(), optimizers, asked, again)


class Shortage(NamedTuple):
    """A limit of memory, and what was left of it; all in bytes.

    Attributes
    ----------
    limit : its name
    total, free : of it
    asked : of the request that was refused; 0 where unknown
    detail : text about the rest; empty without
    """

    limit: str
    total: int
    free: int
    asked: int
    detail: str = ""

    def __str__(self) -> str:
        """Return text such as ``2.0 GiB asked for, 1.2 GiB of 80.0 GiB (cuda:0) free``."""
        asked = f"{format_nbytes(self.asked)} asked for, " if self.asked else ""
        return f"{asked}{format_nbytes(self.free)} of {format_nbytes(self.total)} ({self.limit}) free{self.detail}"


def shortage_of(error: BaseException, device: torch.device | None) -> Shortage | None:
    """Return the shortage of a compute device's memory that raised an error; None for another memory's, or unknown.

    Parameters
    ----------
    device : the compute device; None for a CPU
    """
    if not ran_out(error):
        return None
    if device is None or device.type == "cpu":
        return _on_host(error)
    if device.type != "cuda" or not isinstance(error, torch.OutOfMemoryError):
        return None
    index: int | None = device.index
    found = refusals.take(torch.accelerator.current_device_index() if index is None else index)
    if found is None:
        return None
    free = min(found.free, max(0, found.total - found.reserved))
    detail = f"; PyTorch had {format_nbytes(found.allocated)} allocated, {format_nbytes(found.reserved)} reserved"
    return Shortage(str(device), found.total, free, found.asked, detail)


def _on_host(error: BaseException) -> Shortage | None:
    asked = _ASKED.search(str(error))
    used, idle = status_bytes(), cpu_memory.idle_bytes()
    limits = {
        "RLIMIT_DATA": (_soft(resource.RLIMIT_DATA), used.get("VmData")),
        "RLIMIT_AS": (_soft(resource.RLIMIT_AS), used.get("VmSize")),
        "control group": (cgroup_limit(), used.get("VmRSS")),
        "machine": (machine_bytes().get("MemTotal"), used.get("VmRSS")),
    }
    found = [
        Shortage(name, total, max(0, total - now) + idle, int(asked[1]) if asked else 0)
        for name, (total, now) in limits.items()
        if total is not None and now is not None
    ]
    return min(found, key=lambda shortage: shortage.free, default=None)


def _soft(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
