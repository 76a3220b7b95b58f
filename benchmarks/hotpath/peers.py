"""Saved-tensor hooks of other libraries, for `hotpath`, as their documentation shows them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

Hooks = Callable[[], AbstractContextManager[Any]]
GROUP = 128


def find(device: str) -> tuple[dict[str, Hooks], dict[str, str]]:
    """Return the hooks of each peer that works here, and the reason for each that does not."""
    found: dict[str, Hooks] = {}
    left_out: dict[str, str] = {}
    for name, make in PEERS.items():
        try:
            hooks = make(device)
            _try(hooks, device)
        except Exception as error:  # a peer may fail in any way; the figures of the rest stand
            left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            found[name] = hooks
    return found, left_out


def _try(hooks: Hooks, device: str) -> None:
    x = torch.ones(1024, device=device, requires_grad=True)
    with hooks():
        loss = x.sin().sum()
    torch.autograd.backward(loss)


def _save_on_cpu(device: str) -> Hooks:
    return lambda: save_on_cpu(pin_memory=device.startswith("cuda"))


def _bitsandbytes(device: str) -> Hooks:
    from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

    def pack(tensor: Tensor) -> Any:
        return quantize_blockwise(tensor.detach().contiguous())

    def unpack(packed: Any) -> Tensor:
        out: Tensor = dequantize_blockwise(*packed)
        return out

    return lambda: saved_tensors_hooks(pack, unpack)


def _torchtune(device: str) -> Hooks:
    from torchtune.training import OffloadActivations

    offload: AbstractContextManager[Any] = OffloadActivations()
    return lambda: offload


def _trl(device: str) -> Hooks:
    from trl.models.activation_offloading import OffloadActivations

    offload: AbstractContextManager[Any] = OffloadActivations()
    return lambda: offload


def _naive_int8(device: str) -> Hooks:
    """Return hooks that encode to int8 in groups, in plain PyTorch operations, as a first attempt would."""

    def pack(t: Tensor) -> Any:
        groups = t.detach().reshape(-1, GROUP)
        scale = groups.abs().amax(dim=1, keepdim=True) / 127
        return (groups / scale).round().to(torch.int8), scale, t.shape, t.dtype

    def unpack(packed: Any) -> Tensor:
        codes, scale, shape, dtype = packed
        out: Tensor = (codes * scale).to(dtype).reshape(shape)
        return out

    return lambda: saved_tensors_hooks(pack, unpack)


PEERS: dict[str, Callable[[str], Hooks]] = {
    "save_on_cpu": _save_on_cpu,
    "bitsandbytes 8-bit": _bitsandbytes,
    "torchtune": _torchtune,
    "TRL": _trl,
    "naive int8": _naive_int8,
}
