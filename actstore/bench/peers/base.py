"""What every row is to the trainer: a job whose forward runs in a way of its own."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from actstore.bench.workloads.job import Job
from actstore.errors import ActstoreError


class NotApplicable(ActstoreError, RuntimeError):
    """The row has no meaning for this model; the message says why, and the row is left out."""


class Wrap:
    """A job as one row trains it; this one is plain. Build it once, then run any number of steps through it.

    Attributes
    ----------
    settled : False while its steps are still used to measure and plan; these are neither timed nor train
    """

    settled = True

    def __init__(self, job: Job) -> None:
        self.job = job

    def forward(self, *batch: Tensor) -> Tensor:
        """The loss, ready for backward of the job."""
        return self.job.loss(*batch)

    def figures(self) -> dict[str, int]:
        """What only the row itself knows of its last step: fields of RowResult."""
        return {}

    def close(self) -> None:
        """Give back what the wrap holds beside the model; most hold nothing."""


class Around(Wrap):
    """A context around forward, such as a pair of saved-tensor hooks."""

    @abstractmethod
    def context(self) -> AbstractContextManager[Any]:
        """For one forward."""

    def forward(self, *batch: Tensor) -> Tensor:
        with self.context():
            return self.job.loss(*batch)
