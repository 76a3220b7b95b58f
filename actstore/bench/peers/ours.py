"""ActivationStore as a row: with a policy, under a budget, around compiled blocks."""

from __future__ import annotations

from torch import Tensor, nn

from actstore import ActivationStore, Auto, Disk
from actstore.base.units import format_nbytes
from actstore.bench.peers.base import NotApplicable, Wrap
from actstore.bench.peers.census import Census
from actstore.bench.workloads.job import Job
from actstore.errors import CapacityError

SETTLED_STEPS = 6  # with a plan before the timing starts: the store may notice a wrong plan and plan again


class Stored(Wrap):
    """A job with an ActivationStore; None before it is made."""

    store: ActivationStore | None = None

    def figures(self) -> dict[str, int]:
        assert self.store is not None
        report = self.store.report()
        return {"peak_held_bytes": report.peak_held_bytes, "stored_bytes": report.stored_bytes}

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


class Ours(Stored):
    """ActivationStore with the policy of the row."""

    store: ActivationStore

    def __init__(self, job: Job, policy: str, disk_path: str | None) -> None:
        super().__init__(job)
        self.store = ActivationStore(job.model, policy, tiers=[Disk(disk_path)], min_bytes=job.min_bytes)

    def forward(self, *batch: Tensor) -> Tensor:
        with self.store:
            return self.job.loss(*batch)


class Planned(Stored):
    """ActivationStore with a plan, under a share of the bytes that plain autograd holds, counted in the first step.

    With `compiled` the plan is one for the graph of the model, which is compiled whole: its budget bounds the peak.
    """

    def __init__(self, job: Job, share: float, compiled: bool = False) -> None:
        super().__init__(job)
        self.share, self.compiled = share, compiled
        self.settled, self._planned_steps = False, 0

    def forward(self, *batch: Tensor) -> Tensor:
        if self.store is None:
            census = Census(self.job.model, self.job.work.device_type)
            with census.plain():
                loss = self.job.loss(*batch)
            budget = int(self.share * census.saved_bytes)
            self.store = ActivationStore(self.job.model, Auto(budget), min_bytes=self.job.min_bytes)
            if self.compiled:
                self.store.compile()
            return loss
        self._planned_steps += (self.store.graph_plan if self.compiled else self.store.plan) is not None
        self.settled = self._planned_steps >= SETTLED_STEPS
        try:
            with self.store:
                return self.job.loss(*batch)
        except CapacityError as error:
            least = error.facts.get("least")
            if least is None:
                raise
            raise NotApplicable(f"the least budget that is possible here is {format_nbytes(least)}") from error


class CompiledGraph(Ours):
    """ActivationStore with the policy in the graphs of the model, which is compiled whole."""

    def __init__(self, job: Job, policy: str, disk_path: str | None) -> None:
        super().__init__(job, policy, disk_path)
        self.store.compile()


class CompiledBlocks(Ours):
    """ActivationStore around compiled blocks, or their parts: a recomputed module is not compiled itself."""

    def __init__(self, job: Job, policy: str, disk_path: str | None, what: str) -> None:
        if not job.blocks:
            raise NotApplicable("the model has no repeated blocks that are known")
        for block in job.blocks:
            for module in [block] if what == "blocks" else _parts(block):
                module.compile()
        super().__init__(job, policy, disk_path)


def _parts(block: nn.Module) -> list[nn.Module]:
    """Return the children that have children of their own."""
    parts = [child for child in block.children() if any(True for _ in child.children())]
    if not parts:
        raise NotApplicable("the blocks have no parts worth compiling")
    return parts
