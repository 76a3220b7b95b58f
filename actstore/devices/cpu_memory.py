"""Memory of CPU tensors: an allocator for PyTorch that reuses pages, and exact counts.

glibc keeps the large blocks that tensors free, and often does not give them to the next tensor: a process that stores
activations in fewer bytes can then need more memory than one that does not. `install` gives PyTorch an allocator
(`csrc/cpu_allocator.cpp`). Its idle blocks serve the next tensors of their size, and its mapped bytes do not exceed
what tensors have needed at once. It is compiled at first use, against the installed PyTorch; a wheel may bring it.

The environment variable ACTSTORE_CPU_ALLOCATOR chooses: ``pages`` (the default), ``threshold`` (glibc returns each
block of 1 MiB or more at once, which costs time) or ``system`` (nothing is changed).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Literal, NamedTuple, get_args
from weakref import ref

import torch

from actstore.base import source
from actstore.errors import ConfigError, KernelUnavailable

log = logging.getLogger("actstore")

Choice = Literal["pages", "threshold", "system"]
VARIABLE = "ACTSTORE_CPU_ALLOCATOR"
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE: one mapping may be larger than all memory
MIN_PAGED_NBYTES = 64 * 1024  # tensors of this size and more come from pages
MMAP_THRESHOLD_NBYTES = 1 << 20
PAGE_NBYTES, HUGE_NBYTES, HUGE_GRAIN_NBYTES = 4 << 10, 2 << 20, 64 << 10  # of pages.hpp: blocks end at these multiples
REUSE_SHARE = 8  # of pages.hpp: a block serves a tensor that is smaller by this fraction
MALLOC_NBYTES = 64  # most that glibc adds to a block for its alignment
COMPILERS = ("c++", "g++", "clang++")
_M_MMAP_THRESHOLD = -3  # of mallopt(3)

_lock = Lock()


class Status(NamedTuple):
    """The allocator of CPU tensors in this process.

    Attributes
    ----------
    choice : ``pages``, ``threshold`` or ``system``
    reason : why it differs from the requested choice; empty where it does not
    """

    choice: Choice
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.choice} ({self.reason})" if self.reason else self.choice


_status: Status | None = None
_chosen: Choice | None = None


def choose(choice: Choice) -> None:
    """Choose the allocator of CPU tensors, before the first store on a CPU is made.

    Raises
    ------
    ConfigError : an unknown choice, or a store has been made and the allocator is another one
    """
    global _chosen
    _checked(choice, "choice")
    if _status is not None and _status.choice != choice:
        raise ConfigError(
            f"choice={choice!r}: the process uses {_status.choice!r} since its first store on a CPU was made. Choose "
            f"before, or set {VARIABLE}={choice}."
        )
    _chosen = choice


def install() -> Status:
    """Give PyTorch the chosen allocator, once. Later calls return the status of the first."""
    global _status
    if _status is None:
        with _lock:
            if _status is None:
                _status = _install(_chosen or _checked(os.environ.get(VARIABLE) or "pages", VARIABLE))
                log.info("allocator of CPU tensors: %s", _status)
    return _status


def status() -> Status | None:
    """Return the status of `install`; None before it was called."""
    return _status


def count() -> bool:
    """Count the bytes of CPU tensors from now on, and change nothing else. Returns False where that is impossible."""
    with _lock:
        library, _ = _loaded()
    return library is not None


def memory_allocated() -> int | None:
    """Return the bytes of CPU tensors and of the store's pages made since `install` or `count`; None before these."""
    return None if _library is None else int(_library.actstore_allocated())


def max_memory_allocated() -> int | None:
    """Return the high-water of `memory_allocated` since `reset_peak`; None before `install` or `count`."""
    return None if _library is None else int(_library.actstore_max_allocated())


def reset_peak() -> None:
    """Forget the high-water so far."""
    if _library is not None:
        _library.actstore_reset_max_allocated()


def most_counted(nbytes: int, sizes: Collection[int] = ()) -> int:
    """Return an upper bound of what `memory_allocated` counts for a tensor: allocators round up.

    Under ``system`` glibc rounds some tensors of the first step to whole pages, which are not counted here.

    nbytes : of the tensor
    sizes : bytes of other tensors of the process, whose idle blocks the tensor may get
    """
    choice = "system" if _status is None else _status.choice
    if choice != "pages" or nbytes < MIN_PAGED_NBYTES:
        mapped = choice == "threshold" and nbytes >= MMAP_THRESHOLD_NBYTES
        return nbytes and nbytes + MALLOC_NBYTES + (PAGE_NBYTES if mapped else 0)
    most = nbytes + nbytes // REUSE_SHARE
    fit = max((size for size in sizes if nbytes < size <= most), default=nbytes)
    room = fit + (HUGE_GRAIN_NBYTES if fit >= HUGE_NBYTES else PAGE_NBYTES)
    return room if fit == nbytes else max(most_counted(nbytes), min(room, most))


def most_during(call: Callable[[], object]) -> int | None:
    """Return the peak memory of a call, less the memory after it; None before `install` or `count`.

    The high-water of before stays.
    """
    if _library is None:
        return None
    known = max_memory_allocated() or 0
    reset_peak()
    result = call()
    now, most = memory_allocated() or 0, max_memory_allocated() or 0
    del result
    if known > most:
        more = known - (memory_allocated() or 0)
        _library.actstore_add(more)
        _library.actstore_subtract(more, None)
    return max(0, most - now)


@contextmanager
def unreserved() -> Iterator[None]:
    """Allow mappings larger than memory, as long as their pages are not touched."""
    global _unreserved
    with _lock:
        _unreserved += 1
    try:
        yield
    finally:
        with _lock:
            _unreserved -= 1


class CountedPages(mmap.mmap):
    """Anonymous pages of the store, counted while they live.

    No Python code runs when they are freed: a Ctrl-C inside a finalizer would be printed and lost.
    """

    _made: ClassVar[dict[int, ref[CountedPages]]] = {}

    def __new__(cls, nbytes: int) -> CountedPages:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (NO_RESERVE if _unreserved else 0)
        pages = super().__new__(cls, -1, nbytes, flags=flags)
        gone = None
        if _library is not None:  # it counts these, too
            _library.actstore_add(nbytes)
            gone = partial(_library.actstore_subtract, nbytes)
        for key, weak in list(cls._made.items()):
            if weak() is None:
                cls._made.pop(key, None)
        weak = ref(pages, gone)
        cls._made[id(weak)] = weak
        return pages

    @classmethod
    def total(cls) -> int:
        """Return the bytes of all pages that live."""
        return sum(len(pages) for weak in list(cls._made.values()) if (pages := weak()) is not None)


def pages_bytes() -> int:
    """Return the bytes of tensors and of the store that are on pages of their own, not on the C heap."""
    return CountedPages.total() + (0 if _library is None else int(_library.actstore_asked()))


def idle_bytes() -> int:
    """Return the bytes of pages that no tensor uses now."""
    return 0 if _library is None else int(_library.actstore_idle())


def heap() -> tuple[int, int]:
    """Return the bytes in use on the C heap, mapped blocks included, and those of its free blocks; 0 where unknown."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if mallinfo2 is None:
        return 0, 0
    mallinfo2.restype = _MallInfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd, info.fordblks


def trim() -> None:
    """Return idle pages, and free blocks of the C heap, to the system."""
    if _library is not None:
        _library.actstore_trim(0)
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:  # of glibc
        malloc_trim(ctypes.c_size_t(0))


# ---------------------------------------------------------------------------------------------------------------------

_library: Any = None
_unreserved = 0  # blocks of `unreserved` that run


class _MallInfo2(ctypes.Structure):
    """struct mallinfo2 of glibc: mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def _checked(choice: str, name: str) -> Choice:
    if choice not in get_args(Choice):
        raise ConfigError(f"{name}={choice!r}: must be one of {', '.join(get_args(Choice))}.")
    return choice  # type: ignore[return-value]


def _install(choice: Choice) -> Status:
    if choice == "system":
        return Status(choice)
    other = _other_malloc()
    if other:
        return Status("system", f"malloc is that of {other}, which uses blocks again")
    reason = ""
    if choice == "pages":
        library, reason = _loaded()
        if library is not None:
            library.actstore_set_least(MIN_PAGED_NBYTES)
            return Status("pages")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_NBYTES):
        return Status("system", reason or "this C library has no mallopt")
    return Status("threshold", reason)


def _loaded() -> tuple[Any, str]:
    """Load the library, and give it to PyTorch as a counter. Return None and the reason where that is impossible."""
    global _library
    if _library is None:
        if sys.platform != "linux":
            return None, f"the system is {sys.platform}"
        try:
            library = ctypes.CDLL(str(_compiled()))
        except (KernelUnavailable, OSError) as error:
            return None, str(error).removesuffix(".")
        for name in ("allocated", "max_allocated", "idle", "asked"):
            getattr(library, f"actstore_{name}").restype = ctypes.c_size_t
        for name in ("set_least", "trim", "add"):
            getattr(library, f"actstore_{name}").argtypes = [ctypes.c_size_t]
        library.actstore_subtract.argtypes = [ctypes.c_size_t, ctypes.py_object]
        library.actstore_set_window.argtypes = [ctypes.c_int64]
        if not library.actstore_install():
            return None, "another library has given PyTorch its allocator of CPU tensors"
        _library = library
    return _library, ""


def _other_malloc() -> str:
    """Return the name of the library whose malloc the process uses; empty where it is the C library's."""

    class Info(ctypes.Structure):
        _fields_ = (
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol", ctypes.c_char_p),
            ("address", ctypes.c_void_p),
        )

    process, info = ctypes.CDLL(None), Info()
    malloc = ctypes.cast(process.malloc, ctypes.c_void_p)
    if not hasattr(process, "dladdr") or not process.dladdr(malloc, ctypes.byref(info)):
        return ""
    name = Path(os.fsdecode(info.file or b"")).name
    return "" if re.match(r"(libc\b|ld-musl|libc\.musl|libclang_rt|libasan|libtsan)", name) else name


def compiler() -> list[str] | None:
    """Return the command of the C++ compiler: CXX of the environment, or one of the usual names; None without one."""
    given = shlex.split(os.environ.get("CXX", ""))
    if given and shutil.which(given[0]):
        return given
    return next(([name] for name in COMPILERS if shutil.which(name)), None)


def cache_folder() -> Path:
    """Return the folder of compiled libraries: ``$XDG_CACHE_HOME/actstore``, by default ``~/.cache/actstore``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "actstore"


def library_file() -> Path | None:
    """Return the compiled library for this PyTorch, of the wheel or of the cache; None where neither has it."""
    name = library_name(source.read("cpu_allocator.cpp").digest)
    return next((file for folder in (source.folder(), cache_folder()) if (file := folder / name).is_file()), None)


@cache
def _compiled() -> Path:
    """Return the library for this PyTorch: that of the wheel or of the cache, or compile it now.

    Raises
    ------
    KernelUnavailable : no compiler is installed, or it fails
    """
    there = library_file()
    if there is not None:
        return there
    code = source.read("cpu_allocator.cpp")
    command = compiler()
    if command is None:
        raise KernelUnavailable(
            f"no C++ compiler: none of {', '.join(COMPILERS)} is installed. Install one (on Debian: apt install g++)."
        )
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        return build(command, code.text, cache_folder() / library_name(code.digest))
    except OSError as error:
        why = f"{cache_folder()}: {error}. Set XDG_CACHE_HOME to a folder that can be written"
        raise KernelUnavailable(why) from error


def library_name(digest: str) -> str:
    """Return the file name of the library for this PyTorch and this source."""
    return f"cpu_allocator-torch{torch.__version__}-{digest[:12]}.so"


def build(command: list[str], text: str, target: Path) -> Path:
    """Compile `text`, with its includes in it, into the shared library `target`; other processes may do so meanwhile.

    Raises
    ------
    KernelUnavailable : the compiler fails
    """
    home = Path(torch.__file__).parent
    flags = [
        "-O2",
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    places = [f"-I{home / 'include'}", f"-L{home / 'lib'}"]
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        code, made = Path(work) / "cpu_allocator.cpp", Path(work) / target.name
        code.write_text(text, encoding="utf-8")
        compiling = [*command, *flags, *places, str(code), "-o", str(made), "-lc10"]
        found = subprocess.run(compiling, capture_output=True, text=True, check=False)
        if found.returncode:
            raise KernelUnavailable(f"{command[0]} cannot compile cpu_allocator.cpp: {found.stderr.strip()[-500:]}.")
        os.replace(made, target)
    return target
