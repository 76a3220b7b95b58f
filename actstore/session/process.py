"""Memory of the process: what the system counts, and what of it is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.nn import Module

from actstore.base.layout import nbytes_of
from actstore.base.units import format_nbytes
from actstore.devices import cpu_memory

STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of the process at the time of a report, for a store on a CPU.

    Attributes
    ----------
    peak_bytes : high-water of resident memory since the process began (VmHWM of proc(5))
    resident_bytes : resident memory now; it is the sum of those that follow
    activations_bytes : held by the store now
    weights_bytes, gradients_bytes : of the model's parameters and buffers
    freed_bytes : freed and not returned to the system: idle pages of actstore's allocator, free blocks of the C heap
    other_bytes : all else: optimizer states, Python, libraries, compiled kernels, data
    allocator : of CPU tensors: ``pages``, ``threshold`` or ``system``, and why
    """

    peak_bytes: int
    resident_bytes: int
    activations_bytes: int
    weights_bytes: int
    gradients_bytes: int
    freed_bytes: int
    other_bytes: int
    allocator: str

    @classmethod
    def now(cls, model: Module | None, activations_bytes: int) -> ProcessMemory | None:
        """The figures; None where the system does not tell them."""
        status = status_bytes()
        peak, resident = status.get("VmHWM"), status.get("VmRSS")
        if peak is None or resident is None:
            return None
        parameters = [] if model is None else list(model.parameters())
        weights = _nbytes([*parameters, *([] if model is None else model.buffers())])
        gradients = _nbytes(parameter.grad for parameter in parameters if parameter.grad is not None)
        freed = cpu_memory.idle_bytes() + cpu_memory.heap()[1]
        known = activations_bytes + weights + gradients + freed
        return cls(
            peak, resident, activations_bytes, weights, gradients, freed, max(0, resident - known),
            str(cpu_memory.status() or "system"),
        )  # fmt: skip

    def __str__(self) -> str:
        """One line, such as ``process: peak 1.1 GiB; now 900 MiB: activations 0 B, weights 20 MiB, ...``."""
        parts = {
            "activations": self.activations_bytes,
            "weights": self.weights_bytes,
            "gradients": self.gradients_bytes,
            "freed but not returned": self.freed_bytes,
            "optimizer, Python, libraries and kernels": self.other_bytes,
        }
        known = ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in parts.items() if nbytes)
        return f"process: peak {format_nbytes(self.peak_bytes)}; now {format_nbytes(self.resident_bytes)}: {known}"


def status_bytes() -> dict[str, int]:
    """Return the sizes of /proc/self/status in bytes, by name; none where the system has no such file."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return {}
    found = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in found}


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(nbytes_of(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())
