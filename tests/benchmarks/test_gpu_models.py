"""Models and rows of the GPU suite: sizes, precisions, and what is compared."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actstore.bench.workloads.workload import Workload
from benchmarks.gpu.llama import Bench
from benchmarks.gpu.llama_model import Job, Sizes
from benchmarks.gpu.llama_rows import TILED_ROWS, entered, named
from benchmarks.gpu.models import SUBJECTS, ModelJob
from benchmarks.gpu.parts import FIRST_DTYPES, MODELS
from benchmarks.gpu.place import Place, Sheet
from benchmarks.gpu.resnet50 import ResNet50

CPU = Place("cpu", small=True)


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def test_the_resnet_has_torchvisions_sizes() -> None:
    full = SUBJECTS["resnet"].full
    with torch.device("meta"):
        model = ResNet50(Workload("resnet", **full))
        shapes: list[tuple[int, ...]] = []
        for block in model.blocks:
            block.register_forward_hook(lambda _, args, out: shapes.append(tuple(out.shape)))
        loss = model(torch.empty(256, 3, 224, 224), torch.empty(256, dtype=torch.long))
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    assert sum(b.numel() for b in model.buffers()) == 53_120 + 53  # statistics, and counts of batches
    stages = [(256, 256, 56, 56), (256, 512, 28, 28), (256, 1024, 14, 14), (256, 2048, 7, 7)]
    assert shapes == [shape for shape, count in zip(stages, (3, 4, 6, 3), strict=True) for _ in range(count)]
    assert (loss.shape, full["batch"]) == ((), 256)


def test_the_transformer_has_the_sizes_of_vit_l() -> None:
    with torch.device("meta"):
        model = SUBJECTS["vit"].model(Workload("vit", **SUBJECTS["vit"].full))
    assert sum(p.numel() for p in model.blocks.parameters()) == 302_309_376  # those of ViT-L's encoder
    assert model.positions.shape == (1, 197, 1024)


def test_each_model_has_each_precision() -> None:
    precisions = {(name.partition("_")[0], subject.dtype) for name, subject in SUBJECTS.items()}
    assert precisions == {(name, dtype) for name in FIRST_DTYPES for dtype in ("float32", "bfloat16", "float16")}
    assert len(precisions) == len(MODELS) == len({subject.title for subject in SUBJECTS.values()})


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_in_its_precision(name: str) -> None:
    subject = SUBJECTS[name]
    job = ModelJob(CPU, subject)
    seen: set[torch.dtype] = set()
    for module in job.model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.register_forward_hook(lambda _, args, out: seen.add(out.dtype))
        if isinstance(module, nn.Conv2d) and subject.channels_last:
            assert module.weight.is_contiguous(memory_format=torch.channels_last)
    loss = job.forward()
    job.backward(loss)
    assert getattr(torch, subject.dtype) in seen
    assert (loss.item() > 100) == (subject.dtype == "float16")  # scaled
    assert all(grad.isfinite().all() for grad in job.gradients())


class Restless(Job):
    """A job whose first gradient is another one each time, as of an operator that adds in any order."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.gradients()[0].add_(torch.rand(()))


class Broken(Job):
    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.gradients()[0].fill_(torch.nan)


def test_gradients_that_are_not_finite_are_not_compared_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="not finite"):
        Bench(Broken(CPU, Sizes.at(CPU, layers=1, tokens=16)), Sheet(tmp_path / "found.json", ["keep"]))


def test_gradients_that_plain_steps_do_not_repeat_are_not_compared(tmp_path: Path) -> None:
    rows = named("keep", "int8")
    for kind, unrepeated in ((Job, 0), (Restless, 1)):
        sheet = Sheet(tmp_path / f"{kind.__name__}.json", [row.name for row in rows])
        bench = Bench(kind(CPU, Sizes.at(CPU, layers=1, tokens=16)), sheet)
        assert sheet.found["unrepeated"] == unrepeated
        assert [bench.run(row)["equal"] for row in rows] == [True, False]


class Fused(nn.Module):
    """In place of Liger's kernel, which needs a GPU: takes what that takes."""

    calls = 0

    def forward(self, weight: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
        Fused.calls += 1
        return F.cross_entropy(F.linear(hidden, weight).float(), target)


def test_rows_of_a_loss_in_slices_leave_plain_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    vars(module)["LigerFusedLinearCrossEntropyLoss"] = Fused
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    job: Any = Job(CPU, Sizes.at(CPU, layers=1, tokens=256, vocabulary=2000))
    assert job.model.loss.head.weight.shape[0] == 2000
    job.step(nullcontext())
    expected = [grad.clone() for grad in job.gradients()]
    slices: list[int] = []
    cross_entropy = F.cross_entropy
    monkeypatch.setattr(
        F, "cross_entropy", lambda *args, **kwargs: (slices.append(1), cross_entropy(*args, **kwargs))[1]
    )
    for row in TILED_ROWS:
        slices.clear()
        with entered(row, job) as (enter, store):
            job.step(enter())
        assert (len(slices) >= 16) == (store is not None)
        for found, wanted in zip(job.gradients(), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.05, atol=2e-3)
    assert Fused.calls == 1
    assert "forward" not in vars(job.model.loss)
