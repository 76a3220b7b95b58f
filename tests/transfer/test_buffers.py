"""Memory that is used again: of exact sizes, not more than the last steps needed, and never too early."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore import ActivationStore, Disk
from actstore.base.ticket import DONE, Ticket
from actstore.devices import Cpu, cpu_memory, open_device
from actstore.transfer.buffers import Buffers
from tests.transfer.bench import KeepingCpu

CPU = torch.device("cpu")
DEVICE = KeepingCpu(CPU)


class Waited(Ticket):
    on_stream = True

    def __init__(self):
        self.waits = 0

    def ready(self):
        return False

    def wait_on(self, stream):
        self.waits += 1

    def result(self):
        raise AssertionError


def test_the_same_memory_again():
    buffers = Buffers(DEVICE)
    first = buffers.take(8192)
    address = first.memory.data_ptr()
    assert address % 4096 == 0
    buffers.give(first, ())
    assert buffers.take(8192).memory.data_ptr() == address
    assert buffers.allocated == 1


def test_memory_carries_its_last_uses():
    buffers, last = Buffers(DEVICE), Waited()
    buffers.give(buffers.take(4096), [last])
    assert list(buffers.take(4096).after) == [last]
    assert last.waits == 0


def test_memory_that_goes_back_is_waited_for_where_it_came_from():
    buffers, last = Buffers(DEVICE), Waited()
    buffers.give(buffers.take(4096), [last])
    buffers.close()
    assert last.waits == 1


def test_memory_that_is_forgotten_is_not_used_again():
    buffers = Buffers(DEVICE)
    buffer = buffers.take(4096)
    buffers.forget(buffer)
    other = buffers.take(4096)
    assert other.memory.data_ptr() != buffer.memory.data_ptr()
    assert buffers.used_nbytes == 4096


def test_poison_comes_after_the_last_uses():
    buffers, last = Buffers(DEVICE, poison=True), Waited()
    buffer = buffers.take(4096)
    assert buffer.memory.eq(0xFF).all()
    buffer.memory.zero_()
    buffers.give(buffer, [last])
    assert buffers.take(4096).memory.eq(0xFF).all()
    assert last.waits == 1


def test_a_refused_allocation_is_not_counted(monkeypatch):
    buffers = Buffers(DEVICE)

    def refuse(*_):
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Cpu, "empty", refuse)
        with pytest.raises(MemoryError):
            buffers.take(4096)
    assert buffers.used_nbytes == 0


@given(st.lists(st.lists(st.sampled_from([4096, 8192, 12288]), max_size=8), max_size=12))
def test_a_step_keeps_no_more_than_the_last_two_needed(steps):
    buffers = Buffers(DEVICE)
    needs = [0, 0]
    for sizes in steps:
        buffers.trim()
        needs.append(sum(sizes))
        taken = []
        for nbytes in sizes:
            taken.append(buffers.take(nbytes))
            assert buffers.used_nbytes + buffers._idle_nbytes <= max(needs[-2:])
        assert len({buffer.memory.data_ptr() for buffer in taken}) == len(taken)
        for buffer in taken:
            buffers.give(buffer, (DONE,))
        assert buffers.used_nbytes == 0
        assert buffers._idle_nbytes == sum(sum(b.memory.numel() for b in idle) for idle in buffers._idle.values())
    buffers.close()
    assert buffers._idle_nbytes == 0


@pytest.fixture
def counted():
    """A device whose freed memory serves other tensors, and the bytes of all tensors."""
    device = open_device(CPU)
    if not device.recycles(1 << 20):
        pytest.skip("the allocator of CPU tensors is another one here")
    return device, cpu_memory.memory_allocated


def test_no_buffer_is_idle_where_its_memory_serves_tensors(counted):
    device, allocated = counted
    buffers, before = Buffers(device), allocated()
    buffer = buffers.take(1 << 20)
    address = buffer.memory.data_ptr()
    assert address % 4096 == 0
    buffers.give(buffer, ())
    del buffer
    assert allocated() == before
    assert buffers.used_nbytes == 0
    tensors = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(64)]
    assert any(each.data_ptr() <= address < each.data_ptr() + each.nbytes for each in tensors)
    late = buffers.take(1 << 20)
    buffers.give(late, [Waited()])  # a stream may still use it
    del late
    assert allocated() > before + (1 << 20)
    buffers.close()


def test_nothing_of_backward_lies_idle_in_the_next_forward(counted, tmp_path):
    """Buffers that backward had filled once stayed until the step after: a third of a small model's peak."""
    _, allocated = counted
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    model, x = torch.nn.Sequential(*layers), torch.ones(1024, 512)
    store = ActivationStore(model, "raw @ disk", tiers=[Disk(tmp_path)])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = allocated()
    for _ in range(3):
        with store:
            loss = model(x).square().mean()
        loss.backward()
        del loss
        engine = store._store.place(CPU).engine
        for ticket, *_ in engine._traffic.leaving:
            ticket.result()
        engine.poll()
        assert allocated() - before < 1 << 20
    store.close()
