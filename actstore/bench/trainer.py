"""Trains the workload through one row, and checks its gradients against plain ones."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from actstore.bench.census import gradients
from actstore.bench.meter import PeakMeter
from actstore.bench.rows import Row
from actstore.bench.workload import Batches, Workload, build
from actstore.bench.wraps import Plain, Wrap, wrap

LEARNING_RATE = 1e-3
LOSS_SCALE = 1024.0  # where float16 gradients start; the scaler moves it


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fix_numerics(work: Workload) -> None:
    """Make two runs of the same steps give the same bits, and pin the threads."""
    torch.set_num_threads(work.threads or cores())
    if work.on_cuda:  # the GPU's fast kernels add in any order unless told not to
        torch.use_deterministic_algorithms(True)  # with warn_only attention in float32 would stay inexact
        # or else it writes every fresh buffer of a store twice
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@dataclass
class _Training:
    wrap: Wrap
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


class Trainer:
    """One row, step by step. Every trainer of a workload makes the same steps."""

    def __init__(self, work: Workload, row: Row, disk_path: str | None) -> None:
        fix_numerics(work)
        self._work, self._row, self._disk_path = work, row, disk_path
        self._batches = Batches(work)
        self._meter = PeakMeter(work.device)
        self._training: _Training | None = None
        self._step = 0
        self._baseline_bytes = 0

    def start(self) -> None:
        """Build the model and its optimizer, and train the steps that are not timed."""
        work = self._work
        model = build(work)
        self._training = _Training(
            wrap(self._row, model, work, self._disk_path),
            torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
            torch.amp.GradScaler(work.device_type, init_scale=LOSS_SCALE, enabled=work.dtype == "float16"),
        )
        self._synchronize()
        self._baseline_bytes = self._meter.now_bytes()
        for _ in range(work.warmup):
            self.step()
        self._meter.reset()

    def step(self) -> tuple[float, float]:
        """Train one step; its time in milliseconds, forward to optimizer, and its loss."""
        assert self._training is not None, "start comes first"
        run = self._training
        torch.manual_seed(self._work.seed + self._step)
        x, y = self._batches(self._step)
        self._step += 1
        self._synchronize()
        start = perf_counter()
        loss = run.wrap.forward(x, y)
        torch.autograd.backward(run.scaler.scale(loss))
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.optimizer.zero_grad()
        self._synchronize()
        elapsed_ms = (perf_counter() - start) * 1e3
        return elapsed_ms, loss.item()

    def peaks(self) -> dict[str, Any]:
        """Memory of the timed steps so far: the fields of RowResult with the same names."""
        return {
            "baseline_bytes": self._baseline_bytes,
            "peak_bytes": self._meter.peak_bytes(),
            "host_peak_bytes": self._meter.host_peak_bytes(),
            "peak_since_reset": self._meter.since_reset,
        }

    def close(self) -> None:
        """Let go of the model and everything that the steps held."""
        if self._training is not None:
            self._training.wrap.close()
        self._training = None

    def check(self) -> dict[str, Any]:
        """Gradients of the first batch on a new model: through the row, against plain; with the bytes saved and held.

        Returns
        -------
        dict : saved_bytes, held_bytes, peak_held_bytes, stored_bytes, grad_error, bit_equal

        Notes
        -----
        The row makes two steps and the second counts, so that a store that learns from the first shows what it does
        from then on.
        """
        self.close()
        work = self._work
        model = build(work)
        x, y = self._batches(0)
        scale = LOSS_SCALE if work.dtype == "float16" else 1.0
        torch.manual_seed(work.seed)
        plain = Plain(model, work).weigh(x, y, scale)
        expected = [g.clone() for g in gradients(model)]
        row = wrap(self._row, model, work, self._disk_path)
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(work.seed)
            memory = row.weigh(x, y, scale)
        found = gradients(model)
        row.close()
        return {
            "saved_bytes": plain.saved_bytes if memory.saved_bytes is None else memory.saved_bytes,
            "held_bytes": memory.held_bytes,
            "peak_held_bytes": memory.peak_held_bytes,
            "stored_bytes": memory.stored_bytes,
            "grad_error": relative_error(found, expected),
            "bit_equal": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
        }

    def _synchronize(self) -> None:
        if self._work.on_cuda:
            torch.cuda.synchronize(self._work.device)


def relative_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """``||found - expected|| / ||expected||`` over all tensors together, in float64; 0.0 only where they are equal."""
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True))
    norm = sum(float(b.double().square().sum()) for b in expected)
    if off == 0:
        return 0.0
    return math.sqrt(off / norm) if norm else math.inf
