"""Peers of PyTorch and of other libraries: checkpoints, compilers and saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from actstore.bench.peers.base import Around, NotApplicable, Wrap
from actstore.bench.peers.census import own_storages
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


MEMORY_BUDGET = 0.5  # fraction of the bytes that the compiled graph saves when it recomputes only what it fuses


class Compiled(Wrap):
    """Model compiled whole by Inductor."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        job.model.compile()


class CompiledBudget(Compiled):
    """Model compiled whole by Inductor, with `activation_memory_budget`."""

    def __init__(self, job: Job) -> None:
        torch._functorch.config.activation_memory_budget = MEMORY_BUDGET
        super().__init__(job)


BNB_MIN_ELEMENTS = 4096
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class SaveOnCpu(Around):
    """torch.autograd.graph.save_on_cpu, pinned where there is a GPU. On the CPU it keeps the tensors as they are."""

    def context(self) -> AbstractContextManager[Any]:
        return save_on_cpu(pin_memory=self.job.work.on_cuda)


class BitsAndBytes(Around):
    """Block-wise 8-bit quantization by bitsandbytes of each floating tensor of 4096 elements or more."""

    def context(self) -> AbstractContextManager[Any]:
        from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

        own = own_storages(self.job.model)

        def pack(tensor: Tensor) -> Any:
            small = tensor.numel() < BNB_MIN_ELEMENTS or tensor.dtype not in _FLOATS
            if small or tensor.untyped_storage().data_ptr() in own:
                return tensor.detach()
            return quantize_blockwise(tensor.detach().contiguous())

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            out: Tensor = dequantize_blockwise(*packed)
            return out

        return saved_tensors_hooks(pack, unpack)


class Torchtune(Around):
    """torchtune.training.OffloadActivations with its defaults: pinned memory and a stream of its own."""

    def __init__(self, job: Job) -> None:
        from torchtune.training import OffloadActivations

        super().__init__(job)
        self._offload: AbstractContextManager[Any] = OffloadActivations()

    def context(self) -> AbstractContextManager[Any]:
        return self._offload


class Trl(Around):
    """TRL's activation offloading with its defaults, as its trainers set it up."""

    def __init__(self, job: Job) -> None:
        from trl.models.activation_offloading import get_act_offloading_ctx_manager

        super().__init__(job)
        self._offload: AbstractContextManager[Any] = get_act_offloading_ctx_manager(job.model, warn_if_no_head=False)

    def context(self) -> AbstractContextManager[Any]:
        return self._offload
