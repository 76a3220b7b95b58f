"""What a plan may use."""

from __future__ import annotations

from dataclasses import dataclass

from actstore.errors import ConfigError
from actstore.units import parse_budget


@dataclass(frozen=True)
class Wish:
    """What the user grants: bytes on the device, in host memory and on disk (None: as much as there is; 0: nothing),
    and the relative error of payloads."""

    device: int
    host: int | None
    disk: int | None
    max_error: float

    @classmethod
    def read(
        cls, budget: int | str, max_error: float, host_budget: int | str | None, disk_budget: int | str | None
    ) -> Wish:
        """From what users write.

        Raises
        ------
        ConfigError : a budget does not parse, or `max_error` is no relative error
        """
        if not 0 <= max_error < 1:
            raise ConfigError(
                f"max_error={max_error} is not a relative error; give 0 or more and less than 1, such as 0.01"
            )
        return cls(
            parse_budget(budget, "budget"),
            None if host_budget is None else parse_budget(host_budget, "host_budget"),
            0 if disk_budget is None else parse_budget(disk_budget, "disk_budget"),
            max_error,
        )
