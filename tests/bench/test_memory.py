"""Bytes in use, against cases whose bytes are known."""

from __future__ import annotations

import gc
import importlib
import mmap
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from actstore.bench import memory
from actstore.bench.memory import Held, Libraries, count_maps, in_use

NBYTES = 4 << 20
SLACK = 200_000  # nodes of the graph, and what Python makes on the way

pytestmark = pytest.mark.skipif(in_use("cpu") is None, reason="the C allocator does not tell")


def test_libraries_are_what_imports_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 40 << 20  # glibc maps blocks above 32 MiB apart, and so adds them to the resident memory
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "libraries_outer.py").write_text(f"import libraries_inner; kept = bytes([1]) * {nbytes}")
    (tmp_path / "libraries_inner.py").write_text(f"kept = bytes([1]) * {nbytes}")
    (tmp_path / "libraries_late.py").write_text(f"kept = bytes([1]) * {nbytes}")
    libraries = Libraries()
    with libraries.counted():
        importlib.import_module("libraries_outer")
        more = bytes([1]) * nbytes
    importlib.import_module("libraries_late")
    assert 2 * nbytes - NBYTES <= libraries.nbytes <= 2 * nbytes + NBYTES, len(more)
    assert {"libraries_outer", "libraries_inner"} <= sys.modules.keys()


def held(forward: Callable[[Tensor], Tensor]) -> int:
    x = torch.ones(NBYTES // 4, requires_grad=True)
    torch.autograd.backward(forward(x).sum())
    x.grad = None
    meter = Held("cpu")
    with meter.watch():
        torch.autograd.backward(forward(x).sum())
    x.grad = None
    meter.release()
    assert meter.nbytes is not None
    return meter.nbytes


def layers(x: Tensor) -> Tensor:
    """Saves one tensor: what exp gives is what sin is given."""
    return x.exp().sin().neg()


@pytest.mark.parametrize(
    ("forward", "tensors"),
    [
        (layers, 1),
        (lambda x: layers(x)[1:], 1),
        (lambda x: layers(layers(x)), 2),
        (partial(checkpoint, layers, use_reentrant=False), 0),
    ],
    ids=["one", "a view", "two", "recomputed"],
)
def test_what_autograd_keeps_is_held(forward: Callable[[Tensor], Tensor], tensors: int) -> None:
    assert held(forward) == pytest.approx(tensors * NBYTES, abs=SLACK)


def test_what_no_hook_sees_is_held_too() -> None:
    keep = lambda context, operator, *args, **kwargs: CheckpointPolicy.MUST_SAVE  # noqa: E731
    contexts = partial(create_selective_checkpoint_contexts, keep)
    kept = held(lambda x: checkpoint(layers, x, use_reentrant=False, context_fn=contexts))
    assert kept == pytest.approx(3 * NBYTES, abs=SLACK)  # the outputs of all three operators


def test_garbage_behind_an_autograd_node_is_not_held() -> None:
    """One collection frees the node, and only then the cycle that it holds is garbage."""

    class Cycle:
        def __init__(self, held: object) -> None:
            self.held, self.me = held, self

    inner = Cycle(torch.ones(NBYTES // 4))
    with saved_tensors_hooks(lambda tensor, inner=inner: inner, lambda handle: handle.held):
        outer = Cycle(torch.ones(8, requires_grad=True).exp())
    gc.disable()
    try:
        del inner, outer
        assert held(layers) == pytest.approx(NBYTES, abs=SLACK)
    finally:
        gc.enable()


def test_maps_are_counted_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", mmap.mmap)
    count_maps()
    now = in_use("cpu")
    assert now is not None
    before = now()
    pages = torch.frombuffer(mmap.mmap(-1, NBYTES), dtype=torch.uint8)
    assert now() - before == pytest.approx(NBYTES, abs=SLACK)
    del pages
    assert now() - before == pytest.approx(0, abs=SLACK)


def test_an_allocator_that_does_not_answer_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = torch.zeros(0)
    monkeypatch.setattr(memory.torch, "empty", lambda *shape, **kwargs: nothing)
    assert in_use("cpu") is None


def test_an_error_leaves_backward_as_it_was() -> None:
    backward = torch.autograd.backward
    with pytest.raises(ZeroDivisionError), Held("cpu").watch():
        raise ZeroDivisionError
    assert torch.autograd.backward is backward
