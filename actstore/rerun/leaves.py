"""Tensors and their gradients, recorded to be restored."""

from __future__ import annotations

from torch import Tensor

from actstore.rerun.values import components, copies, parts, same_bits


class Value:
    """A tensor, a copy of its values in host memory, and its version; None for one that keeps no versions."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version
        self._sparse = tensor.detach() if components(tensor) else None  # keeps the indices and values alive
        self._copies = [copy for part in self._parts() for copy in copies(part)]

    def restore(self) -> None:
        if self._sparse is not None:
            self.tensor.data = self._sparse.detach()
        for part, copy in zip(self._parts(), self._copies, strict=True):
            if not same_bits(part, copy):
                part.data.copy_(copy)

    def _parts(self) -> list[Tensor]:
        return parts(self.tensor) if self._sparse is None else components(self._sparse)


class Gradient:
    """A leaf, its `requires_grad` flag, and its gradient."""

    def __init__(self, leaf: Tensor) -> None:
        self.leaf, self._requires_grad, self.grad = leaf, leaf.requires_grad, leaf.grad

    def restore(self, *, fresh: bool) -> None:
        """Put the gradient back, as a copy (`fresh`) or as the object that it was."""
        leaf, grad = self.leaf, self.grad
        if leaf.requires_grad != self._requires_grad:
            leaf.requires_grad_(self._requires_grad)
        leaf.grad = grad.detach().clone() if fresh and grad is not None else grad
