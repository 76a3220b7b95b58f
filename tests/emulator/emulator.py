"""Compiles a kernel's own CUDA source for the CPU, under the address and undefined-behaviour sanitizers, to run it."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from actstore.kernels import source

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Buffer:
    """Bytes given to a kernel, `offset` bytes behind a multiple of 16; nothing may be read or written after them."""

    data: bytes
    offset: int = 0


@dataclass(frozen=True)
class Launch:
    kernel: str
    blocks: int
    args: Sequence[Buffer | int]
    threads: int = 256
    flush_denormals: bool = True


class Emulator:
    """The kernels of one source, as an executable."""

    def __init__(self, name: str, kernels: Sequence[str], folder: Path) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("needs g++ to run the CUDA sources on the CPU")
        self.path = folder / name
        contract = ["-mfma", "-ffp-contract=fast"] if _has_fma() else []
        build = subprocess.run(
            [
                *(compiler, "-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
                *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", *contract),
                f'-DEMU_SOURCE="{source.folder() / name}.cu"',
                f"-DEMU_KERNELS={''.join(f'K({kernel})' for kernel in kernels)}",
                *("-I", str(HERE), str(HERE / "driver.cpp"), "-o", str(self.path)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert build.returncode == 0, build.stderr

    def run(self, launches: Sequence[Launch]) -> list[list[bytes]]:
        """Run launches in order; the bytes of each one's buffers afterwards."""
        done = subprocess.run(
            [self.path],
            input=b"".join(map(_message, launches)),
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        output, results = memoryview(done.stdout), []
        for launch in launches:
            buffers = []
            for arg in launch.args:
                if isinstance(arg, Buffer):
                    buffers.append(bytes(output[: len(arg.data)]))
                    output = output[len(arg.data) :]
            results.append(buffers)
        assert not output
        return results


def _message(launch: Launch) -> bytes:
    name = launch.kernel.encode()
    parts = [struct.pack("<I", len(name)), name]
    parts.append(struct.pack("<IIII", launch.blocks, launch.threads, launch.flush_denormals, len(launch.args)))
    for arg in launch.args:
        if isinstance(arg, Buffer):
            parts += [struct.pack("<IIq", 1, arg.offset, len(arg.data)), arg.data]
        else:
            parts.append(struct.pack("<IIq", 0, 0, arg))
    return b"".join(parts)


def _has_fma() -> bool:
    """Whether this processor can contract a product with a sum, as a GPU's compiler does."""
    try:
        return " fma " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
