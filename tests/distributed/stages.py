"""The jobs of pipeline stages that plan by themselves, each for the micro-batches that it holds in flight."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from actstore import ActivationStore, Auto
from actstore.devices import cpu_memory
from tests.distributed.agreeing import MOST, Layer, of_all
from tests.distributed.training import WIDTH

SHARE = 0.55  # of what the fullest stage holds without a policy
EXCESS = 0.02  # the share by which a first plan may exceed the budget: the store makes another one then
AFTER = 4  # steps of a plan that keep the budget one after the other
DEPTH = 3  # of a stage

Step = Callable[[AbstractContextManager[object]], None]


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = 1.0 * x  # as an embedding: micro-batches do not share the storage of the batch
        for block in self.blocks:
            x = block(x)
        return x


def build(schedule: type) -> tuple[nn.Module, Step]:
    """The blocks of this rank's stages, each a unit of a plan, and a step of all stages."""
    world, rank = dist.get_world_size(), dist.get_rank()
    chunks = 1 if schedule in (ScheduleGPipe, Schedule1F1B) else 2
    count = world * chunks
    torch.manual_seed(0)
    stages = [Stage() for _ in range(count)]
    mine = (rank, count - 1 - rank) if schedule is ScheduleZBVZeroBubble else range(rank, count, world)
    model = nn.ModuleDict({"blocks": nn.ModuleList(block for i in mine for block in stages[i].blocks)})
    parts = [PipelineStage(stages[i], i, count, torch.device("cpu")) for i in mine]
    runner = schedule(
        parts if chunks > 1 else parts[0], n_microbatches=2 * world, loss_fn=lambda y, _: y.square().mean()
    )
    x = torch.randn(2 * world * 16, 32, WIDTH)

    def step(context: AbstractContextManager[object]) -> None:
        with context:
            first = (x,) if rank == 0 else ()
            if count - 1 in mine:
                runner.step(*first, target=x, losses=[])
            else:
                runner.step(*first)
        model.zero_grad()

    return model, step


def peaks(step: Step, store: ActivationStore) -> tuple[int, int]:
    """The most bytes of a step, by the store's count and by the allocator's."""
    gc.collect()
    assert cpu_memory.count()
    before = cpu_memory.memory_allocated()
    cpu_memory.reset_peak()
    step(store)
    return store.report().peak_held_bytes, (cpu_memory.max_memory_allocated() or 0) - (before or 0)


def check(schedule: type, *, falling: bool = True, split: bool = False) -> None:
    """Each stage keeps the same budget by a plan of its own; the first one holds most, and so keeps the least.

    Parameters
    ----------
    falling : earlier stages have more micro-batches in flight
    split : gradients of weights come later than those of inputs, and what is recomputed for them waits uncounted
    """
    warnings.filterwarnings("ignore", "step 1: .* elements lost", RuntimeWarning)  # as in `jobs.check_pipeline`
    model, step = build(schedule)
    store = ActivationStore(model, "keep", min_bytes=0)
    step(store)
    plain, allocated = peaks(step, store)
    store.close()
    budget = int(SHARE * max(map(int, of_all(plain))))  # type: ignore[call-overload]
    store = ActivationStore(model, Auto(budget), min_bytes=0)
    ratios: list[float] = []  # of the bytes of each step with a plan and the budget
    for _ in range(MOST):
        step(store)
        if store.plan is not None:
            ratios.append(store.report().peak_held_bytes / budget)
        if all(of_all(len(ratios) > AFTER and max(ratios[-AFTER:]) <= 1)):
            break
    assert store.plan is not None
    assert max(ratios) <= 1 + EXCESS, (ratios, store.plan.history)
    peak, found = peaks(step, store)
    beside = allocated - plain  # gradients of activations, messages, the loss
    assert peak <= budget
    assert split or found - beside <= budget, (found, beside, budget)
    rows = store.plan.rows
    shares = of_all(sum(row.held for row in rows) / sum(row.saved for row in rows))
    if falling:
        assert shares[0] < shares[-1], shares  # type: ignore[operator]
        assert all(row.decision == "keep" for row in rows) == (plain <= budget), store.plan
    store.close()


def gpipe() -> None:
    check(ScheduleGPipe, falling=False)


def one_forward_one_backward() -> None:
    check(Schedule1F1B)


def interleaved() -> None:
    check(ScheduleInterleaved1F1B)


def zero_bubble() -> None:
    check(ScheduleInterleavedZeroBubble, falling=False, split=True)


def zero_bubble_v() -> None:
    check(ScheduleZBVZeroBubble, falling=False, split=True)
