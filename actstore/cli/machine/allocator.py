"""The allocator of CPU tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass

from actstore.devices import cpu_memory
from actstore.errors import ConfigError


@dataclass(frozen=True)
class Allocator:
    """Allocator that a store on a CPU gives PyTorch, with the reason where it is not the one `asked` for."""

    asked: str
    choice: str
    reason: str
    library: str | None
    compiler: str | None

    @property
    def is_broken(self) -> bool:
        """True where the choice is unknown, or pages were asked for, could be compiled or loaded, and do not work."""
        can = self.library is not None or self.compiler is not None
        return self.choice == "unknown" or (self.asked == "pages" and self.choice == "threshold" and can)


def allocator() -> Allocator:
    """Give PyTorch the allocator, which may compile it, and return the outcome."""
    asked = os.environ.get(cpu_memory.VARIABLE) or "pages"
    choice: str = "unknown"
    try:
        choice, reason = cpu_memory.install()
    except ConfigError as error:
        reason = str(error)
    library, compiler = cpu_memory.library_file(), cpu_memory.compiler()
    return Allocator(
        asked,
        choice,
        reason,
        None if library is None else str(library),
        None if compiler is None else " ".join(compiler),
    )
