"""Pinned memory of accelerators, against a runtime that this file plays."""

import mmap
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from actstore.base.ticket import EventTicket
from actstore.devices import Accelerator
from actstore.devices.accelerator import DeviceClock
from actstore.tiers.arena import Arena

PAGE = mmap.PAGESIZE


class Cudart:
    """Registers memory as CUDA does: an error is a value, and is told once more to the next kernel launch."""

    def __init__(self):
        self.registered = {}
        self.code = 0
        self.pending = 0

    def cudaHostRegister(self, address, nbytes, flags):
        assert (address % PAGE, nbytes % PAGE, flags) == (0, 0, 1)
        if address in self.registered:
            self.code = 712
        if self.code:
            self.pending = self.code
            return self.code
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        return 0 if self.registered.pop(address, None) else 713


@pytest.fixture
def cudart(monkeypatch):
    cudart, ones = Cudart(), torch.ones

    def launch(*size, device=None, **options):
        code, cudart.pending = cudart.pending, 0
        if device is not None and code:
            raise RuntimeError(f"CUDA error: {code}")
        return ones(*size, **options)

    def check_error(code):
        if code:
            raise RuntimeError(f"CUDA error: {code}")

    monkeypatch.setattr("actstore.devices.accelerator.DeviceClock", lambda device: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "ones", launch)
    return cudart


def flags_of(address):
    """What the kernel knows of the mapping that holds `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(edge, 16) for edge in head.split("-"))
            inside = start <= address < end
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("not mapped")


def test_pages_that_nobody_gave_back_are_unregistered_with_the_device(cudart):
    device = Accelerator(torch.device("cuda:0"))
    memory = [device.pinned(PAGE), device.pinned(2 * PAGE)]
    assert len(cudart.registered) == 2
    del device
    assert cudart.registered == {}
    del memory


class Timed:
    """An event of a device that has run since `ms`."""

    def __init__(self, *_, enable_timing=False):
        self.ms = 0.0

    def record(self, stream):
        assert stream == "stream"

    def synchronize(self):
        """It is complete."""

    def elapsed_time(self, other):
        return float(torch.tensor(other.ms - self.ms, dtype=torch.float32))


def test_the_clock_stays_exact_for_hours(monkeypatch):
    monkeypatch.setattr(torch, "Event", Timed)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "stream")
    clock = DeviceClock(torch.device("cuda:0"))
    event, zero = Timed(), clock.ns(Timed())
    for step in range(1, 4000):
        event = Timed()
        event.ms = step * 2000.123
        found = clock.ns(event) - zero
        assert abs(found - event.ms * 1e6) < 500 * step  # half a microsecond for each step at most
    begin = Timed()
    begin.ms = event.ms - 0.020
    ticket = EventTicket(event, begin, clock)
    monkeypatch.setattr(EventTicket, "ready", lambda self: True)
    start, end = ticket.span()
    assert abs(end - start - 20_000) < 10
    past = Timed()
    assert clock.ns(past) < clock.ns(event)


def test_whole_pages_are_registered_once_and_given_back(cudart):
    device = Accelerator(torch.device("cuda:0"))
    memory = device.pinned(PAGE + 1)
    assert (memory.numel(), memory.dtype, memory.data_ptr() % PAGE) == (2 * PAGE, torch.uint8, 0)
    assert cudart.registered == {memory.data_ptr(): 2 * PAGE}
    memory.fill_(7)
    device.unpin(memory)
    assert cudart.registered == {}
    assert (memory == 7).all()  # who still holds it reads ordinary memory


def test_pages_stay_mapped_while_they_are_registered(cudart):
    device = Accelerator(torch.device("cuda:0"))
    addresses = {device.pinned(PAGE).data_ptr() for _ in range(20)}  # no reference is kept
    assert len(addresses) == 20
    assert cudart.registered.keys() == addresses


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks the Linux kernel")
def test_a_forked_child_does_not_copy_pinned_pages(cudart):
    memory = Accelerator(torch.device("cuda:0")).pinned(PAGE)
    assert "dc" in flags_of(memory.data_ptr())  # "do not copy area on fork"


def test_a_refusal_is_none_and_leaves_no_error_behind(cudart):
    device = Accelerator(torch.device("cuda:0"))
    cudart.code = 2
    assert device.pinned(PAGE) is None
    torch.ones(1, device="cpu")
    assert (cudart.pending, cudart.registered, device._pages) == (0, {}, {})
    cudart.code = 0
    assert device.pinned(PAGE) is not None


def test_no_room_for_the_pages_is_a_refusal(cudart):
    assert Accelerator(torch.device("cuda:0")).pinned(2**62) is None


def test_memory_is_spare_within_the_limit_and_above_the_peak(cudart, monkeypatch):
    figures = {"mem_get_info": (40, 100), "memory_reserved": 30, "max_memory_allocated": 25}
    figures["get_per_process_memory_fraction"] = 1.0
    for figure in list(figures):
        monkeypatch.setattr(torch.cuda, figure, lambda device, figure=figure: figures[figure])
    device = Accelerator(torch.device("cuda:0"))
    assert device.spare_nbytes() == 40 + 30 - 25
    figures["get_per_process_memory_fraction"] = 0.5
    assert device.spare_nbytes() == 50 - 25
    figures["get_per_process_memory_fraction"] = 0.2
    assert device.spare_nbytes() == 0
    assert Accelerator(torch.device("xpu:0")).spare_nbytes() == 0


def test_the_count_of_the_allocator_and_its_peak(cudart, monkeypatch):
    stats = {"allocated_bytes": {"all": {"current": 3, "peak": 7, "freed": 1}, "small_pool": {"current": 0, "peak": 0}}}
    reset = []
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _device: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    device = Accelerator(torch.device("cuda:0"))
    assert device.allocated() == (3, 7)
    assert reset == []
    assert device.allocated(reset=True) == (3, 7)
    assert reset == [torch.device("cuda:0")]
    stats.clear()  # as with an allocator of a plugin
    assert device.allocated() is None
    assert Accelerator(torch.device("xpu:0")).allocated(reset=True) is None
    assert len(reset) == 1


def test_memory_that_was_not_registered_is_an_error_to_unpin(cudart):
    device = Accelerator(torch.device("cuda:0"))
    memory = device.pinned(PAGE)
    cudart.registered.clear()
    with pytest.raises(RuntimeError, match="CUDA error: 713"):
        device.unpin(memory)


def test_an_arena_of_registered_pages(cudart, monkeypatch):
    monkeypatch.setattr("actstore.tiers.arena.SEGMENT_NBYTES", 4 * PAGE)
    arena = Arena(Accelerator(torch.device("cuda:0")))
    first = arena.take(3 * PAGE)
    assert list(cudart.registered.values()) == [4 * PAGE]
    cudart.code = 2
    with pytest.warns(RuntimeWarning, match="Pageable"):
        second = arena.take(3 * PAGE)
    for taken in (first, second):
        arena.free(taken)
    arena.close()
    assert cudart.registered == {}


@pytest.mark.parametrize("refused", [False, True])
def test_other_accelerators_ask_torch(cudart, monkeypatch, refused):
    empty, asked = torch.empty, []

    def played(*size, pin_memory=False, **options):
        asked.append(pin_memory)
        if refused:
            raise RuntimeError("out of pinned memory")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", played)
    device = Accelerator(torch.device("xpu:0"))
    memory = device.pinned(1000)
    assert asked == [True]
    assert (memory is None) if refused else (memory.numel() == 1000)
    if memory is not None:
        device.unpin(memory)
    assert cudart.registered == {}


@pytest.mark.gpu
def test_registered_pages_are_pinned_and_copies_cross():
    device = Accelerator(torch.device("cuda", torch.cuda.current_device()))
    memory = device.pinned(2**20)
    assert memory[64:128].is_pinned()
    source = torch.arange(256, dtype=torch.uint8, device=device.torch_device).repeat(4096)
    written = device.copy(memory, source, device.stream(), [device.record(device.current())])
    found = torch.zeros_like(source)
    device.copy(found, memory, device.stream(), [written, device.record(device.current())]).result()
    assert torch.equal(found, source)
    device.unpin(memory)
    assert not memory.is_pinned()


@pytest.mark.gpu
def test_a_refusal_by_the_driver_is_not_told_to_the_next_kernel(monkeypatch):
    device = Accelerator(torch.device("cuda", torch.cuda.current_device()))
    memory = device.pinned(2**20)
    monkeypatch.setattr(torch, "frombuffer", lambda *args, **options: memory)  # registered already: refused
    assert device.pinned(2**20) is None
    assert torch.ones(4, device=device.torch_device).sum().item() == 4
    device.unpin(memory)
