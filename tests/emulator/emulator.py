"""Compiles a kernel's own CUDA source for the CPU, under the address and undefined-behaviour sanitizers, to run it."""

from __future__ import annotations

import atexit
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from actstore.base import source

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "emulator"


def compiler() -> str | None:
    """The C++ compiler; None where there is none."""
    return shutil.which("g++")


@dataclass(frozen=True)
class Buffer:
    """Bytes given to a kernel, `offset` bytes behind a multiple of 16; nothing may be read or written after them."""

    data: bytes | bytearray | memoryview
    offset: int = 0


@dataclass(frozen=True)
class Launch:
    kernel: str
    blocks: int
    args: Sequence[Buffer | int]
    threads: int = 256
    flush_denormals: bool = True


class Emulator:
    """The kernels of one source, as a process that waits for launches."""

    def __init__(self, name: str) -> None:
        self._program = _compile(name)
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None
        atexit.register(self.close)

    def run(self, launches: Sequence[Launch]) -> list[list[bytes]]:
        """Run launches in order; the bytes of each one's buffers afterwards."""
        return [self._run(launch) for launch in launches]

    def close(self) -> str:
        """End the process; what it said last."""
        process, self._process = self._process, None
        if process is None:
            return ""
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.wait()
        with self._errors as errors:
            errors.seek(0)
            return errors.read().decode(errors="replace")

    def _run(self, launch: Launch) -> list[bytes]:
        process = self._process or self._start()
        sizes = [len(arg.data) for arg in launch.args if isinstance(arg, Buffer)]
        try:
            process.stdin.write(_message(launch))
            process.stdin.flush()
            found = process.stdout.read(sum(sizes))
        except BrokenPipeError:
            found = b""
        if len(found) < sum(sizes):
            raise AssertionError(self.close())
        buffers, at = [], 0
        for size in sizes:
            buffers.append(found[at : at + size])
            at += size
        return buffers

    def _start(self) -> subprocess.Popen[bytes]:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` does
        self._process = subprocess.Popen(
            [self._program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"},
        )
        return self._process


def _compile(name: str) -> Path:
    """The program of a source; made once for each state of the source and of the emulator."""
    text = source.read(f"{name}.cu").text
    parts = [text, *((HERE / file).read_text() for file in ("emu.h", "driver.cpp"))]
    program = BUILD / f"{name}-{sha256(''.join(parts).encode()).hexdigest()[:16]}"
    if program.exists():
        return program
    BUILD.mkdir(parents=True, exist_ok=True)
    for old in BUILD.glob(f"{name}-*"):
        if old != program:  # another process may just have made it
            old.unlink(missing_ok=True)
    contract = ["-mfma", "-ffp-contract=fast"] if _has_fma() else []
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        made = Path(folder) / name
        unit = Path(folder) / f"{name}.cu"
        unit.write_text(text)
        build = subprocess.run(
            [
                *(compiler(), "-std=c++17", "-O2", "-g1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
                *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", *contract, "-rdynamic"),
                f'-DEMU_SOURCE="{unit}"',
                *("-I", str(HERE), str(HERE / "driver.cpp"), "-o", str(made), "-ldl"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert build.returncode == 0, build.stderr
        made.replace(program)
    return program


def _message(launch: Launch) -> bytes:
    name = launch.kernel.encode()
    parts = [struct.pack("<I", len(name)), name]
    parts.append(struct.pack("<IIII", launch.blocks, launch.threads, launch.flush_denormals, len(launch.args)))
    for arg in launch.args:
        if isinstance(arg, Buffer):
            parts += [struct.pack("<IIq", 1, arg.offset, len(arg.data)), bytes(arg.data)]
        else:
            parts.append(struct.pack("<IIq", 0, 0, arg))
    return b"".join(parts)


def _has_fma() -> bool:
    """Whether this processor can contract a product with a sum, as a GPU's compiler does."""
    try:
        return " fma " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
