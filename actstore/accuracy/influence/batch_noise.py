"""The noise of gradients from minibatch to minibatch: what the errors of payloads are to be compared with.

With g and h the gradients of two batches at the same weights, E |g - h|^2 / 2 is the variance of either. The second
batch is that of the step that follows or, until that has come, of the one before where that was looked at too; an
optimizer's step lies between, and the figure then has the difference of the mean gradients in it, too. Of each weight
at most 2**10 elements are compared, evenly spaced. One pair of batches is a draw: with D directions in which gradients
differ, its relative standard error is sqrt(2 / D), some per cent where many weights differ, and more than half of it
where one direction has all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from actstore.accuracy.influence.node_error import book, norm
from actstore.accuracy.influence.scalars import Scalars
from actstore.base.ledger import Ledger
from actstore.base.reaper import Finalizer

MOST = 2**10  # elements of a weight that are compared


def sample(gradient: Tensor) -> Tensor:
    """At most 2**10 elements, evenly spaced: 1-d float32, a copy."""
    flat = gradient.detach().reshape(-1)
    return flat[:: -(-flat.numel() // MOST) or 1].to(torch.float32, copy=True)


def samples_nbytes(model: Module) -> int:
    """Bytes of the samples of all gradients at most."""
    return sum(4 * min(weight.numel(), MOST) for weight in model.parameters() if weight.requires_grad)


class Minibatch:
    """Takes the gradients of two consecutive micro-steps as they come to the weights, before they accumulate.

    Hooks are on weights from the begin of a step to the gradient; each takes itself away. Nothing is changed. Weights
    whose gradients are sparse, complex, or of a class of their own as DTensor, are left out. Samples of the first
    gradients are held, and booked, until the second ones have come; under a budget that has no room there are none.

    Parameters
    ----------
    before : of the micro-step before, where that was looked at too: the first gradients are its second ones
    """

    def __init__(self, ledger: Ledger, before: Minibatch | None = None) -> None:
        self._ledger = ledger
        self._before = before
        self._hooks: dict[int, Any] = {}
        self._squares = Scalars()  # of the first batch's gradients,
        self._others = Scalars()  # and of the second's
        self._samples: dict[int, tuple[Tensor, Finalizer]] = {}  # by the weight's identity
        self._numels: dict[int, int] = {}
        self._nbytes = 0  # of all samples
        self._differences = Scalars()  # from the batch that follows
        self._earlier = Scalars() if before is None else before._differences
        self._second = False  # whether the second batch runs

    def begin(self, model: Module) -> None:
        """The first of two micro-steps begins."""
        for weight in model.parameters():
            if weight.requires_grad:
                self._hooks[id(weight)] = weight.register_hook(_Take(self, id(weight)))

    def follow(self, model: Module) -> None:
        """Another micro-step begins."""
        if not len(self._squares):  # its backward has yet to come
            return
        if not self._samples or len(self._differences):
            self.close()
        elif not self._second:  # else what came between had no backward
            self.stop()
            self._second = True
            self.begin(model)

    def following(self) -> Minibatch:
        """That of another micro-step, which begins and is looked at too."""
        first: Minibatch | None = self
        if not len(self._squares):  # it had no backward, and the one before still waits for its second batch
            first, self._before = self._before, None
        self.stop()
        if first is None or len(first._differences):
            self.close()
            first = None
        return Minibatch(self._ledger, first)

    @property
    def compared(self) -> int:
        """How many weights have been compared."""
        return len(self._differences) + len(self._earlier)

    def stop(self) -> None:
        """Take away the hooks that are left. The first batch has been."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        if self._before is not None:
            self._before.close()
            self._before = None

    def close(self) -> None:
        """Let go of all that is held but the figures, and have these go to the host."""
        self.stop()
        self._samples.clear()
        for scalars in (self._squares, self._others, self._differences, self._earlier):
            scalars.send()

    def ready(self) -> bool:
        """Whether nothing is held any more, and all figures are on the host."""
        figures = (self._squares, self._others, self._differences, self._earlier)
        return not self._hooks and not self._samples and all(scalars.ready() for scalars in figures)

    def read(self) -> tuple[float, float | None]:
        """The squared norm of the first batch's gradients, and the variance of a batch's. The host waits."""
        square = sum(size**2 for size in self._squares.read().values())
        return square, sum(size**2 for size in self._pair.read().values()) if len(self._pair) else None

    def shares(self) -> tuple[dict[int, float], float | None]:
        """What a variance of a weight's gradient counts, by the weight's identity, and the variance of a batch in it.

        That is its share of all elements by the mean square of its norm in both batches. The host waits.
        """
        elements = sum(self._numels.values())
        sizes, others, differences = (one.named() for one in (self._squares, self._others, self._pair))
        squares = {name: (size**2 + others.get(name, size) ** 2) / 2 for name, size in sizes.items()}
        found = {name: self._numels[name] / elements / square for name, square in squares.items() if square}
        noise = sum(found.get(name, 0.0) * size**2 for name, size in differences.items())
        return found, noise if len(self._pair) else None

    @property
    def _pair(self) -> Scalars:
        return self._differences if len(self._differences) else self._earlier

    def take(self, weight: int, gradient: Tensor) -> None:
        """The gradient of the weight of this identity has come."""
        hook = self._hooks.get(weight)
        if hook is None:
            return
        hook.remove()  # before it is forgotten: an interrupt (Ctrl-C) may come between
        if self._hooks.pop(weight, None) is None:  # another thread was faster
            return
        if odd(gradient):
            return
        taken = sample(gradient)
        first = self if self._second else self._before
        if first is not None:
            first._compare(weight, taken, gradient.numel())
            first._others.put(norm(gradient.detach()), weight)
        if not self._second:
            self._squares.put(norm(gradient.detach()), weight)
            self._numels[weight] = gradient.numel()
            self._keep(weight, taken)

    def _keep(self, weight: int, taken: Tensor) -> None:
        """Hold a sample, if the next step has room for all: it holds as much as this one at its peak."""
        self._nbytes += taken.nbytes
        if self._ledger.peak + self._nbytes > self._ledger.limit:
            self._samples.clear()
        else:
            self._samples[weight] = taken, book(self._ledger, taken.nbytes)

    def _compare(self, weight: int, taken: Tensor, numel: int) -> None:
        """Compare the sample of a weight with that of the second batch, for half the squared difference."""
        before, _ = self._samples.pop(weight, (None, None))
        if before is not None and before.shape == taken.shape:
            self._differences.put(norm(taken - before) * math.sqrt(numel / 2 / max(1, taken.numel())), weight)


def odd(gradient: Tensor) -> str:
    """Why the elements of a gradient cannot be looked at; empty where they can."""
    kind = ""
    if type(gradient) is not Tensor:
        kind = f"a {type(gradient).__name__}"
    elif gradient.is_nested:
        kind = "nested"
    elif gradient.layout is not torch.strided:
        kind = str(gradient.layout).removeprefix("torch.")
    elif not gradient.is_floating_point():
        kind = str(gradient.dtype).removeprefix("torch.")
    return kind and f"some gradients are {kind}"


class _Take:
    """The hook of one weight."""

    __slots__ = ("_minibatch", "_weight")

    def __init__(self, minibatch: Minibatch, weight: int) -> None:
        self._minibatch, self._weight = minibatch, weight

    def __call__(self, gradient: Tensor) -> None:
        self._minibatch.take(self._weight, gradient)
