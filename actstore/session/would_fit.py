"""Bytes that a step would need under policies, from what its forward has saved until memory ran out.

A stretch of the forward is a block of the model, or what runs between two blocks. The ledger has the bytes of each that
ran, whatever the policy is. A block that did not run saves as much as the largest one of its class that did. A linear
layer after the blocks has an output of its width. Backward visits them in reverse: it runs recomputed ones again,
makes gradients of weights, and frees the tensors that it has read. A lossy codec takes at least the floats that layers
of PyTorch save, except the first ones, which may need no gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch.nn import GELU, GroupNorm, LayerNorm, Linear, Module, ReLU, RMSNorm, SiLU
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from actstore.base.layout import nbytes_of
from actstore.base.ledger import Account
from actstore.base.spec import Spec
from actstore.codecs import Codec
from actstore.codecs.base import LOSSY_DTYPES
from actstore.model.names import is_of_torch
from actstore.plan.solver.chain import LayerOption, needed
from actstore.policy.pattern import ancestry

MOVING = 2  # tensors of the largest size that an operator's backward has at once: a gradient in, and one out
LOGITS = 2  # tensors of the size of logits that live until backward: themselves, and what the loss saves
# layers that save floats with a gradient
LAYERS = (Linear, _ConvNd, LayerNorm, RMSNorm, GroupNorm, _BatchNorm, GELU, SiLU, ReLU)


class Stretch(NamedTuple):
    """A part of the forward; all in bytes.

    Attributes
    ----------
    block : its name; empty between blocks
    saved : by its modules
    given : its input, which stays where it is recomputed
    gradients : of its weights, where they have none yet
    floats : those of `saved` that a lossy codec takes, by dtype
    """

    block: str
    saved: int
    given: int
    gradients: int
    floats: tuple[tuple[torch.dtype, int], ...] = ()

    def stored(self, codec: Codec | None) -> int:
        """Return the bytes of what the modules save, with payloads of a codec in place of floats."""
        if codec is None:
            return self.saved
        return self.saved - sum(nbytes - _payload_nbytes(codec, dtype, nbytes) for dtype, nbytes in self.floats)


class Needs(NamedTuple):
    """Bytes that a step needs beside what was there.

    Attributes
    ----------
    stretches : in the order of forward
    gradients : of weights outside of the blocks, where they have none yet
    optimizer : states that the optimizers have not made yet
    moving : what an operator of backward has just made
    """

    stretches: tuple[Stretch, ...]
    gradients: int
    optimizer: int
    moving: int

    @property
    def fixed(self) -> int:
        """Bytes that depend on no policy."""
        return self.gradients + sum(stretch.gradients for stretch in self.stretches) + self.optimizer + self.moving

    def peak(self, again: Collection[str] = (), most_held: int | None = None, codec: Codec | None = None) -> int:
        """Return the peak in bytes.

        Parameters
        ----------
        again : names of the blocks that are recomputed
        most_held : bytes of activations that stay on the device, where the rest goes to a tier; None for all
        codec : of the activations; None for none. Backward decodes one at a time
        """
        left = 0  # bytes held so far
        made = self.gradients + sum(stretch.gradients for stretch in self.stretches)  # by the end of backward
        options = []
        for stretch in self.stretches:
            recomputed = stretch.block in again
            held = stretch.given if recomputed else stretch.stored(codec)
            if most_held is not None:
                held = min(held, most_held - left)
            left += held
            beside = made + (stretch.saved if recomputed else 0)
            options.append(LayerOption("", held, backward_peak=held + beside))
            made -= stretch.gradients
        decoded = 0 if codec is None else self.moving // MOVING
        return int(max(needed(options), default=0)) + self.optimizer + self.moving + decoded


def needs_of(
    named: dict[str, Module],
    blocks: list[str],
    accounts: Iterable[Account],
    optimizers: Iterable[Optimizer],
    asked: int,
    again: Collection[str] = (),
) -> Needs | None:
    """Return what a step needs; None where the forward did not come far enough to tell.

    Parameters
    ----------
    named : the modules of the model, the whole one under an empty name
    blocks : names of its repeated blocks
    accounts : in the order of their first use
    asked : bytes of the request that was refused
    again : names of the blocks that are recomputed now: of these, inputs are all that is held
    """
    found = [account for account in accounts if account.saved]
    parts = _parts(blocks, found)
    ran = [name for name in parts if name in named]
    if len(ran) < 2:
        return None
    ahead = [name for name in blocks[blocks.index(ran[-1]) + 1 :] if name not in parts]
    if list(parts)[-1] == ran[-1]:  # it may not have ended
        ahead.append(ran[-1])
    sizes = {name: sum(account.saved for account in part) for name, part in parts.items()}
    most: dict[type, str] = {}
    for name in (name for name in ran if name not in ahead):
        kind = type(named[name])
        most[kind] = max(name, most.get(kind, name), key=sizes.__getitem__)
    if any(type(named[name]) not in most for name in ahead):
        return None
    inputs = [parts[name][0].saved for name in ran if name not in again]  # what a block's first module saves
    given = max(inputs or (sum(account.held for account in parts[name]) for name in ran))
    like = {name: max(most[type(named[name])], name, key=lambda each: sizes.get(each, 0)) for name in ahead}
    inside = {name: _missing_gradients(named[name]) for name in blocks}
    floats = {name: _floats(named, part, found[0]) for name, part in parts.items()}
    stretches = []
    for name in dict.fromkeys([*parts, *ahead]):
        source, block = like.get(name, name), name if name in named else ""
        stretches.append(Stretch(block, sizes[source], given, inside.get(name, 0), floats[source]))
    logits = _logits(named, blocks, given)
    largest = max(account.saved for account in found)
    outside_sizes = [account.saved for name, part in parts.items() if name not in named for account in part]
    if logits and not any(size >= logits for size in outside_sizes):
        stretches.append(Stretch("", LOGITS * logits, 0, 0))
        largest = max(largest, logits)
    outside = max(0, _missing_gradients(named[""]) - sum(inside.values()))
    return Needs(tuple(stretches), outside, missing_states(optimizers), MOVING * max(largest, asked))


def missing_states(optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of states that optimizers make at their first step: two for betas, one for a momentum."""
    missing = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            each = 2 * ("betas" in group) + bool(group.get("amsgrad")) + bool(group.get("momentum"))
            missing += each * sum(leaf.nbytes for leaf in group["params"] if leaf not in optimizer.state)
    return missing


def _parts(blocks: list[str], accounts: Iterable[Account]) -> dict[str, list[Account]]:
    """Return the sites of each stretch. A key with a ``>`` stands for what follows the block before it."""
    known, found, block = set(blocks), dict[str, list[Account]](), ""
    for account in accounts:
        inside = next((name for name in ancestry(account.site.name) if name in known), None)
        block = block if inside is None else inside
        found.setdefault(f"{block} >" if inside is None else inside, []).append(account)
    return found


def _floats(named: dict[str, Module], part: list[Account], first: Account) -> tuple[tuple[torch.dtype, int], ...]:
    """Return the bytes by dtype that a lossy codec takes, as far as that is known: copies of weights are not."""
    found = Counter[torch.dtype]()
    for account in part:
        module: Any = named.get(account.site.name)
        kind: Any = type(module)
        known = issubclass(kind, LAYERS) and is_of_torch(kind) and account is not first
        if known and account.dtype in LOSSY_DTYPES:
            weight = getattr(module, "weight", None)
            if weight is None or account.saved != weight.numel() * account.dtype.itemsize:  # as autocast makes them
                found[account.dtype] += account.saved
    return tuple(found.items())


def _payload_nbytes(codec: Codec, dtype: torch.dtype, nbytes: int) -> int:
    return codec.size(Spec((nbytes // dtype.itemsize,), (1,), dtype, torch.device("cpu"))).nbytes


def _missing_gradients(module: Module) -> int:
    return sum(nbytes_of(each) for each in module.parameters() if each.requires_grad and each.grad is None)


def _logits(named: dict[str, Module], blocks: list[str], given: int) -> int:
    """Return the bytes of the widest output of a linear layer after the blocks; 0 without one."""
    names = list(named)
    behind = [named[name] for name in names[names.index(blocks[-1]) + 1 :] if blocks[-1] not in ancestry(name)]
    return max((given * one.out_features // one.in_features for one in behind if isinstance(one, Linear)), default=0)
