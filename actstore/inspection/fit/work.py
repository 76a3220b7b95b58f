"""The time of a dry step: the work of its operators, codecs and copies, at the rates of a device.

The rates of this CPU are measured; those of a GPU are on its data sheet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from math import inf
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from actstore.devices import Cpu
from actstore.errors import ConfigError
from actstore.plan.hardware import PRESETS, Hardware
from actstore.plan.solver.chain import Links
from actstore.tiers.disk import DiskTier

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
        """Return the range of this step's time over that of the `plain` step."""
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


GPUS = {name.lower().replace(" ", "-"): hardware for name, hardware in PRESETS.items()}
_SIDE = 768  # of the matrices
_NBYTES = 32 * 2**20
_REPEATS = 5


def rates_of(device: str) -> Hardware:
    """Return the rates of a device, "cpu" for this CPU: that takes a second.

    Raises
    ------
    ConfigError : the device is unknown
    """
    if device == "cpu":
        return _this_cpu()
    if device not in GPUS:
        raise ConfigError(f"device={device!r}: must be one of {', '.join(['cpu', *GPUS])}.", device=device)
    return GPUS[device]


def _this_cpu() -> Hardware:
    flops = 2 * _SIDE**3
    single, half = (torch.ones(_SIDE, _SIDE, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    source, target = (torch.ones(_NBYTES, dtype=torch.uint8) for _ in range(2))
    disk = DiskTier(None, Cpu(torch.device("cpu")))
    try:
        slot = disk.reserve(_NBYTES)
        if slot is None:
            disk_out = disk_back = inf  # no payload can wait there
        else:
            disk_out = _NBYTES / _least_ms(lambda: disk.write(slot, source).result())
            disk_back = _NBYTES / _least_ms(lambda: disk.read(slot, target).result())
    finally:
        disk.close()
    return Hardware(
        Links(disk_out=disk_out, disk_back=disk_back, on_host=True),
        flops=flops / _least_ms(lambda: half @ half),
        single_flops=flops / _least_ms(lambda: single @ single),
        memory_rate=2 * _NBYTES / _least_ms(lambda: target.copy_(source)),
    )


def _least_ms(run: Callable[[], object]) -> float:
    """Return the milliseconds of the fastest of some runs."""
    times = []
    for _ in range(_REPEATS):
        begin = perf_counter_ns()
        run()
        times.append(perf_counter_ns() - begin)
    return min(times) / 1e6
