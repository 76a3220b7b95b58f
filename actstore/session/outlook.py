"""Outlook after memory ran out: the needs of a step under exact policies, and the memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import Module
from torch.optim import Optimizer

from actstore.base.ledger import Ledger
from actstore.base.units import format_nbytes
from actstore.codecs import Codec, Int4, Int8
from actstore.model.blocks import repeated_blocks
from actstore.model.names import named_modules
from actstore.model.units import device_of
from actstore.policy import Policy, Recompute, Rules
from actstore.rerun.optimizers import leaves_of, live_optimizers
from actstore.session.shortage import Shortage, shortage_of
from actstore.session.would_fit import Needs, needs_of
from actstore.transfer.engine import DEVICE_WINDOW_NBYTES, HOST_WINDOW_NBYTES

HALF, WHOLE, LEAST = "@blocks[::2] : recompute", "@blocks : recompute", "@blocks : recompute({0}); * : {0}"
LOSSY: dict[str, tuple[Codec, str]] = {  # the least error first
    "int8": (Int8(), "one of 255 levels up to the largest magnitude in its group of 128"),
    "int4": (Int4(), "one of 16 levels from the least to the most in its group of 32"),
}
MARGIN = 0.1  # of a prediction, by which it must be below what is there


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
    mine = {id(parameter) for parameter in forward.model.parameters()}
    live = {*live_optimizers(), *forward.optimizers}  # gc.freeze hides some from the search
    optimizers = [one for one in live if any(id(leaf) in mine for leaf in leaves_of(one))]
    return needs_of(forward.named, forward.blocks, forward.ledger.accounts(), optimizers, asked, again)
