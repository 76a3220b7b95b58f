"""numba's cache of compiled kernels: its folder, and the kernels of a source in it."""

from __future__ import annotations

import fcntl
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba

from actstore.errors import KernelUnavailable

VARIABLE = "NUMBA_CACHE_DIR"
_HERE = Path(__file__).parent
_IMPORT = re.compile(r"^from actstore\.kernels\.([\w.]+) import", re.MULTILINE)
_KERNEL = re.compile(r"^ *@kernel$", re.MULTILINE)


@cache
def folder() -> Path:
    """Return the folder where numba caches kernels: ``__pycache__`` beside them, or that of NUMBA_CACHE_DIR.

    Where numba can write neither, it takes the user's cache folder.

    Raises
    ------
    KernelUnavailable : numba can write none of them
    """
    try:
        compiled: Any = numba.njit(cache=True)(_stand_in)
    except RuntimeError as error:  # numba finds no writable folder
        raise KernelUnavailable(
            f"numba finds no folder for compiled kernels: set {VARIABLE} to a folder that can be written."
        ) from error
    return Path(compiled.stats.cache_path)


@contextmanager
def one_process(name: str) -> Iterator[None]:
    """Let other processes with the same cache wait while one compiles a kernel, which they then read.

    As ranks of one machine: without it each compiles every kernel. Processes that compile other kernels do not wait.
    """
    file, place = _locks(), int(sha256(name.encode()).hexdigest()[:15], 16)  # a lock is a byte that need not exist
    if file is None:
        yield
        return
    fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


@cache
def _locks() -> int | None:
    """Open the file of locks until the process ends: to close it would release them. None where it cannot be locked."""
    try:
        file = os.open(folder() / "kernels.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.lockf(file, fcntl.LOCK_UN, 1)  # some network file systems have no locks
    except OSError:
        return None
    return file


def cached(source: str) -> int:
    """Count the kernels of the present ``kernels/cpu/<source>.py`` in the cache of this Python."""
    version = f"py{sys.version_info[0]}{sys.version_info[1]}"
    return len(list(folder().glob(f"{source}.*_{short_digest(_HERE / f'{source}.py')}-*.{version}*.nbi")))


def sources() -> list[str]:
    """Return the names of the sources that have kernels."""
    return sorted(path.stem for path in _HERE.glob("*.py") if _KERNEL.search(path.read_text(encoding="utf-8")))


def short_digest(path: Path) -> str:
    """Return 8 hex digits that change with a source of kernels, or with one that it imports."""
    return _digest(path)[:8]


@cache
def _digest(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    imported = (_digest(_HERE.parent / f"{name.replace('.', '/')}.py") for name in _IMPORT.findall(text))
    return sha256("".join([text, *imported]).encode()).hexdigest()


def _stand_in() -> None:
    """Do nothing: a function of this folder, where all kernels are, for `folder`."""
