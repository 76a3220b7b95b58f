"""All facts about this machine, and what follows from them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actstore._version import __version__
from actstore.cli.machine.disk import Disk, disk
from actstore.cli.machine.kernels import Cuda, Kernels, cuda, kernels
from actstore.cli.machine.memory import Allocator, Memory, allocator, memory
from actstore.cli.machine.packages import Missing, Package, cuda_major, missing, packages

FORMAT = "actstore doctor 1"


@dataclass(frozen=True)
class Machine:
    """Facts about this machine. `missing` are features that a command installs; `broken` are those that do not work."""

    python: str
    packages: Mapping[str, Package]
    kernels: tuple[Kernels, ...]
    allocator: Allocator
    disk: Disk
    memory: Memory
    cuda: Cuda

    @property
    def missing(self) -> list[Missing]:
        """Features that lack a package or a compiler."""
        found = missing(self.packages, cuda_major() if self.cuda.devices else None)
        if self.allocator.library is None and self.allocator.compiler is None and self.allocator.asked == "pages":
            found.append(Missing("allocator of CPU tensors", "apt install g++"))
        return found

    @property
    def broken(self) -> list[str]:
        """Sentences, one for each thing that is installed and does not work."""
        found = [
            f"{package.name} is installed, but its import fails: {package.error}"
            for package in self.packages.values()
            if package.state == "broken"
        ]
        found += [each.error for each in self.kernels if each.error]
        if self.allocator.is_broken:
            found.append(f"The allocator of CPU tensors does not work: {self.allocator.reason}")
        if self.disk.error:
            found.append(self.disk.error)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return all facts under the names of their attributes, as JSON has them."""
        versions = {"actstore": __version__, **asdict(self)}
        return {"format": FORMAT, **versions, "missing": [asdict(each) for each in self.missing], "broken": self.broken}


def machine(folder: Path | None = None) -> Machine:
    """Look at this machine; `folder` is that of the disk tier, by default the system's temporary one."""
    found = packages()
    return Machine(
        python=platform.python_version(),
        packages=found,
        kernels=tuple(kernels(found)),
        allocator=allocator(),
        disk=disk(folder),
        memory=memory(),
        cuda=cuda(),
    )
