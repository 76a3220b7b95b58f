"""The time of a dry step: the work of its operators, codecs and copies, at the rates of a device."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from actstore.plan.hardware import Hardware

# Shares of a device's best rates that a training step reaches: of matrix products, and of its memory.
FLOPS_SHARES, MEMORY_SHARES = (0.45, 0.9), (0.5, 0.95)
_HALVES = (torch.bfloat16, torch.float16)


class OperatorWork(NamedTuple):
    """The work of an operator.

    Attributes
    ----------
    flops : operations of matrix products and convolutions; 0 for another operator
    nbytes : that it reads and writes
    is_half : whether the products have 16-bit operands
    """

    flops: float
    nbytes: int
    is_half: bool


class DryTimes(NamedTuple):
    """Milliseconds of one step, one for each pair of shares that the device may reach.

    Attributes
    ----------
    hidden : where copies and compute run side by side, as far as they can
    exposed : where compute waits for each copy
    """

    hidden: tuple[float, ...]
    exposed: tuple[float, ...]

    def times(self, plain: DryTimes) -> tuple[float, float]:
        """Return the least and the most times that this is of the `plain` step."""
        ratios = [
            one / other for found in (self.hidden, self.exposed) for one, other in zip(found, plain.hidden, strict=True)
        ]
        return min(ratios), max(ratios)


class Work:
    """Time of the work since `reset`.

    Parameters
    ----------
    device : its rates
    """

    def __init__(self, device: Hardware) -> None:
        self._device = device
        self._shares = tuple(product(FLOPS_SHARES, MEMORY_SHARES))
        self.reset()

    def reset(self) -> None:
        """Forget the work so far."""
        self._ms = [0.0] * len(self._shares)
        self._copies_ms = 0.0

    def operator(self, work: OperatorWork) -> None:
        """Add an operator: it takes the longer of the times that its products and its bytes need."""
        flops_ms = work.flops / (self._device.flops if work.is_half else self._device.single_flops)
        memory_ms = work.nbytes / self._device.memory_rate
        for i, (flops_share, memory_share) in enumerate(self._shares):
            self._ms[i] += max(flops_ms / flops_share, memory_ms / memory_share)

    def codec(self, nbytes: int) -> None:
        """Add an encode or a decode, by all bytes that it reads and writes."""
        self.operator(OperatorWork(0, nbytes, is_half=False))

    def copy(self, tier: str, nbytes: int, *, back: bool) -> None:
        """Add a copy to a tier, or `back`."""
        links = self._device.links
        if not links.on_host:
            self._copies_ms += nbytes / (links.back if back else links.out)
        if tier == "disk":
            self._copies_ms += nbytes / (links.disk_back if back else links.disk_out)

    @property
    def compute_ms(self) -> float:
        """Milliseconds without copies, in the middle of the pairs of shares."""
        return sum(self._ms) / len(self._ms)

    def times(self) -> DryTimes:
        """Return the time of a step with this work."""
        hidden = tuple(max(ms, self._copies_ms) for ms in self._ms)
        return DryTimes(hidden, tuple(ms + self._copies_ms for ms in self._ms))


def work_of(func: Any, run: Any, fakes: list[Any], found: Any, outputs: list[Any]) -> OperatorWork:
    """Return the work of an operator.

    Parameters
    ----------
    run : calls a function with the operator's arguments, given as a list
    fakes : the arguments as a list, tensors without data
    found : what it returns
    outputs : the same as a list
    """
    tensors = [each for each in fakes if isinstance(each, Tensor)]
    if func._schema.name.startswith(("aten::empty", "aten::new_empty")):
        return OperatorWork(0, 0, is_half=False)
    rule = _FLOPS.get(func._overloadpacket)
    flops = run(partial(rule, out_val=found), fakes) if rule is not None else 0
    nbytes = sum(
        min(each.nbytes, each.untyped_storage().nbytes()) for each in (*tensors, *outputs) if isinstance(each, Tensor)
    )
    return OperatorWork(flops, nbytes, any(each.dtype in _HALVES for each in tensors))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    flops: int = sdpa_flop_count(query.shape, key.shape, value.shape)
    return flops


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    flops: int = sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)
    return flops


_FLOPS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    **flop_registry,
}
