"""How each row wraps the model: the peers as their own documentation shows them, ours through ActivationStore."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from actstore.bench.census import Census, own_storages
from actstore.bench.rows import BITSANDBYTES, CHECKPOINT, PLAIN, SAVE_ON_CPU, Row
from actstore.bench.workload import GPT, Workload, autocast

if TYPE_CHECKING:
    from actstore import ActivationStore

BNB_MIN_ELEMENTS = 4096


@dataclass(frozen=True)
class Memory:
    """Bytes of one step: the fields of actstore.bench.result.RowResult with the same names.

    `saved_bytes` is what this wrap itself says plain autograd would hold; None where it cannot know.
    """

    held_bytes: int
    saved_bytes: int | None = None
    peak_held_bytes: int | None = None
    stored_bytes: int | None = None


class Wrap(ABC):
    """A model wrapped as one row wants it. Build it once, then run any number of steps through it."""

    def __init__(self, model: GPT, work: Workload) -> None:
        self.model, self.work = model, work

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss, ready for backward."""

    @abstractmethod
    def weigh(self, x: Tensor, y: Tensor, scale: float) -> Memory:
        """Forward, and backward of the loss times `scale`, with the memory between them counted."""

    def close(self) -> None:
        """Give back what the wrap holds beside the model; a peer holds nothing."""
        return

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        with autocast(self.work):
            loss: Tensor = self.model(x, y)
        return loss

    def _census(self) -> Census:
        return Census(self.model, self.work.device_type)


class Plain(Wrap):
    """PyTorch's autograd as it is."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self._loss(x, y)

    def weigh(self, x: Tensor, y: Tensor, scale: float) -> Memory:
        census = self._census()
        with census.plain():
            loss = self._loss(x, y)
        memory = self._memory(census)
        torch.autograd.backward(loss * scale)
        return memory

    def _memory(self, census: Census) -> Memory:
        return Memory(census.held_bytes, census.saved_bytes)


class Checkpoint(Plain):
    """torch.utils.checkpoint around each block; `held_bytes` are the inputs that hooks outside the regions see."""

    def __init__(self, model: GPT, work: Workload) -> None:
        super().__init__(model, work)
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def _memory(self, census: Census) -> Memory:
        return Memory(census.held_bytes)


class Hooks(Wrap):
    """A pair of saved-tensor hooks around forward."""

    @abstractmethod
    def hooks(self) -> saved_tensors_hooks:
        """A new pair."""

    @abstractmethod
    def payload(self, packed: Any) -> Iterable[Tensor]:
        """The tensors that keep the payload alive in what pack returned."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with self.hooks():
            return self._loss(x, y)

    def weigh(self, x: Tensor, y: Tensor, scale: float) -> Memory:
        census = self._census()
        with census.around(self.hooks(), self.payload):
            loss = self._loss(x, y)
        memory = Memory(census.held_bytes)
        torch.autograd.backward(loss * scale)
        return memory


class SaveOnCpu(Hooks):
    """torch.autograd.graph.save_on_cpu, pinned where there is a GPU. On the CPU it keeps the tensors as they are."""

    def hooks(self) -> saved_tensors_hooks:
        return save_on_cpu(pin_memory=self.work.on_cuda)

    def payload(self, packed: Any) -> Iterable[Tensor]:
        return (packed[1],)


class BitsAndBytes(Hooks):
    """Block-wise 8-bit quantization by bitsandbytes of each floating tensor of 4096 elements or more."""

    def hooks(self) -> saved_tensors_hooks:
        from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

        own = own_storages(self.model)

        def pack(tensor: Tensor) -> Any:
            small = tensor.numel() < BNB_MIN_ELEMENTS or tensor.dtype not in (
                torch.float32,
                torch.float16,
                torch.bfloat16,
            )
            if small or tensor.untyped_storage().data_ptr() in own:
                return tensor.detach()
            return quantize_blockwise(tensor.detach().contiguous())

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            out: Tensor = dequantize_blockwise(*packed)
            return out

        return saved_tensors_hooks(pack, unpack)

    def payload(self, packed: Any) -> Iterable[Tensor]:
        if isinstance(packed, Tensor):
            return (packed,)
        quantized, state = packed
        return (quantized, state.absmax, state.code)


class Ours(Wrap):
    """ActivationStore with the policy of the row."""

    def __init__(self, model: GPT, work: Workload, policy: str, disk_path: str | None) -> None:
        super().__init__(model, work)
        from actstore import ActivationStore

        self.store: ActivationStore = ActivationStore(model, policy, disk_path=disk_path)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with self.store:
            return self._loss(x, y)

    def weigh(self, x: Tensor, y: Tensor, scale: float) -> Memory:
        torch.autograd.backward(self.forward(x, y) * scale)
        report = self.store.report()
        return Memory(report.held_bytes, report.saved_bytes, report.peak_held_bytes, report.stored_bytes)

    def close(self) -> None:
        self.store.close()


_PEERS: dict[str, type[Wrap]] = {
    PLAIN.name: Plain,
    CHECKPOINT.name: Checkpoint,
    SAVE_ON_CPU.name: SaveOnCpu,
    BITSANDBYTES.name: BitsAndBytes,
}


def wrap(row: Row, model: GPT, work: Workload, disk_path: str | None) -> Wrap:
    """The model wrapped for `row`."""
    if row.kind == "ours":
        return Ours(model, work, row.policy, disk_path)
    return _PEERS[row.name](model, work)
