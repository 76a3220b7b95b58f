"""Training of the workload through one row, and a check of its gradients against plain ones."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from actstore.bench import workloads
from actstore.bench.memory import Held, Libraries, PeakMeter, count_maps
from actstore.bench.peers import Wrap, wrap
from actstore.bench.peers.census import Census, recorded_gradients
from actstore.bench.peers.rows import Row
from actstore.bench.workloads.job import Job, fix_seed
from actstore.bench.workloads.workload import Workload
from actstore.devices import cpu_memory

LEARNING_RATE = 1e-3
LOSS_SCALE = 1024.0  # initial loss scale for float16 gradients; the scaler changes it


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fix_numerics(work: Workload) -> None:
    """Make two runs of the same steps bit-identical, and fix the number of threads."""
    torch.set_num_threads(work.threads or cores())
    if work.on_cuda:  # otherwise the GPU's fast kernels add in any order
        torch.use_deterministic_algorithms(True)  # with warn_only, attention in float32 would stay nondeterministic
        # otherwise PyTorch fills each fresh buffer of a store, which then writes it again
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@dataclass
class _Training:
    job: Job
    wrap: Wrap
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


class _State:
    """Copy of a model's weights and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._values = [tensor.detach().clone() for tensor in _tensors(model)]

    def restore(self, model: nn.Module) -> None:
        with torch.no_grad():
            for tensor, value in zip(_tensors(model), self._values, strict=True):
                tensor.copy_(value)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def settle(wrapped: Wrap) -> None:
    """Run the steps in which a wrap measures and plans; they do not train."""
    job = wrapped.job
    state = _State(job.model)
    while not wrapped.settled:
        fix_seed(job.work.seed)
        job.backward(wrapped.forward(*job.batch(0)))
        job.model.zero_grad()
        state.restore(job.model)


@dataclass
class _Weighed:
    held_bytes: int | None
    gradients: list[Tensor]
    buffers: list[Tensor]
    figures: dict[str, int]


class Trainer:
    """Trainer of one row, step by step. All trainers of a workload make the same steps."""

    def __init__(self, work: Workload, row: Row, disk_path: str | None) -> None:
        fix_numerics(work)
        count_maps()
        self._work, self._row, self._disk_path = work, row, disk_path
        self._meter = PeakMeter(work.device)
        self._training: _Training | None = None
        self._step = 0
        self._baseline_bytes = 0
        self._libraries = Libraries()

    def start(self) -> list[float]:
        """Build the model and its optimizer, train the warm-up steps, and return their losses."""
        with self._libraries.counted():
            losses = self._start()
        self._meter.reset()
        return losses

    def _start(self) -> list[float]:
        work = self._work
        job = workloads.make(work)
        self._training = _Training(
            job,
            wrap(self._row, job, self._disk_path),
            torch.optim.AdamW(job.model.parameters(), lr=LEARNING_RATE),
            torch.amp.GradScaler(work.device_type, init_scale=LOSS_SCALE, enabled=work.dtype == "float16"),
        )
        self._synchronize()
        self._baseline_bytes = self._meter.now_bytes()
        settle(self._training.wrap)
        cpu_memory.trim()  # else what settling took stays with the process
        return [self.step()[1] for _ in range(work.warmup)]

    def step(self) -> tuple[float, float]:
        """Train one step; return its time in milliseconds, forward to optimizer, and its loss."""
        assert self._training is not None, "start comes first"
        run = self._training
        fix_seed(self._work.seed + self._step)
        batch = run.job.batch(self._step)
        self._step += 1
        self._synchronize()
        start = perf_counter()
        loss = run.wrap.forward(*batch)
        if not run.job.trains:
            run.job.backward(run.scaler.scale(loss))
            run.scaler.step(run.optimizer)
            run.scaler.update()
            run.optimizer.zero_grad()
        self._synchronize()
        elapsed_ms = (perf_counter() - start) * 1e3
        return elapsed_ms, loss.item()

    def peaks(self) -> dict[str, Any]:
        """Return the memory figures of the timed steps so far, by the names of RowResult's fields."""
        return {
            "baseline_bytes": self._baseline_bytes,
            "peak_bytes": self._meter.peak_bytes(),
            "libraries_bytes": None if self._work.on_cuda else self._libraries.nbytes,
            "allocated_peak_bytes": self._meter.allocated_peak_bytes(),
            "host_peak_bytes": self._meter.host_peak_bytes(),
            "peak_since_reset": self._meter.since_reset,
        }

    def close(self) -> None:
        """Free the model and everything that the steps held."""
        if self._training is not None:
            self._training.wrap.close()
        self._training = None

    def check(self) -> dict[str, Any]:
        """Compare gradients of the first batch on a new model with plain's, and count the bytes saved and held.

        Returns
        -------
        dict : saved_bytes, held_bytes, peak_held_bytes, stored_bytes, grad_error, bit_equal, state_error

        Notes
        -----
        Row and plain each make three steps from the same weights: the first for a store that learns from it, the second
        for the gradients, the third for the bytes.
        """
        if self._training is not None and self._training.job.calls:
            self.close()
        if self._training is None:
            wrapped = wrap(self._row, workloads.make(self._work), self._disk_path)
            settle(wrapped)
        else:
            wrapped, self._training = self._training.wrap, None
        fresh = Wrap(workloads.make(self._work))
        state = _State(fresh.job.model)
        saved_bytes = self._saved_bytes(fresh.job)
        while fresh.job.calls != wrapped.job.calls:
            self._once(min(fresh, wrapped, key=lambda one: one.job.calls), state)
        plain = self._weigh(fresh, state)
        found = self._weigh(wrapped, state)
        return {
            "saved_bytes": saved_bytes,
            "held_bytes": found.held_bytes,
            "grad_error": relative_error(found.gradients, plain.gradients),
            "bit_equal": all(torch.equal(a, b) for a, b in zip(found.gradients, plain.gradients, strict=True)),
            "state_error": relative_error(found.buffers, plain.buffers),
            **found.figures,
        }

    def _saved_bytes(self, job: Job) -> int:
        census = Census(job.model, self._work.device_type)
        fix_seed(self._work.seed)
        with census.plain():
            loss = job.loss(*job.batch(0))
        job.backward(loss)
        return census.saved_bytes

    def _weigh(self, wrapped: Wrap, state: _State) -> _Weighed:
        model = wrapped.job.model
        self._once(wrapped, state)
        with recorded_gradients(model) as gradients:
            self._once(wrapped, state)
        buffers = [buffer.detach().clone() for buffer in model.buffers()]
        held = Held(self._work.device)
        with held.watch():
            self._once(wrapped, state)
        figures = wrapped.figures()
        wrapped.close()
        held.release()
        return _Weighed(held.nbytes, gradients, buffers, figures)

    def _once(self, wrapped: Wrap, state: _State) -> None:
        job = wrapped.job
        state.restore(job.model)
        fix_seed(self._work.seed)
        loss = wrapped.forward(*(tensor.clone() for tensor in job.batch(0)))  # only the graph holds the batch
        job.backward(loss, LOSS_SCALE if self._work.dtype == "float16" else 1.0)
        job.model.zero_grad()

    def _synchronize(self) -> None:
        if self._work.on_cuda:
            torch.cuda.synchronize(self._work.device)


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return ``||found - expected|| / ||expected||`` over all tensors in float64; 0.0 only where they are equal."""
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True))
    norm = sum(float(b.double().square().sum()) for b in expected)
    if off == 0:
        return 0.0
    return math.sqrt(off / norm) if norm else math.inf
