"""Each peer at a tiny size: plain's gradients or the stated error, and fewer bytes where it promises that."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from actstore import ActivationStore
from actstore.bench import workloads
from actstore.bench.peers import NotApplicable, rows, wrap
from actstore.bench.peers.rows import ROWS, Row
from actstore.bench.trainer import Trainer
from actstore.bench.workloads.job import Job
from actstore.bench.workloads.workload import Workload

BY_NAME = {row.name: row for row in ROWS}

pytestmark = pytest.mark.usefixtures("one_thread")


def sized(tiny: Workload) -> Workload:
    """Large enough that the activations are more than the graph that holds them."""
    return dataclasses.replace(tiny, layers=4, width=64, context=128, batch=2)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("plain", 0.95, 1.1),
        ("torch checkpoint", 0.0, 0.25),
        ("checkpoint every k-th", 0.3, 0.7),
        ("selective checkpoint", 0.3, 0.75),  # what it keeps passes no saved-tensor hook
        ("checkpoint_sequential", 0.3, 0.7),
        ("save_on_cpu", 0.95, 1.1),
        ("torch_remat, attention kept", 0.3, 0.75),
        ("DeepSpeed checkpoint", 0.0, 0.25),
    ],
)
def test_exact_peers_have_plain_gradients(tiny: Workload, name: str, least: float, most: float) -> None:
    row = BY_NAME[name]
    if row.package:
        pytest.importorskip(row.package)
    found = Trainer(sized(tiny), row, None).check()
    assert found["bit_equal"]
    assert found["grad_error"] == 0.0
    assert least < found["held_bytes"] / found["saved_bytes"] < most


@pytest.mark.parametrize("policy", ["raw @ host", "int8", "recompute"])
def test_our_report_says_what_the_allocator_says(tiny: Workload, policy: str) -> None:
    work = sized(tiny)
    row = Row(policy, "ours", policy)
    counted = Trainer(work, row, None).check()
    job = workloads.make(work)
    store = ActivationStore(job.model, policy)
    for _ in range(3):  # as many as are counted: in the second one samples of gradients are held
        with store:
            loss = job.loss(*job.batch(0))
        job.backward(loss)
    report = store.report()
    store.close()
    assert report.saved_bytes == pytest.approx(counted["saved_bytes"], rel=0.01)
    assert report.held_bytes == pytest.approx(counted["held_bytes"], abs=0.05 * counted["saved_bytes"])


def test_a_plan_holds_the_share_that_it_was_given(tiny: Workload) -> None:
    pytest.importorskip("scipy")
    found = Trainer(sized(tiny), BY_NAME["auto 75 %"], None).check()
    assert found["bit_equal"]
    assert found["peak_held_bytes"] <= 0.75 * found["saved_bytes"]


def test_a_share_that_is_too_small_is_left_out_with_the_least(tiny: Workload) -> None:
    pytest.importorskip("scipy")
    with pytest.raises(NotApplicable, match="the least budget that is possible here is"):
        Trainer(sized(tiny), Row("auto 1 %", "ours", share=0.01), None).check()


@pytest.mark.parametrize(
    "name", ["torch checkpoint", "selective checkpoint", "checkpoint_sequential", "int8, compiled"]
)
def test_a_model_without_blocks_is_left_out(tiny: Workload, name: str) -> None:
    job = workloads.make(tiny)
    bare = Job(tiny, job.model, [], job.batch, chain=False)
    with pytest.raises(NotApplicable, match="blocks"):
        wrap(BY_NAME[name], bare, None)


def test_blocks_without_attention_are_left_out_where_it_would_be_kept(tiny: Workload) -> None:
    pytest.importorskip("torch_remat")
    job = workloads.make(dataclasses.replace(tiny, model="lstm"))
    with pytest.raises(NotApplicable, match="the blocks have no attention that is known"):
        wrap(BY_NAME["torch_remat, attention kept"], job, None)


def test_offload_needs_a_gpu(tiny: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "find_spec", lambda name: object())
    assert "on a CPU it asks for a CUDA stream" in BY_NAME["torchtune offload"].missing(tiny)
    assert BY_NAME["torchtune offload"].missing(dataclasses.replace(tiny, device="cuda")) == ""


@pytest.mark.parametrize("name", ["torchtune offload", "TRL offload"])
def test_offload_refuses_a_cpu_by_itself(tiny: Workload, name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    row = BY_NAME[name]
    pytest.importorskip(row.package)
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):  # the last one is of PyTorch's CUDA builds
        wrap(row, workloads.make(tiny), None)


@pytest.mark.parametrize("row", [row for row in ROWS if row.package], ids=lambda row: row.name)
def test_a_peer_without_its_package_says_so(tiny: Workload, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "find_spec", lambda name: None)
    assert row.missing(tiny) == f"{row.package} is not installed"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
@pytest.mark.parametrize(
    "name", ["compile", "compile, budget 0.5", "recompute, compiled", "int8, compiled", "int8 in the graph"]
)
def test_compiled_rows_train(tiny: Workload, name: str) -> None:
    torch._dynamo.reset()
    try:
        found = Trainer(sized(tiny), BY_NAME[name], None).check()
    finally:
        torch._dynamo.reset()
    assert found["grad_error"] < (1e-2 if "int8" in name else 1e-6)
    assert 0 < found["held_bytes"] < 1.1 * found["saved_bytes"]
