"""Limits that a plan may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wish:
    """The limits that the user grants.

    Attributes
    ----------
    device : most bytes on the compute device
    host, disk : most bytes in host memory and on disk; None for as much as there is, 0 for nothing
    max_noise : variance that payloads may add to the gradients, as a fraction of that from batch to batch
    """

    device: int
    host: int | None
    disk: int | None
    max_noise: float
