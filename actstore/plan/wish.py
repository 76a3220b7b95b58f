"""The user's limits for a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wish:
    """Limits that the user grants.

    Attributes
    ----------
    device : most bytes on the compute device
    host, disk : most bytes in host memory and on disk; None for all that exist, 0 for none
    max_noise : variance that payloads may add to the gradients, as a fraction of that from batch to batch
    """

    device: int
    host: int | None
    disk: int | None
    max_noise: float
