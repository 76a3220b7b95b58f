"""Peers that are saved-tensor hooks around forward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from actstore.bench.peers.base import Around
from actstore.bench.peers.census import own_storages
from actstore.bench.workloads.job import Job

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
