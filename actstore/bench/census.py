"""Counts what saved-tensor hooks are given and what they keep, by storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

Payload = Callable[[Any], Iterable[Tensor]]
"""The tensors in what a pack hook returned."""


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Equal for the same storage only: while it lives, no other storage gets the same identity."""
    return StorageWeakRef(storage)


class Census:
    """Bytes of the storages behind tensors, each storage once, those of a model's parameters and buffers left out.

    Parameters
    ----------
    model : its parameters and buffers are not counted, nor are views of them
    device_type : only storages on such a device are counted
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self._device_type = device_type
        own = [*model.parameters(), *model.buffers()]
        self._own = {_weak(t.untyped_storage()) for t in own}
        self._seen: dict[StorageWeakRef, int] = {}

    def add(self, tensor: Tensor) -> None:
        """Count the storage under `tensor`, if it is a new one."""
        storage = tensor.untyped_storage()
        key = _weak(storage)
        if tensor.device.type == self._device_type and key not in self._own:
            self._seen.setdefault(key, storage.nbytes())

    @property
    def saved_bytes(self) -> int:
        """Of all storages that were counted."""
        return sum(self._seen.values())

    @property
    def held_bytes(self) -> int:
        """Of those that are still alive."""
        alive: list[int] = [nbytes for key, nbytes in self._seen.items() if not key.expired()]
        return sum(alive)

    def plain(self) -> saved_tensors_hooks:
        """Hooks that change nothing and count each saved tensor: what autograd holds by itself."""

        def pack(tensor: Tensor) -> Tensor:
            self.add(tensor)
            return tensor.detach()

        return saved_tensors_hooks(pack, _identity)

    def around(self, hooks: saved_tensors_hooks, payload: Payload) -> saved_tensors_hooks:
        """The same hooks, with the tensors that they keep counted."""

        def pack(tensor: Tensor) -> Any:
            packed = hooks.pack_hook(tensor)
            for kept in payload(packed):
                self.add(kept)
            return packed

        return saved_tensors_hooks(pack, hooks.unpack_hook)


def _identity(packed: Tensor) -> Tensor:
    return packed


def own_storages(model: nn.Module) -> set[int]:
    """Addresses of the storages of parameters and buffers; valid while the model keeps them."""
    return {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of all parameters, zeros where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
