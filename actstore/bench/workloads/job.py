"""What a row trains: a model, its data, and a step cut into forward and backward."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from actstore.bench.workloads.workload import DTYPES, Workload
from actstore.session.activation_store import MIN_NBYTES

Batch = tuple[Tensor, ...]


class Job:
    """A model and its data. Two jobs of one workload train the same numbers.

    Parameters
    ----------
    model : on the device; called with a batch it returns the loss
    blocks : its repeated parts in the order of forward
    batches : the batch of a step, by number
    min_bytes : of the store, as a sensible user would set it for this model
    chain : whether `blocks` is ``model.blocks``, run one after the other, each from one tensor to the next

    Attributes
    ----------
    trains : whether the step of a user runs backward, and so updates the weights, by itself
    calls : of a user's step so far, which may take a new batch at each; 0 where a batch has a number
    """

    trains = False
    calls = 0

    def __init__(
        self,
        work: Workload,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        batches: Callable[[int], Batch],
        min_bytes: int = MIN_NBYTES,
        chain: bool = True,
    ) -> None:
        self.work, self.model, self.blocks, self.batch = work, model, list(blocks), batches
        self.min_bytes, self.chain = min_bytes, chain

    def loss(self, *batch: Tensor) -> Tensor:
        """Forward in the precision of the workload; a user's step may run backward as well."""
        with autocast(self.work):
            loss: Tensor = self.model(*batch)
        return loss

    def backward(self, loss: Tensor, scale: float | None = None) -> None:
        """Backward of the loss, times `scale` where one is given; nothing where `loss` has run it already."""
        torch.autograd.backward(loss if scale is None else loss * scale)


def fix_seed(seed: int) -> None:
    """Seed the generators that a step may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the step of a user may draw from it


def autocast(work: Workload) -> AbstractContextManager[Any]:
    """The precision of forward: nothing for float32, autocast for the 16-bit dtypes."""
    dtype = DTYPES[work.dtype]
    return torch.autocast(work.device_type, dtype=dtype, enabled=dtype != torch.float32)


@dataclass(frozen=True)
class Kind:
    """One model of the benchmark.

    Attributes
    ----------
    title : what is trained on what, for people
    default : sizes that make sense on two cores
    uses : the sizes among the fields of Workload that mean something to it
    make : the job, from generators as `fix_seed` left them
    check : raises ConfigError where the sizes do not fit
    policies : that a user would write for the parts of this model
    """

    title: str
    default: Workload
    uses: tuple[str, ...]
    make: Callable[[Workload], Job]
    check: Callable[[Workload], object]
    policies: tuple[str, ...] = ()
