"""Figures of a report for a logger: one number for each name."""

from __future__ import annotations

import json
from math import isfinite
from os import PathLike
from typing import Any

from actstore.session.report import Report


def figures(report: Report) -> dict[str, float]:
    """Return the totals of `report` by the names that loggers show, sizes in MiB and times in ms.

    ``actstore/saved_MiB``, ``stored_MiB``, ``held_MiB`` and ``peak_MiB`` always; for tiers that have been in use their
    high-water (``actstore/host_MiB``), and then also ``actstore/offload_ms``, ``fetch_ms``, ``stall_ms``, ``late`` and
    ``misses``. Where payloads are lossy and were measured, ``actstore/error_max``, the largest relative error of a
    site, ``error_mean``, weighted by bytes, and ``error_lost``, in elements: all of the last step that was sampled, and
    not there while NaN or Inf; ``gradient_error``, which is predicted, and ``gradient_noise`` from batch to batch, both
    relative to the norm of the gradients. What they mean: `Report` and `ErrorFigures`.
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
    errors = [site.error for site in report.lossy if site.error is not None]
    if errors:
        mean = sum(error.relative * error.nbytes for error in errors) / max(1, sum(error.nbytes for error in errors))
        for name, value in {"max": errors[0].relative, "mean": mean, "lost": sum(e.lost for e in errors)}.items():
            if isfinite(value):
                found[f"actstore/error_{name}"] = value
    if report.gradients is not None and len(report.gradients.missing) < len(report.gradients.sites):
        found["actstore/gradient_error"] = report.gradients.variance**0.5
        if report.gradients.noise is not None:
            found["actstore/gradient_noise"] = report.gradients.noise**0.5
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
