"""Microseconds that the training thread spends on one saved tensor, by path: a part of `hotpath`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils.checkpoint import checkpoint

from actstore import ActivationStore

TENSOR_SIDE = 32
WARMUP_STEPS = 5  # warm-up: pools fill, and stores learn orders
PATHS = {  # policy, and the least size that it encodes
    "kept": ("keep", 0),
    "kept, below min_bytes": ("int8", 2**20),
    "raw": ("raw", 0),
    "int8": ("int8", 0),
    "int4": ("int4", 0),
    "raw @ host": ("raw @ host", 0),
    "int8 @ host": ("int8 @ host", 0),
    "raw @ disk": ("raw @ disk", 0),
    "int8 @ disk": ("int8 @ disk", 0),
}


class Block(nn.Module):
    """One operator, which saves one tensor: a region around it adds nearly all of its time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor, run: Callable[..., Any] = lambda block, x: block(x)) -> Tensor:
        for block in self.blocks:
            x = run(block, x)
        return x.sum()


def clock(device: str) -> float:
    """Return the time of `hotpath.Clock`."""
    if torch.device(device).type == "cpu":
        return thread_time()
    torch.accelerator.synchronize()
    return perf_counter()


def measure(device: str, length: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return `pack_us` and `unpack_us` of each path; for regions `both_us` beyond plain. Medians over the rounds."""
    x = torch.randn(TENSOR_SIDE, TENSOR_SIDE, device=device, requires_grad=True)
    activations = [(x + i).sin() for i in range(length)]
    frozen = [nn.Parameter(torch.rand(TENSOR_SIDE, TENSOR_SIDE, device=device)).t() for _ in range(length)]
    masks = [torch.rand(TENSOR_SIDE, TENSOR_SIDE, device=device) > 0.5 for _ in range(length)]
    jobs = {name: (ActivationStore(policy=p, min_bytes=least), activations) for name, (p, least) in PATHS.items()}
    model = nn.ParameterList([view._base for view in frozen])
    jobs["a parameter"] = ActivationStore(model, "int8", min_bytes=0), frozen
    jobs["a mask"] = ActivationStore(policy="int8", min_bytes=0), masks
    found: dict[str, dict[str, float]] = {}
    gc.collect()
    gc.disable()
    try:
        for name, (store, tensors) in jobs.items():
            times = [_direct(store, tensors, device) for _ in range(WARMUP_STEPS + rounds)][WARMUP_STEPS:]
            pack_us, unpack_us = (median(column) for column in zip(*times, strict=True))
            found[name] = {"pack_us": pack_us, "unpack_us": unpack_us}
            store.close()
        found |= _regions(device, max(2, length // 10), rounds)
    finally:
        gc.enable()
    return found


def _direct(store: ActivationStore, tensors: list[Tensor], device: str) -> tuple[float, float]:
    with store:
        mul, unpack = _top_saved_tensors_default_hooks(False)  # called as an operator that decides nothing
        start = clock(device)
        packed = [mul(t) for t in tensors]
        middle = clock(device)
    again = clock(device)
    with torch.no_grad():
        while packed:
            unpack(packed.pop())
    end = clock(device)
    return (middle - start) / len(tensors) * 1e6, (end - again) / len(tensors) * 1e6


def _regions(device: str, count: int, rounds: int) -> dict[str, dict[str, float]]:
    model = Blocks(count).to(device)
    x = torch.randn(TENSOR_SIDE, TENSOR_SIDE, device=device, requires_grad=True)
    store = ActivationStore(model, "recompute", min_bytes=0)

    def step(context: Any, *run: Any) -> float:
        start = clock(device)
        with context:
            loss = model(x, *run)
        loss.backward()
        return (clock(device) - start) / count * 1e6

    def checkpointed(block: nn.Module, x: Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=False)

    times = [
        (step(nullcontext()), step(nullcontext(), checkpointed), step(store)) for _ in range(WARMUP_STEPS + rounds)
    ][WARMUP_STEPS:]  # fmt: skip
    return {
        "torch checkpoint, a block": {"both_us": median(c - plain for plain, c, _ in times)},
        "recompute, a block": {"both_us": median(r - plain for plain, _, r in times)},
    }


def render(found: dict[str, Any]) -> Table:
    """Return the figures as a table."""
    table = Table(title=f"Microseconds for one tensor of 4 KB on {found['device']}, by path", title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("pack", "unpack", "both"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in found["paths"].items():
        both = row.get("both_us") or row["pack_us"] + row["unpack_us"]
        table.add_row(name, *(f"{row[k]:.1f}" if k in row else "" for k in ("pack_us", "unpack_us")), f"{both:.1f}")
    return table
