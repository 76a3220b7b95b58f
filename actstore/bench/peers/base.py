"""Base of all rows: a job with a forward of its own."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from actstore.bench.workloads.job import Job
from actstore.errors import ActstoreError


class NotApplicable(ActstoreError, RuntimeError):
    """A row that does not apply to this model; the message is the reason, and the row is left out."""


class Wrap:
    """A job as one row trains it; this base class trains plainly. One wrap serves any number of steps.

    Attributes
    ----------
    settled : False while the row still measures and plans; those steps are not timed and do not train
    """

    settled = True

    def __init__(self, job: Job) -> None:
        self.job = job

    def forward(self, *batch: Tensor) -> Tensor:
        """Return the loss, ready for the job's backward."""
        return self.job.loss(*batch)

    def figures(self) -> dict[str, int]:
        """Return figures of the last step that only the row has: fields of RowResult."""
        return {}

    def close(self) -> None:
        """Free what the wrap holds beside the model; most wraps hold nothing."""


class Around(Wrap):
    """A context around forward, such as a pair of saved-tensor hooks."""

    @abstractmethod
    def context(self) -> AbstractContextManager[Any]:
        """Return the context of one forward."""

    def forward(self, *batch: Tensor) -> Tensor:
        with self.context():
            return self.job.loss(*batch)
