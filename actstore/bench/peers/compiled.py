"""torch.compile, alone and with an activation memory budget."""

from __future__ import annotations

import torch._functorch.config

from actstore.bench.peers.base import Wrap
from actstore.bench.workloads.job import Job

MEMORY_BUDGET = 0.5  # fraction of the bytes that the compiled graph saves when it recomputes only what it fuses


class Compiled(Wrap):
    """Model compiled whole by Inductor."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        job.model.compile()


class CompiledBudget(Compiled):
    """Model compiled whole by Inductor, with `activation_memory_budget`."""

    def __init__(self, job: Job) -> None:
        torch._functorch.config.activation_memory_budget = MEMORY_BUDGET
        super().__init__(job)
