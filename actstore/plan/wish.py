"""What a plan may use."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from actstore.base.units import parse_budget
from actstore.errors import ConfigError


@dataclass(frozen=True)
class Wish:
    """What the user grants: bytes on the device, in host memory and on disk (None: as much as there is; 0: nothing),
    and the variance that payloads may add to the gradients, as a fraction of that from batch to batch."""

    device: int
    host: int | None
    disk: int | None
    max_noise: float

    @classmethod
    def read(
        cls, budget: int | str, max_noise: float, host_budget: int | str | None, disk_budget: int | str | None
    ) -> Wish:
        """From what users write.

        Raises
        ------
        ConfigError : a budget does not parse, or `max_noise` is no such fraction
        """
        check_noise(max_noise)
        return cls(
            parse_budget(budget, "budget"),
            None if host_budget is None else parse_budget(host_budget, "host_budget"),
            0 if disk_budget is None else parse_budget(disk_budget, "disk_budget"),
            max_noise,
        )


def check_noise(max_noise: float) -> None:
    """Refuse what is no fraction of the noise of gradients from batch to batch.

    Raises
    ------
    ConfigError : it is not
    """
    if type(max_noise) not in (int, float) or not 0 <= max_noise < inf:
        raise ConfigError(
            f"max_noise={max_noise!r} is no fraction of the noise of gradients from batch to batch; give 0 for exact "
            "gradients, or a number such as 0.1"
        )
