"""torch.compile, alone and with its budget for activations."""

from __future__ import annotations

import torch._functorch.config

from actstore.bench.peers.base import Wrap
from actstore.bench.workloads.job import Job

BUDGET = 0.5  # of what the compiled graph saves when it recomputes nothing but what it fuses


class Compiled(Wrap):
    """The whole model compiled by Inductor."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        job.model.compile()


class CompiledBudget(Compiled):
    """The same, with `activation_memory_budget`."""

    def __init__(self, job: Job) -> None:
        torch._functorch.config.activation_memory_budget = BUDGET
        super().__init__(job)
