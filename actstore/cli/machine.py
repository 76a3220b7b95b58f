"""All facts about this machine, and what follows from them: disk, memory, packages, kernels, CUDA."""

from __future__ import annotations

import os
import platform
import re
import resource
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from actstore._version import __version__
from actstore.base.ticket import Ticket
from actstore.codecs import registry
from actstore.codecs.dispatch import KernelCodec
from actstore.devices import Accelerator, Cpu, cpu_memory
from actstore.devices.host_memory import cgroup_limit, machine_bytes
from actstore.errors import ActstoreError, ConfigError, KernelUnavailable
from actstore.tiers import Slot
from actstore.tiers.disk import DiskTier
from actstore.tiers.file import NamelessFile, file_system, is_memory

FORMAT = "actstore doctor 1"
PINNED_NBYTES = 1 << 30
DRIVER = Path("/proc/driver/nvidia/version")
PAYLOAD_NBYTES = 8 << 20
PAYLOAD_COUNT = 32  # 256 MiB
MAX_IN_FLIGHT = 8
PASS_LIMIT_S = 0.8  # limit of each of three passes; a slow disk moves fewer payloads


@dataclass(frozen=True)
class Disk:
    """A folder as the disk tier sees it. Sizes in bytes, speeds in bytes per second; None where nothing was measured.

    `is_direct` says whether bytes bypass the page cache; `error` is the reason why the folder cannot hold the tier.
    """

    folder: str
    file_system: str
    in_memory: bool
    free_bytes: int | None = None
    is_direct: bool | None = None
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    error: str = ""


def disk(folder: Path | None) -> Disk:
    """Write and read payloads with the disk tier in `folder`, by default the system's temporary one."""
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    kind = file_system(folder)
    in_memory = is_memory(kind)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning of a folder in memory
            write, read = _speeds(folder)
        free = os.statvfs(folder)
        nbytes, is_direct = free.f_bavail * free.f_frsize, NamelessFile(folder).direct
    except (OSError, ActstoreError) as error:
        return Disk(str(folder), kind, in_memory, error=str(error))
    return Disk(str(folder), kind, in_memory, nbytes, is_direct, write, read)


def _speeds(folder: Path) -> tuple[float | None, float | None]:
    """Return bytes per second of writes and reads, in a part of the file that was written before."""
    cpu = Cpu(torch.device("cpu"))
    source, target = (cpu.empty(MAX_IN_FLIGHT * PAYLOAD_NBYTES).split(PAYLOAD_NBYTES) for _ in range(2))
    for part in source:
        part.random_(0, 256)
    with closing(DiskTier(folder, cpu)) as tier:
        slots = []
        for _ in range(PAYLOAD_COUNT):
            slot = tier.reserve(PAYLOAD_NBYTES)
            if slot is None:  # the disk is full
                break
            slots.append(slot)
        count, _ = _pass(tier.write, slots, source)
        if not count:
            return None, None
        written, write = _pass(tier.write, slots[:count], source)
        _, read = _pass(tier.read, slots[:written], target)
        return write, read


def _pass(
    call: Callable[[Slot, torch.Tensor], Ticket], slots: list[Slot], parts: tuple[torch.Tensor, ...]
) -> tuple[int, float]:
    """Move payloads for `PASS_LIMIT_S` at most; return their number, and bytes per second."""
    begin, count = perf_counter(), 0
    pending: deque[Ticket] = deque()
    for slot in slots:
        if len(pending) == MAX_IN_FLIGHT:
            pending.popleft().result()
        if count and perf_counter() - begin > PASS_LIMIT_S:
            break
        pending.append(call(slot, parts[count % MAX_IN_FLIGHT]))
        count += 1
    for ticket in pending:
        ticket.result()
    return count, count * PAYLOAD_NBYTES / (perf_counter() - begin)


@dataclass(frozen=True)
class Memory:
    """Sizes in bytes; None for no limit, or where the system does not tell."""

    total_bytes: int | None
    available_bytes: int | None
    cgroup_bytes: int | None
    locked_bytes: int | None


def memory() -> Memory:
    """Read the sizes from the system."""
    info = machine_bytes()
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Memory(
        info.get("MemTotal"),
        info.get("MemAvailable"),
        cgroup_limit(),
        None if locked == resource.RLIM_INFINITY else locked,
    )


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


DISTRIBUTIONS = {  # by import name, where it differs from the distribution's name
    "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy"),
    "kvikio": ("kvikio-cu12", "kvikio-cu13", "kvikio"),
    "sklearn": ("scikit-learn",),
}
NAMES = (
    "torch", "numpy", "numba", "cupy", "scipy", "bitsandbytes", "blosc2", "xxhash", "kvikio", "transformers",
    "accelerate", "lightning", "matplotlib", "sklearn", "rich", "typer",
)  # fmt: skip
IMPORTED = ("numba", "cupy", "scipy", "blosc2", "xxhash", "kvikio")  # importing the remaining packages takes seconds


@dataclass(frozen=True)
class Package:
    """A package, by its import name; `error` is that of its import, where `state` is broken."""

    name: str
    state: Literal["installed", "missing", "broken"]
    version: str | None = None
    error: str = ""


@dataclass(frozen=True)
class Missing:
    """A feature that this machine could have, and the command that installs it."""

    feature: str
    command: str


FEATURES = (  # with the packages and the extra; {cuda} is the major version of CUDA
    ("compiled codecs on the CPU", ("numba",), "cpu"),
    ("codecs on the GPU", ("cupy",), "cuda{cuda}"),
    ("GPU to disk directly", ("kvikio",), "gds{cuda}"),
    ("codecs zstd and lz4", ("blosc2",), "bytes"),
    ("codec bnb8", ("bitsandbytes",), "bnb"),
    ("fast checksums on disk", ("xxhash",), "disk"),
    ("proved bounds of plans", ("scipy",), "plan"),
    ("pictures, benchmark", ("matplotlib", "sklearn"), "bench"),
    ("Hugging Face Trainer", ("transformers", "accelerate"), "hf"),
    ("Lightning", ("lightning",), "lightning"),
)


def packages() -> dict[str, Package]:
    """Look for each package; import those that are quick to import."""
    return {name: _package(name) for name in NAMES}


def missing(found: Mapping[str, Package], cuda: str | None) -> list[Missing]:
    """Return the features that lack a package; those of GPUs where there is one, with the major version `cuda`."""
    return [
        Missing(feature, f"pip install 'actstore[{extra.format(cuda=cuda)}]'")
        for feature, needs, extra in FEATURES
        if any(found[name].state == "missing" for name in needs) and (cuda is not None or "{cuda}" not in extra)
    ]


def cuda_major() -> str | None:
    """Return the major version of CUDA where PyTorch sees a GPU of NVIDIA."""
    return torch.version.cuda.partition(".")[0] if torch.cuda.is_available() and torch.version.cuda else None


def _package(name: str) -> Package:
    try:
        if find_spec(name) is None:
            return Package(name, "missing")
    except (ImportError, ValueError):
        return Package(name, "missing")
    found = _version(name)
    if name in IMPORTED:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_module(name)
        except Exception as error:
            return Package(name, "broken", found, f"{type(error).__name__}: {error}")
    return Package(name, "installed", found)


def _version(name: str) -> str | None:
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


@dataclass(frozen=True)
class Kernels:
    """Back end of the codecs on one kind of device.

    Attributes
    ----------
    back_end : the package, or PyTorch operations, which are slower
    others : back end of the codecs of each further library, by library
    folder : cache of compiled kernels; the environment variable `variable` moves it
    cached : number of up-to-date compiled kernels of each source; empty where it is unknown
    error : reason why the cache cannot be used
    """

    device: str
    codecs: tuple[str, ...]
    back_end: str
    folder: str = ""
    variable: str = ""
    cached: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    others: Mapping[str, str] = field(default_factory=dict)


def kernels(found: Mapping[str, Package]) -> list[Kernels]:
    """Return the back end of codecs on the CPU, and on GPUs where there are any. Compiles nothing."""
    codecs = tuple(name for name in registry.names() if issubclass(registry.get(name), KernelCodec))
    eight_bits = {"bnb8": _library(found["bitsandbytes"])}
    here = [replace(_on_cpu(codecs, found), others={"zstd, lz4": _library(found["blosc2"]), **eight_bits})]
    if torch.cuda.is_available():
        here.append(replace(_on_cuda(codecs, found), others=eight_bits))
    return here


def _library(package: Package) -> str:
    return package.name if package.state == "installed" else f"{package.name} ({package.state})"


def _on_cpu(codecs: tuple[str, ...], found: Mapping[str, Package]) -> Kernels:
    if found["numba"].state != "installed":
        return Kernels("CPU", codecs, "PyTorch operations")
    from actstore.kernels.cpu import cache

    try:
        folder = cache.folder()
    except KernelUnavailable as error:
        return Kernels("CPU", codecs, "PyTorch operations", variable=cache.VARIABLE, error=str(error))
    cached = {source: cache.cached(source) for source in cache.sources()}
    return Kernels("CPU", codecs, "numba", str(folder), cache.VARIABLE, cached)


def _on_cuda(codecs: tuple[str, ...], found: Mapping[str, Package]) -> Kernels:
    if found["cupy"].state != "installed" or torch.version.hip is not None:
        return Kernels("GPU", codecs, "PyTorch operations")
    variable = "CUPY_CACHE_DIR"
    folder = os.environ.get(variable) or Path.home() / ".cupy" / "kernel_cache"
    return Kernels("GPU", codecs, "CuPy", str(folder), variable)


@dataclass(frozen=True)
class Gpu:
    """A device: its name, its memory in bytes, and its compute capability."""

    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True)
class Cuda:
    """CUDA version of PyTorch, the driver of the machine, and its devices.

    `pinned_bytes` is how much of `PINNED_NBYTES` the driver pinned on request; None without a device.
    """

    runtime: str | None
    driver: str | None
    devices: tuple[Gpu, ...] = ()
    pinned_bytes: int | None = None


def cuda() -> Cuda:
    """Look at the devices, and pin memory for a moment where there is one."""
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    built = runtime if torch.version.hip or torch.version.cuda else None
    if not torch.cuda.is_available():
        return Cuda(built, driver(DRIVER))
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = tuple(Gpu(each.name, each.total_memory, f"{each.major}.{each.minor}") for each in devices)
    return Cuda(built, driver(DRIVER), gpus, _pinned())


def driver(path: Path) -> str | None:
    """Return the version of NVIDIA's driver; None where it is not loaded."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", path.read_text())
    except OSError:
        return None
    return found[1] if found else "unknown"


def _pinned() -> int:
    device = Accelerator(torch.device("cuda", 0))
    memory = device.pinned(PINNED_NBYTES)
    if memory is None:
        return 0
    device.unpin(memory)
    return PINNED_NBYTES


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
