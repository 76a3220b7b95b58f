"""The observer of a GPU's allocator, called as PyTorch calls it."""

from collections.abc import Iterator

import pytest
import torch

from actstore.devices import refusals
from actstore.devices.refusals import Refusal


@pytest.fixture
def observers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    found: list[object] = []
    monkeypatch.setattr(refusals, "_attached", False)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", found.append, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", {1: 50}.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_reserved", {1: 60}.__getitem__)
    yield found
    refusals._last.clear()


def test_the_observer_is_attached_once_and_what_it_was_told_is_taken_once(observers: list[object]) -> None:
    refusals.observe()
    refusals.observe()
    assert observers == [refusals.note]
    refusals.note(1, 20, 80, 10)
    assert refusals.take(0) is None
    assert refusals.take(1) == Refusal(asked=20, total=80, free=10, allocated=50, reserved=60)
    assert refusals.take(1) is None


def test_figures_that_cannot_be_read_raise_nothing_in_the_allocator(observers: list[object]) -> None:
    refusals.note(2, 20, 80, 10)
    assert refusals.take(2) == Refusal(asked=20, total=80, free=10, allocated=0, reserved=0)


def test_an_allocator_without_observers_is_asked_once(
    observers: list[object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(observer: object) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver")

    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", refuses, raising=False)
    with caplog.at_level("INFO", "actstore"):
        refusals.observe()
        refusals.observe()
    assert [record.getMessage() for record in caplog.records] == [
        "refused requests of GPU memory are not noted: cudaMallocAsync does not yet support attachOutOfMemoryObserver"
    ]


@pytest.mark.gpu
def test_a_refusal_of_a_gpu_is_noted() -> None:
    refusals.observe()
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    found = refusals.take(torch.cuda.current_device())
    assert found is not None
    assert found.asked >= 2 * total
    assert found.total == total
    assert found.free <= total
    assert found.allocated <= found.reserved <= total
