"""Memory that is mapped outside of the heap."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from actstore.devices import cpu_memory
from actstore.devices.cpu import HUGE_PAGE_NBYTES, Cpu, map_pages
from actstore.devices.cpu_memory import CountedPages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="advice and its traces are Linux's")


def flags(pages: mmap.mmap) -> list[str]:
    """What the system knows of the map: ``hg`` where huge pages were advised."""
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    for region in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(text, 16) for text in region.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            return region.partition("VmFlags:")[2].splitlines()[0].split()
    raise AssertionError("no such map")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages")
def test_large_maps_are_advised_to_be_huge_pages() -> None:
    small, large = map_pages(HUGE_PAGE_NBYTES - mmap.PAGESIZE), map_pages(HUGE_PAGE_NBYTES)
    assert "hg" not in flags(small)
    assert "hg" in flags(large)


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def madvise(self: mmap.mmap, *advice: int) -> None:
        asked.append(advice)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(CountedPages, "madvise", madvise, raising=False)
    pages = map_pages(HUGE_PAGE_NBYTES)
    assert asked == [(mmap.MADV_HUGEPAGE,)]
    assert len(pages) == HUGE_PAGE_NBYTES
    assert not any(pages)


def test_the_count_of_the_allocator_and_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_memory.count()
    device, nbytes = Cpu(torch.device("cpu")), 1 << 22
    kept = torch.empty(nbytes)
    before, _ = device.allocated(reset=True) or (0, 0)
    del kept
    now, peak = device.allocated() or (0, 0)
    assert peak >= before
    assert now <= before - nbytes
    assert device.allocated(reset=True) == (now, now)
    monkeypatch.setattr(cpu_memory, "_library", None)
    assert device.allocated(reset=True) is None
