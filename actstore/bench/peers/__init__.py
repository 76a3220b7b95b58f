"""Rows at work: peers as their own documentation shows them, and actstore through ActivationStore."""

from __future__ import annotations

from actstore.bench.peers.base import NotApplicable, Wrap
from actstore.bench.peers.rows import Row
from actstore.bench.workloads.job import Job

__all__ = ["NotApplicable", "Wrap", "wrap"]


def wrap(row: Row, job: Job, disk_path: str | None) -> Wrap:
    """Return the job with its model wrapped for `row`.

    Raises
    ------
    NotApplicable : the row does not apply to this model
    """
    if row.kind == "plain":
        return Wrap(job)
    if row.kind == "ours":
        from actstore.bench.peers import ours

        if row.share:
            return ours.Planned(job, row.share, bool(row.compiled))
        if row.compiled == "graph":
            return ours.CompiledGraph(job, row.policy, disk_path)
        if row.compiled:
            return ours.CompiledBlocks(job, row.policy, disk_path, row.compiled)
        return ours.Ours(job, row.policy, disk_path)
    from actstore.bench.peers import libraries

    kind: type[Wrap] = getattr(libraries, row.made_by)
    return kind(job)
