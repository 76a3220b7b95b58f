"""Scalars on their way from devices to the host."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor

from actstore.base.ticket import DONE, EventTicket, Ticket


class Scalars:
    """Scalars of any devices, added as they are computed, on any thread. The host waits in `read` and `named` only."""

    def __init__(self) -> None:
        self._numbers = count()
        self._here: dict[int, Tensor] = {}
        self._sent: list[tuple[list[int], Tensor, Ticket]] = []
        self._names: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._here) + sum(len(numbers) for numbers, _, _ in self._sent)

    def put(self, scalar: Tensor, name: int | None = None) -> int:
        """Add a scalar, and return its number: 0, 1 and so on."""
        number = next(self._numbers)
        self._here[number] = scalar
        if name is not None:
            self._names[number] = name
        return number

    def named(self) -> dict[int, float]:
        """Return the scalars that have names, by name. The host waits for the device."""
        found = self.read()
        return {name: found[number] for number, name in self._names.items()}

    def send(self) -> None:
        """Copy the scalars so far to the host, in one copy for each device, and release their device memory."""
        devices: dict[torch.device, dict[int, Tensor]] = {}
        for number, scalar in self._here.copy().items():
            devices.setdefault(scalar.device, {})[number] = scalar
        for device, scalars in devices.items():
            copied = torch.stack([scalar.float() for scalar in scalars.values()]).to("cpu", non_blocking=True)
            self._sent.append((list(scalars), copied, _complete(device)))
            for number in scalars:  # last, as an interrupt (Ctrl-C) may come before
                self._here.pop(number, None)

    def ready(self) -> bool:
        """Return whether all scalars are on the host, without waiting."""
        return not self._here and all(ticket.ready() for _, _, ticket in self._sent)

    def read(self) -> dict[int, float]:
        """Return all scalars by number. The host waits for the device."""
        self.send()
        found: dict[int, float] = {}
        for numbers, copied, ticket in self._sent:
            ticket.result()
            found.update(zip(numbers, copied.tolist(), strict=True))
        return found


def _complete(device: torch.device) -> Ticket:
    """Return a ticket that completes with all work queued on the current stream of a device."""
    if device.type == "cpu":
        return DONE
    event: Any = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return EventTicket(event)
