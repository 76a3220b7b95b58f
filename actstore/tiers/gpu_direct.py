"""Payloads between the memory of a GPU and a file, past host memory: GPUDirect Storage, through the package kvikio."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch

from actstore.base.checksum import checksum
from actstore.base.ticket import DONE, Ticket
from actstore.base.units import format_nbytes
from actstore.devices.base import Device
from actstore.errors import ConfigError, TransferError
from actstore.tiers.file import NamelessFile
from actstore.tiers.parts import Mover

DISABLE_HINT = "or leave gpu_direct=True out"


class GpuDirect(Mover):
    """A mover that uses cuFile on the threads that call it. They wait for `after`, for checksums and for the disk.

    The disk's controller reads and writes GPU memory itself under three conditions. The kernel module nvidia-fs (or PCI
    peer-to-peer) is there. The file system supports it (ext4 and xfs on NVMe). Offsets and lengths are multiples of
    4096 bytes, as those of all transfers of the transfer engine are. Memory at other addresses crosses a buffer of
    cuFile on the GPU. Elsewhere kvikio copies through host memory of its own, and a warning says so.

    The GPU computes the checksums. They take up to 24 MiB of its memory for each direction.

    Parameters
    ----------
    file : opened once more here, by kvikio: with O_DIRECT, whatever `file.direct` says

    Raises
    ------
    ConfigError : kvikio is not installed or cannot open the file; `device` is a CPU

    Notes
    -----
    kvikio waits for CUDA's default stream before each transfer. The file must not be used in a forked child.
    """

    def __init__(self, device: Device, streams: tuple[Any, Any], file: NamelessFile) -> None:
        super().__init__(device, streams)
        self._waits = True
        self._summing = Lock()  # one checksum is queued at a time: together they would take much memory
        self._cufile = _open(device, file)

    def close(self) -> None:
        super().close()
        self._cufile.close()

    def _write(self, file: NamelessFile, src: torch.Tensor, start: int, after: Sequence[Ticket]) -> int:
        found = self._checksum(src, self._offload)
        nbytes = src.numel()
        done = self._move("writing", self._cufile.raw_write, src, start, self._offload)
        if done < nbytes:
            raise _failed("writing", nbytes, f"it took {done} bytes and no more")
        return found

    def _read(
        self, file: NamelessFile, dst: torch.Tensor, start: int, expected: int, after: Sequence[Ticket]
    ) -> Ticket:
        done = self._move("reading", self._cufile.raw_read, dst, start, self._fetch)
        file.check_open()
        file.check_end(done, dst.numel())
        file.compare(self._checksum(dst, self._fetch), expected, dst.numel())
        return DONE

    def _move(self, what: str, call: Callable[..., int], memory: torch.Tensor, start: int, stream: Any) -> int:
        """Read or write, with the device's context current on this thread. Return the bytes done."""
        with self._device.on(stream):
            self._device.record(stream)  # the first work of a thread makes the CUDA context current on it
            try:
                return call(memory, memory.numel(), start)
            except (RuntimeError, OSError) as error:
                raise _failed(what, memory.numel(), str(error)) from error.with_traceback(None)

    def _checksum(self, memory: torch.Tensor, stream: Any) -> int:
        with self._device.on(stream):
            with self._summing:
                found = checksum(memory)
            self._device.record(stream).result()
            return int(found)


def _failed(what: str, nbytes: int, why: str) -> TransferError:
    return TransferError(
        f"{what} {format_nbytes(nbytes)} between the GPU and the disk tier with kvikio failed: {why}. Give Disk(path) "
        f"a folder on an ext4 or xfs disk (`gdscheck -p` lists what GPUDirect Storage supports here), {DISABLE_HINT}.",
        errno=errno.EIO,
    )


def _open(device: Device, file: NamelessFile) -> Any:
    """Open the file with kvikio."""
    if device.on_host:
        raise ConfigError(
            f"Disk(gpu_direct=True) moves payloads of a GPU, and the compute device is {device.torch_device}. "
            f"Move the model to the GPU before the store is made, {DISABLE_HINT}."
        )
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except (ImportError, OSError, RuntimeError) as error:  # the last where it finds no libcufile
        raise ConfigError(
            f"Disk(gpu_direct=True) needs the package kvikio, which cannot be imported ({error}). "
            f"Run pip install 'actstore[gds13]' (gds12 with CUDA 12), {DISABLE_HINT}."
        ) from error
    try:
        opened = kvikio.CuFile(file.path, "r+")
        direct = not kvikio.defaults.is_compat_mode_preferred() and kvikio.cufile_driver.get("is_gds_available")
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"Disk(gpu_direct=True): kvikio cannot open the disk tier's file: {error}. Give Disk(path) a folder on an "
            f"ext4 or xfs disk, {DISABLE_HINT}."
        ) from error
    if not direct:
        warnings.warn(
            "Disk(gpu_direct=True), but kvikio finds no GPUDirect Storage here, and copies through host memory: load "
            "the kernel module nvidia-fs and let the process read /run/udev (`gdscheck -p` tells what else is "
            f"missing), {DISABLE_HINT}.",
            RuntimeWarning,
            stacklevel=2,
        )
    return opened
