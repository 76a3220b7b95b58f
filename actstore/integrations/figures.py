"""The figures of a report as a logger takes them: one number for each name."""

from __future__ import annotations

import json
from os import PathLike
from typing import Any

from actstore.report import Report


def figures(report: Report) -> dict[str, float]:
    """The totals of `report` by the names that loggers show, sizes in MiB and times in ms.

    ``actstore/saved_MiB``, ``stored_MiB``, ``held_MiB`` and ``peak_MiB`` always; for tiers that have been in use their
    high-water (``actstore/host_MiB``), and then also ``actstore/offload_ms``, ``fetch_ms``, ``stall_ms``, ``late`` and
    ``misses``. What they mean: `Report`.
    """
    sizes = {
        "saved": report.saved_bytes,
        "stored": report.stored_bytes,
        "held": report.held_bytes,
        "peak": report.peak_held_bytes,
        **{medium.tier: medium.peak_bytes for medium in report.media},
    }
    found: dict[str, float] = {f"actstore/{name}_MiB": nbytes / 2**20 for name, nbytes in sizes.items()}
    if report.media:
        for name in ("offload_ms", "fetch_ms", "stall_ms", "late", "misses"):
            found[f"actstore/{name}"] = getattr(report, name)
    return found


def to_tensorboard(writer: Any, report: Report, step: int) -> None:
    """Write the figures of `report` as scalars of a step.

    Parameters
    ----------
    writer : torch.utils.tensorboard.SummaryWriter, or anything with its ``add_scalar(name, value, step)``
    """
    for name, value in figures(report).items():
        writer.add_scalar(name, value, step)


def to_jsonl(path: str | PathLike[str], report: Report, step: int) -> None:
    """Append the figures of `report` to a file, as one line of JSON that begins with ``{"step": ...``."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **figures(report)}) + "\n")
