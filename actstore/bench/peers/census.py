"""Count of the tensors that saved-tensor hooks receive, by storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Return a weak reference, which equals only those to the same storage: none takes its identity while it lives."""
    return StorageWeakRef(storage)


class Census:
    """Bytes of the storages behind tensors, each storage once, without a model's parameters and buffers.

    Parameters
    ----------
    model : its parameters, its buffers and views of them are not counted
    device_type : only storages on such a device are counted
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self._device_type = device_type
        own = [*model.parameters(), *model.buffers()]
        self._own = {_weak(t.untyped_storage()) for t in own}
        self._seen: dict[StorageWeakRef, int] = {}
        self._at_end: int | None = None

    def add(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` the first time it is seen."""
        storage = tensor.untyped_storage()
        key = _weak(storage)
        if tensor.device.type == self._device_type and key not in self._own:
            self._seen.setdefault(key, storage.nbytes())

    @property
    def saved_bytes(self) -> int:
        """Bytes of all storages that were counted until forward ended."""
        return sum(self._seen.values()) if self._at_end is None else self._at_end

    def end(self) -> None:
        """Stop counting: forward has ended, and backward reads its first tensor."""
        self._at_end = self.saved_bytes

    def plain(self) -> saved_tensors_hooks:
        """Return hooks that change nothing and count each saved tensor: the bytes that autograd holds by itself."""

        def pack(tensor: Tensor) -> Tensor:
            self.add(tensor)
            return tensor.detach()

        def unpack(packed: Tensor) -> Tensor:
            self.end()
            return packed

        return saved_tensors_hooks(pack, unpack)


def own_storages(model: nn.Module) -> set[int]:
    """Return the addresses of the storages of parameters and buffers; valid while the model keeps them."""
    return {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}


@contextmanager
def recorded_gradients(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list that receives copies of the gradients as backward accumulates them, before the step changes them.

    The list has one tensor for each parameter, zeros where no gradient arrived. It is complete after the context.
    """
    parameters = list(model.parameters())
    found: dict[Tensor, Tensor] = {}
    gradients: list[Tensor] = []

    def record(parameter: Tensor) -> None:
        assert parameter.grad is not None
        found[parameter] = parameter.grad.detach().clone()

    hooks = [p.register_post_accumulate_grad_hook(record) for p in parameters if p.requires_grad]
    try:
        yield gradients
    finally:
        for hook in hooks:
            hook.remove()
        gradients += [found[p] if p in found else torch.zeros_like(p) for p in parameters]
