"""Blocks of memory that a device's allocator takes for tensors."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from actstore.compiled.formats.sizes import hinted_nbytes
from actstore.devices.cpu_memory import most_counted

GRAIN_NBYTES = 512  # of the allocators of accelerators


class Blocks:
    """The sizes of the tensors of one graph. An allocator may give a tensor the idle block of a larger one."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        values = [value for node in nodes for value in tree_leaves(node.meta.get("val"))]
        self._sizes = {hinted_nbytes(value) for value in values if isinstance(value, Tensor)}
        self._on_cpu = cache(lambda nbytes: most_counted(nbytes, self._sizes))

    def nbytes(self, tensor: Tensor) -> int:
        """Return the most bytes that the allocator takes for a tensor."""
        return self.of(hinted_nbytes(tensor), tensor.device.type)

    def of(self, nbytes: int, kind: str) -> int:
        """Return the most bytes that the allocator of a kind of device takes for so many."""
        if kind == "cpu":
            return self._on_cpu(nbytes)
        return -(-nbytes // GRAIN_NBYTES) * GRAIN_NBYTES
