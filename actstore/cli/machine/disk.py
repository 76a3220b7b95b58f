"""The folder of the disk tier, and how fast the tier writes and reads there."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from actstore.base.ticket import Ticket
from actstore.devices import Cpu
from actstore.errors import ActstoreError
from actstore.tiers import Slot
from actstore.tiers.disk import DiskTier
from actstore.tiers.file import NamelessFile, file_system, is_memory

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
