"""High-water of memory: of this process, and of the GPU."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from actstore.devices import cpu_memory
from actstore.session.process import status_bytes

_CLEAR = Path("/proc/self/clear_refs")


def rss_bytes() -> int:
    """Resident memory of this process now; its high-water so far where the system does not tell."""
    now = status_bytes().get("VmRSS")
    return peak_rss_bytes() if now is None else now


def peak_rss_bytes() -> int:
    """The high-water of the resident memory of this process."""
    peak = status_bytes().get("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


class PeakMeter:
    """The high-water since `reset`.

    Attributes
    ----------
    since_reset : False where the system refused to forget the high-water of the process, which then includes what
        came before `reset`
    """

    def __init__(self, device: str) -> None:
        self._cuda = torch.device(device) if torch.device(device).type == "cuda" else None
        self.since_reset = False
        if self._cuda is None:
            cpu_memory.count()

    def reset(self) -> None:
        """Forget the high-water so far."""
        try:
            _CLEAR.write_text("5")  # proc(5): sets VmHWM to the resident memory of now
            self.since_reset = True
        except OSError:
            self.since_reset = False
        cpu_memory.reset_peak()
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)

    def now_bytes(self) -> int:
        """On a GPU what its allocator has given out; on the CPU the resident memory of the process."""
        return rss_bytes() if self._cuda is None else torch.cuda.memory_allocated(self._cuda)

    def peak_bytes(self) -> int:
        """The high-water of `now_bytes`."""
        return peak_rss_bytes() if self._cuda is None else torch.cuda.max_memory_allocated(self._cuda)

    def allocated_peak_bytes(self) -> int | None:
        """The high-water of what the allocator has given to tensors; None on a CPU where it cannot be counted."""
        return cpu_memory.max_memory_allocated() if self._cuda is None else self.peak_bytes()

    def host_peak_bytes(self) -> int:
        """The high-water of the process, whatever the device."""
        return peak_rss_bytes()
