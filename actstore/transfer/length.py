"""The length of a payload of variable size, which only the device knows."""

from __future__ import annotations

from typing import Any

import torch

from actstore.kernels.base import LENGTH_NBYTES


class Length:
    """The promise of the length at the beginning of a payload: copied to the host in the order of the current stream.

    Attributes
    ----------
    stream : the stream on which the payload is made
    """

    def __init__(self, payload: torch.Tensor) -> None:
        self.stream: Any = torch.accelerator.current_stream(payload.device)
        self._copy = torch.empty(LENGTH_NBYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._copy.copy_(payload[:LENGTH_NBYTES], non_blocking=True)
        self._event: Any = torch.Event(payload.device)
        self._event.record(self.stream)

    def ready(self) -> bool:
        """Whether `nbytes` is known, without waiting."""
        return bool(self._event.query())

    @property
    def nbytes(self) -> int:
        return int(self._copy.view(torch.int64)[0])
