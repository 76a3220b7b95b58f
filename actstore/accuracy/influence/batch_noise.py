"""The noise of gradients from minibatch to minibatch: the reference for the errors of payloads.

With g and h the gradients of two batches at the same weights, E |g - h|^2 / 2 is the variance of either. The second
batch is that of the next step or, until that has come, of the previous step, if that was observed. An optimizer's step
lies between; the figure then includes the difference of the mean gradients. At most 2**10 evenly spaced elements of
each weight are compared. One pair of batches is one draw: with D directions in which gradients differ, its relative
standard error is sqrt(2 / D). That is some per cent where many weights differ, and more than half of the figure where
one direction has all of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from actstore.accuracy.influence.node_error import book, norm
from actstore.accuracy.influence.scalars import Scalars
from actstore.base.ledger import Ledger
from actstore.base.reaper import Finalizer

SAMPLE_NUMEL = 2**10  # most elements of a weight that are compared


def sample(gradient: Tensor) -> Tensor:
    """Return at most 2**10 evenly spaced elements: 1-d float32, a copy."""
    flat = gradient.detach().reshape(-1)
    return flat[:: -(-flat.numel() // SAMPLE_NUMEL) or 1].to(torch.float32, copy=True)


def samples_nbytes(model: Module) -> int:
    """Return an upper bound for the bytes of the samples of all gradients."""
    return sum(
        4 * min(weight.numel(), SAMPLE_NUMEL)
        for weight in model.parameters()
        if weight.requires_grad and not is_lazy(weight)
    )


class Minibatch:
    """Gradients of two consecutive micro-steps, sampled as they come to the weights, before they accumulate.

    Hooks are on weights from the start of a step to the gradient; each removes itself. They change nothing. Weights
    with gradients that are sparse, complex, or of a tensor subclass such as DTensor, are left out. Samples of the first
    gradients are held, and booked, until the second ones have come; a budget without room for them gets no samples.

    Parameters
    ----------
    before : minibatch of the previous micro-step, if that was observed: the first gradients here are its second ones
    """

    def __init__(self, ledger: Ledger, before: Minibatch | None = None) -> None:
        self._ledger = ledger
        self._before = before
        self._hooks: dict[int, Any] = {}
        self._squares = Scalars()  # norms of the first batch's gradients,
        self._others = Scalars()  # and of the second batch's
        self._samples: dict[int, tuple[Tensor, Finalizer]] = {}  # by the weight's identity
        self._numels: dict[int, int] = {}
        self._nbytes = 0  # of all samples
        self._differences = Scalars()  # from the following batch
        self._earlier = Scalars() if before is None else before._differences
        self._second = False  # whether the second batch runs

    def begin(self, model: Module) -> None:
        """Begin the first of two micro-steps."""
        for weight in model.parameters():
            if weight.requires_grad and not is_lazy(weight):
                self._hooks[id(weight)] = weight.register_hook(_Take(self, id(weight)))

    def follow(self, model: Module) -> None:
        """Begin a micro-step that is not observed, as the second one."""
        if not len(self._squares):  # its backward has yet to come
            return
        if not self._samples or len(self._differences):
            self.close()
        elif not self._second:  # otherwise the step between had no backward
            self.stop()
            self._second = True
            self.begin(model)

    def following(self) -> Minibatch:
        """Return the minibatch of the next micro-step, which is observed too."""
        first: Minibatch | None = self
        if not len(self._squares):  # without a backward, the previous one still waits for its second batch
            first, self._before = self._before, None
        self.stop()
        if first is None or len(first._differences):
            self.close()
            first = None
        return Minibatch(self._ledger, first)

    @property
    def compared(self) -> int:
        """Number of weights that have been compared."""
        return len(self._differences) + len(self._earlier)

    def stop(self) -> None:
        """Remove the remaining hooks, as the first batch is over."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        if self._before is not None:
            self._before.close()
            self._before = None

    def close(self) -> None:
        """Release everything but the figures, and send these to the host."""
        self.stop()
        self._samples.clear()
        for scalars in (self._squares, self._others, self._differences, self._earlier):
            scalars.send()

    def ready(self) -> bool:
        """Return whether nothing is held any more, and all figures are on the host."""
        figures = (self._squares, self._others, self._differences, self._earlier)
        return not self._hooks and not self._samples and all(scalars.ready() for scalars in figures)

    def read(self) -> tuple[float, float | None]:
        """Return the squared norm of the first batch's gradients, and the variance of a batch's. The host waits."""
        square = sum(size**2 for size in self._squares.read().values())
        return square, sum(size**2 for size in self._pair.read().values()) if len(self._pair) else None

    def shares(self) -> tuple[dict[int, float], float | None]:
        """Return the factor of each weight's gradient variance, by the weight's identity, and the batch variance in it.

        The factor is the weight's share of all elements by the mean square of its norm in both batches. The host waits.
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
        """Sample the gradient that has come to the weight of this identity."""
        hook = self._hooks.get(weight)
        if hook is None:
            return
        hook.remove()  # before the pop: an interrupt (Ctrl-C) may come between
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
        """Hold a sample, if the next step has room for all samples: its peak is assumed to equal this step's."""
        self._nbytes += taken.nbytes
        if self._ledger.peak + self._nbytes > self._ledger.budget.limit:
            self._samples.clear()
        else:
            self._samples[weight] = taken, book(self._ledger, taken.nbytes)

    def _compare(self, weight: int, taken: Tensor, numel: int) -> None:
        """Record half the squared difference of a weight's sample from that of the second batch."""
        before, _ = self._samples.pop(weight, (None, None))
        if before is not None and before.shape == taken.shape:
            self._differences.put(norm(taken - before) * math.sqrt(numel / 2 / max(1, taken.numel())), weight)


def odd(gradient: Tensor) -> str:
    """Return the reason why the elements of a gradient cannot be read; empty where they can."""
    kind = ""
    if type(gradient) is not Tensor:
        kind = f"a {type(gradient).__name__}"
    elif gradient.is_nested:
        kind = "nested"
    elif is_batchedtensor(gradient) or is_legacy_batchedtensor(gradient):  # of is_grads_batched, or of vmap
        kind = "batched"
    elif gradient.layout is not torch.strided:
        kind = str(gradient.layout).removeprefix("torch.")
    elif not gradient.is_floating_point():
        kind = str(gradient.dtype).removeprefix("torch.")
    elif gradient.is_meta:
        kind = "on the meta device"
    return kind and f"some gradients are {kind}"


class _Take:
    """Gradient hook of one weight."""

    __slots__ = ("_minibatch", "_weight")

    def __init__(self, minibatch: Minibatch, weight: int) -> None:
        self._minibatch, self._weight = minibatch, weight

    def __call__(self, gradient: Tensor) -> None:
        self._minibatch.take(self._weight, gradient)
