"""Job of a row: a model, its data, and a step divided into forward and backward."""

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

PARTS = (  # policies for blocks with attention `attn` and a feed-forward network `mlp`
    "blocks.*.attn : recompute",
    "blocks.*.mlp : recompute",
    "blocks.*.attn : keep; blocks.* : recompute",
    "*/@matmul : keep; @blocks : recompute",
    "blocks.0 : recompute; * : derive",
)


class Job:
    """A model and its data. Two jobs of one workload train the same numbers.

    Parameters
    ----------
    model : on the device; returns the loss of a batch
    blocks : its repeated parts in the order of forward
    batches : the batch of each step number
    min_bytes : of the store, as a user would set it for this model
    chain : whether `blocks` is ``model.blocks``, run in sequence, each from one tensor to the next

    Attributes
    ----------
    trains : whether the user's step runs backward, and so updates the weights, by itself
    calls : number of the user's steps so far: each may take a new batch; 0 where a batch has a number
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
        """Run forward in the precision of the workload and return the loss; a user's step may run backward as well."""
        with autocast(self.work):
            loss: Tensor = self.model(*batch)
        return loss

    def backward(self, loss: Tensor, scale: float | None = None) -> None:
        """Run backward of the loss, times `scale` where one is given; do nothing where `loss` has run it already."""
        torch.autograd.backward(loss if scale is None else loss * scale)


def in_blocks(
    model: Callable[[Workload], nn.Module], batches: Callable[[Workload], Callable[[int], Batch]]
) -> Callable[[Workload], Job]:
    """Return a function that makes the job of a model whose repeated parts are its `blocks`."""

    def make(work: Workload) -> Job:
        built: Any = model(work).to(work.device)
        return Job(work, built, built.blocks, batches(work))

    return make


def fix_seed(seed: int) -> None:
    """Seed the generators that a step may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the step of a user may draw from it


def autocast(work: Workload) -> AbstractContextManager[Any]:
    """Return the precision context of forward: autocast for the 16-bit dtypes, no change for float32."""
    dtype = DTYPES[work.dtype]
    return torch.autocast(work.device_type, dtype=dtype, enabled=dtype != torch.float32)


@dataclass(frozen=True)
class Kind:
    """A model of the benchmark, with its defaults.

    Attributes
    ----------
    title : model and data, for people
    default : sizes that make sense on two cores
    uses : the sizes among the fields of Workload that the model reads
    make : builds the job, from generators in the state of `fix_seed`
    check : raises ConfigError where the sizes do not fit
    policies : that a user would write for this model's parts
    """

    title: str
    default: Workload
    uses: tuple[str, ...]
    make: Callable[[Workload], Job]
    check: Callable[[Workload], object]
    policies: tuple[str, ...] = ()
