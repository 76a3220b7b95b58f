"""Reports at the end of training, of this process and of all of the job."""

from __future__ import annotations

from logging import Logger

import torch.distributed as dist

from actstore.session.activation_store import ActivationStore
from actstore.session.job_report import JobReport


def log_reports(store: ActivationStore, logger: Logger) -> JobReport | None:
    """Log the report of `store`, and on rank 0 the one of all ranks, which it returns; None on the other ranks.

    All ranks of a job with more than one call it. A process alone has no report of all ranks.
    """
    logger.info("activations in the last step:\n%s", store.report())
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    job = store.job_report()
    if job is not None:
        logger.info("activations of all ranks in the last step:\n%s", job)
    return job
