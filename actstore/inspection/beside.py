"""Bytes of a step beside activations: weights, gradients, and the states of optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from actstore.base.units import format_nbytes
from actstore.inspection.timeline import MemoryPoint, Timeline
from actstore.rerun.optimizers import live_optimizers, serving


@dataclass(frozen=True)
class BesideActivations:
    """Bytes of what a step needs beside activations.

    Attributes
    ----------
    weights_bytes : of parameters and buffers
    gradients_bytes : of the gradients that the step gives to parameters
    optimizer_bytes : of the states of optimizers that have one of the parameters
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    @classmethod
    def of(cls, model: Module | None, gradients_bytes: int, stepped: Iterable[Optimizer] = ()) -> BesideActivations:
        """Count those of a model now, after a step that gave its parameters gradients of `gradients_bytes` bytes.

        Parameters
        ----------
        stepped : optimizers that ran in the step: `gc.freeze` hides some from the search
        """
        if model is None:
            return cls(0, 0, 0)
        states = [list(optimizer.state.values()) for optimizer in serving(model, {*live_optimizers(), *stepped})]
        return cls(
            _nbytes([*model.parameters(), *model.buffers()]),
            gradients_bytes,
            _nbytes(value for value in tree_leaves(states) if isinstance(value, Tensor)),
        )

    def bands(self, point: MemoryPoint) -> dict[str, int]:
        """Return the bytes at a moment, by the names of their bands in pictures, from the lowest one up."""
        return {
            "weights": self.weights_bytes,
            "optimizer": self.optimizer_bytes,
            "gradients": point.gradients_bytes,
        }

    def total_bytes(self, point: MemoryPoint) -> int:
        """Return the bytes at a moment, those of activations among them."""
        return sum(self.bands(point).values()) + point.held_bytes

    def are_counted(self, line: Timeline) -> bool:
        """Return whether the device's count has all of them: a CPU counts tensors from some moment on."""
        return all((point.allocated_bytes or 0) >= self.total_bytes(point) for point in line.points)

    def __str__(self) -> str:
        return (
            f"beside activations: weights {format_nbytes(self.weights_bytes)}, gradients "
            f"{format_nbytes(self.gradients_bytes)}, optimizer {format_nbytes(self.optimizer_bytes)}"
        )


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the elements; weights that are one tensor come once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
