"""High-water marks of memory: of this process, and of the GPU."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from actstore.devices import cpu_memory
from actstore.session.process import status_bytes

_CLEAR_REFS = Path("/proc/self/clear_refs")


def rss_bytes() -> int:
    """Return the resident memory of this process; its high-water mark where the system does not tell."""
    now = status_bytes().get("VmRSS")
    return peak_rss_bytes() if now is None else now


def peak_rss_bytes() -> int:
    """Return the high-water mark of this process's resident memory."""
    peak = status_bytes().get("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


class PeakMeter:
    """High-water mark since `reset`.

    Attributes
    ----------
    since_reset : False where the system refused to reset the high-water mark of the process, which then includes
        what came before `reset`
    """

    def __init__(self, device: str) -> None:
        self._cuda = torch.device(device) if torch.device(device).type == "cuda" else None
        self.since_reset = False
        if self._cuda is None:
            cpu_memory.count()

    def reset(self) -> None:
        """Reset the high-water mark."""
        try:
            _CLEAR_REFS.write_text("5")  # proc(5): resets VmHWM to the current resident memory
            self.since_reset = True
        except OSError:
            self.since_reset = False
        cpu_memory.reset_peak()
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)

    def now_bytes(self) -> int:
        """Return the bytes that the GPU's allocator has given out; on the CPU the resident memory of the process."""
        return rss_bytes() if self._cuda is None else torch.cuda.memory_allocated(self._cuda)

    def peak_bytes(self) -> int:
        """Return the high-water mark of `now_bytes`."""
        return peak_rss_bytes() if self._cuda is None else torch.cuda.max_memory_allocated(self._cuda)

    def allocated_peak_bytes(self) -> int | None:
        """Return the high-water mark of allocated tensor memory; None on a CPU that cannot count it."""
        return cpu_memory.max_memory_allocated() if self._cuda is None else self.peak_bytes()

    def host_peak_bytes(self) -> int:
        """Return the high-water mark of the process, on any device."""
        return peak_rss_bytes()
