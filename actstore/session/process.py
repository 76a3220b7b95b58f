"""Memory of the process: the system's figures, and the known parts of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from actstore.base.layout import nbytes_of
from actstore.base.units import format_nbytes
from actstore.devices import cpu_memory
from actstore.rerun.optimizers import SteppedOptimizers, live_optimizers, serving

STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of the process at the time of a report, for a store on a CPU.

    Attributes
    ----------
    peak_bytes : peak of resident memory since the process began (VmHWM of proc(5))
    resident_bytes : resident memory now; the sum of the fields below
    activations_bytes : bytes that the store holds now
    weights_bytes, gradients_bytes : of the model's parameters and buffers
    optimizer_bytes : states of the optimizers that have the model's parameters
    freed_bytes : freed and not returned to the system: idle pages of actstore's allocator, free blocks of the C heap
    other_bytes : the rest: Python, libraries, compiled kernels, data
    allocator : the allocator of CPU tensors: ``pages``, ``threshold`` or ``system``, and the reason
    """

    peak_bytes: int
    resident_bytes: int
    activations_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    freed_bytes: int
    other_bytes: int
    allocator: str

    @classmethod
    def now(
        cls, model: Module | None, activations_bytes: int, optimizers: Iterable[Optimizer] = ()
    ) -> ProcessMemory | None:
        """Return the figures; None where the system does not provide them."""
        status = status_bytes()
        peak, resident = status.get("VmHWM"), status.get("VmRSS")
        if peak is None or resident is None:
            return None
        parameters = [] if model is None else list(model.parameters())
        weights = _nbytes([*parameters, *([] if model is None else model.buffers())])
        gradients = _nbytes(parameter.grad for parameter in parameters if parameter.grad is not None)
        states = (tree_leaves(list(optimizer.state.values())) for optimizer in optimizers)
        remembered = _nbytes(leaf for leaves in states for leaf in leaves if isinstance(leaf, Tensor))
        freed = cpu_memory.idle_bytes() + cpu_memory.heap()[1]
        known = activations_bytes + weights + gradients + remembered + freed
        return cls(
            peak, resident, activations_bytes, weights, gradients, remembered, freed, max(0, resident - known),
            str(cpu_memory.status() or "system"),
        )  # fmt: skip

    def __str__(self) -> str:
        """Return one line, such as ``process: peak 1.1 GiB; now 900 MiB: activations 0 B, weights 20 MiB, ...``."""
        parts = {
            "activations": self.activations_bytes,
            "weights": self.weights_bytes,
            "gradients": self.gradients_bytes,
            "optimizer": self.optimizer_bytes,
            "freed but not returned": self.freed_bytes,
            "Python, libraries and kernels": self.other_bytes,
        }
        known = ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in parts.items() if nbytes)
        return f"process: peak {format_nbytes(self.peak_bytes)}; now {format_nbytes(self.resident_bytes)}: {known}"


class Optimizers:
    """The optimizers of a model, found among all objects of the process.

    The search takes some 50 ms. It runs where parameters have changed and no optimizer is known. After a search without
    result, the next one runs only when they have changed twice as often. `gc.freeze` hides objects from it, and to ask
    whether it did takes as long as a search. So from `watch` on an optimizer is known by its next step, too.
    """

    def __init__(self, model: Module) -> None:
        self._model = model
        self._known = WeakSet[Optimizer]()
        self._version = self._versions()
        self._changes, self._search_at = 0, 1
        self._stepped: SteppedOptimizers | None = None

    def find(self) -> list[Optimizer]:
        """Return the optimizers that have a parameter of the model."""
        found = self.known()
        if found and self._stepped is not None:
            self._stepped.close()
            self._stepped = None
        version = self._versions()
        if found or version == self._version:
            return found
        self._version = version
        self._changes += 1
        if self._changes < self._search_at:
            return []
        self._search_at *= 2
        found = serving(self._model, live_optimizers())
        self._known.update(found)
        self.watch()
        return found

    def watch(self) -> None:
        """Let steps of optimizers tell about them from now on, where none is known."""
        if not self._known and self._stepped is None:
            self._stepped = SteppedOptimizers(self._model, self._known)

    def known(self) -> list[Optimizer]:
        """Return those that are known without a search."""
        return serving(self._model, self._known)

    def _versions(self) -> int:
        return sum(
            p._version
            for p in self._model.parameters()
            if not isinstance(p, UninitializedParameter) and not p.is_inference()
        )


def status_bytes() -> dict[str, int]:
    """Return the sizes of /proc/self/status in bytes, by name; empty where the system has no such file."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return {}
    found = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in found}


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(nbytes_of(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())
