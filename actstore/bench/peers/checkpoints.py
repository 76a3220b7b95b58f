"""Recomputation as PyTorch, torch_remat and DeepSpeed offer it, around the blocks of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from actstore.bench.peers.base import NotApplicable, Wrap
from actstore.bench.workloads.job import Job

_aten = torch.ops.aten
MATMULS = frozenset({_aten.mm.default, _aten.addmm.default})
KEPT = MATMULS | {
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


class Checkpoint(Wrap):
    """torch.utils.checkpoint, not reentrant, around each block."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if not job.blocks:
            raise NotApplicable("the model has no repeated blocks that are known")
        for block in self.chosen(job.blocks):
            block.forward = self.recomputed(block.forward)

    def chosen(self, blocks: list[nn.Module]) -> list[nn.Module]:
        return blocks

    def recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return partial(checkpoint, forward, use_reentrant=False)


class EveryKth(Checkpoint):
    """Checkpoints of each k-th block, k the rounded square root of their number; the rest keep what they save."""

    def chosen(self, blocks: list[nn.Module]) -> list[nn.Module]:
        k = root(blocks)
        return blocks[k - 1 :: k]


class Selective(Checkpoint):
    """Selective checkpointing of each block: attention, convolutions and every other matrix product are kept."""

    def recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return partial(checkpoint, forward, use_reentrant=False, context_fn=_selective)


def _selective() -> Any:
    products = {False: 0, True: 0}  # key: whether in recomputation

    def policy(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in MATMULS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Offloaded(Checkpoint):
    """Checkpoints whose inputs wait in CPU memory, as Transformers makes them with ``offload=True``."""

    def recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def offloaded(*args: Any) -> Any:
            with save_on_cpu(pin_memory=torch.cuda.is_available()):
                return checkpoint(forward, *args, use_reentrant=False)

        return offloaded


class Remat(Checkpoint):
    """torch_remat's checkpoint around each block, in which the attention is a region that is not recomputed."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        for block in job.blocks:
            attention: Any = getattr(block, "attn", None)
            if attention is None:
                raise NotApplicable("the blocks have no attention that is known")
            attention.forward = _kept(attention.forward)

    def recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        import torch_remat

        recomputed: Callable[..., Any] = torch_remat.checkpoint(region_name="block")(forward)
        return recomputed


def _kept(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward whose activations wait, and whose output the recomputation around it takes as it is."""
    import torch_remat

    region = torch_remat.region(forward, "attention", recompute=False)

    def kept(*args: Any) -> Any:
        output = region(*args)
        torch_remat.recompute_needs_tensor(output)
        return output

    return kept


class Sequential(Wrap):
    """checkpoint_sequential over all blocks, in as many segments as the rounded square root of their number."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if not job.chain:
            raise NotApplicable("checkpoint_sequential needs blocks that run once each, one after another")
        functions = [block.forward for block in job.blocks]
        segments = root(job.blocks)
        for block in job.blocks:
            block.forward = _identity
        job.blocks[0].forward = lambda x: checkpoint_sequential(functions, segments, x, use_reentrant=False)


class DeepSpeed(Checkpoint):
    """deepspeed.checkpointing.checkpoint around each block."""

    def recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        from deepspeed import checkpointing

        return partial(checkpointing.checkpoint, forward)


class DeepSpeedCpu(DeepSpeed):
    """deepspeed.checkpointing.checkpoint with the blocks' inputs in CPU memory (`cpu_checkpointing`)."""

    def __init__(self, job: Job) -> None:
        import deepspeed
        from torch import distributed as dist

        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)
        deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True)
        super().__init__(job)


def root(blocks: list[nn.Module]) -> int:
    """Return the rounded square root of the number of blocks."""
    return max(1, round(sqrt(len(blocks))))


def _identity(x: Tensor) -> Tensor:
    return x
