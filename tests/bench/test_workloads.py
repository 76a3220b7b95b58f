"""The models of the benchmark: each learns, and every lossless store gives its gradients and its state bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from actstore.bench import workloads
from actstore.bench.peers.rows import CHECKPOINT, PLAIN, Row
from actstore.bench.trainer import Trainer
from actstore.bench.workloads import MODELS, digits
from actstore.bench.workloads.workload import Workload
from actstore.errors import ConfigError

SIZES = {
    "gpt": {"layers": 2, "width": 32, "heads": 2, "context": 32, "batch": 8},
    "llama": {"layers": 2, "width": 32, "heads": 8, "context": 32, "batch": 8},
    "lora": {"layers": 2, "width": 32, "heads": 4, "context": 32, "batch": 8},
    "lstm": {"layers": 2, "width": 32, "context": 24, "batch": 8},
    "vit": {"layers": 2, "width": 32, "heads": 2, "context": 16, "batch": 32},
    "resnet": {"layers": 2, "width": 8, "context": 16, "batch": 32},
    "unet": {"layers": 2, "width": 8, "context": 16, "batch": 16},
}
LEARNED = {
    "unet": 0.5,
    "resnet": 0.8,
    "vit": 0.9,
}  # of the first loss, which is ln(10) for digits; text is slow at first
FAST = ("gpt", "resnet", "lstm")  # models of the quick run; `make test-slow` has all
USUAL_AND_SLOW = [model if model in FAST else pytest.param(model, marks=pytest.mark.slow) for model in MODELS]
LOSSLESS = ("keep", "raw @ host", "recompute", "raw @ disk")

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(model: str) -> Workload:
    return workloads.sized(model, **SIZES[model], steps=1, warmup=0, threads=1)


@pytest.fixture(autouse=True)
def small_tensors_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    make: Callable[[Workload], workloads.Job] = workloads.make

    def make_and_set(work: Workload) -> workloads.Job:
        job = make(work)
        job.min_bytes = 0
        return job

    monkeypatch.setattr(workloads, "make", make_and_set)


def test_every_model_is_tested() -> None:
    assert SIZES.keys() == MODELS.keys()


@pytest.mark.parametrize("model", MODELS)
def test_learns(model: str) -> None:
    trainer = Trainer(tiny(model), PLAIN, None)
    trainer.start()
    losses = [trainer.step()[1] for _ in range(30)]
    assert sum(losses[-5:]) / 5 < LEARNED.get(model, 0.95) * losses[0]


@pytest.mark.parametrize("policy", LOSSLESS)
@pytest.mark.parametrize("model", USUAL_AND_SLOW)
def test_lossless_rows_have_plain_gradients_and_state(model: str, policy: str) -> None:
    found = Trainer(tiny(model), Row(policy, "ours", policy), None).check()
    assert found["bit_equal"]
    assert found["grad_error"] == found["state_error"] == 0.0
    if policy == "raw @ host":
        assert found["stored_bytes"] > 0
    if policy == "recompute":
        assert found["peak_held_bytes"] < found["saved_bytes"]


def test_state_that_a_recomputation_changes_twice_is_seen() -> None:
    """torch.utils.checkpoint runs the statistics of BatchNorm twice."""
    found = Trainer(tiny("resnet"), CHECKPOINT, None).check()
    assert found["bit_equal"]
    assert found["state_error"] > 0.01


@pytest.mark.parametrize("model", USUAL_AND_SLOW)
def test_the_policies_of_a_model_name_its_parts(model: str) -> None:
    for policy in MODELS[model].policies:
        found = Trainer(tiny(model), Row(policy, "ours", policy), None).check()
        assert found["bit_equal"], policy
        assert found["peak_held_bytes"] < 0.95 * found["saved_bytes"], policy


@pytest.mark.parametrize("model", MODELS)
def test_the_blocks_run_in_their_order(model: str) -> None:
    """A chain: each gets the tensor that the one before it made, and nothing else."""
    job = workloads.make(tiny(model))
    seen: list[tuple[torch.nn.Module, tuple[torch.Tensor, ...], object]] = []
    for block in job.blocks:
        block.register_forward_hook(lambda module, args, out: seen.append((module, args, out)))
    job.loss(*job.batch(0))
    assert [module for module, _, _ in seen if module in job.blocks[1:]] == job.blocks[1:]
    assert seen[0][0] is job.blocks[0]
    if job.chain:
        assert list(job.model.blocks) == job.blocks
        for (_, _, out), (_, args, _) in pairwise(seen):
            assert args == (out,)


@pytest.mark.parametrize("model", MODELS)
def test_a_seed_gives_the_same_numbers(model: str) -> None:
    one, two = workloads.make(tiny(model)), workloads.make(tiny(model))
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(one.batch(3), two.batch(3), strict=True):
        assert torch.equal(a, b)
    other = workloads.make(dataclasses.replace(tiny(model), seed=1))
    assert not torch.equal(one.batch(3)[0], other.batch(3)[0])
    assert not torch.equal(one.batch(3)[0], one.batch(4)[0])


def test_only_the_adapters_and_the_head_learn_in_a_fine_tune() -> None:
    model = workloads.make(tiny("lora")).model
    learning = {name.rpartition("blocks.")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[-2] for name in learning} == {"down", "up", "head"}
    assert sum(p.requires_grad for p in model.parameters()) == 2 * 7 * 2 + 1


def test_digits_are_scans_and_what_they_show() -> None:
    images, labels = digits.scans()
    assert images.shape == (1797, 1, 8, 8)
    assert (images.min(), images.max()) == (-1, 1)
    assert labels.bincount().min() > 150


def test_noise_is_between_none_and_all() -> None:
    noisy, clean = workloads.make(tiny("unet")).batch(0)
    errors = (noisy - clean).square().mean((1, 2, 3))
    assert errors.min() < 0.3 < errors.max()


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        ("gtp", {}, "no model is called 'gtp'. Near ones: gpt"),
        ("resnet", {"heads": 2}, "--heads does nothing to --model resnet, which has layers, width, context, batch"),
        ("vit", {"context": 30}, "--context 30: .* multiple of 4"),
        ("unet", {"context": 36}, "--context 36: 3 levels .* multiple of 8"),
        ("unet", {"width": 12}, "--width 12: .* multiple of 8"),
        ("gpt", {"context": 10**9}, "--context 1000000000 is longer than the text"),
        ("llama", {"width": 24, "heads": 8}, "--width 24 .* even"),
    ],
)
def test_refuses(model: str, given: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workloads.make(workloads.sized(model, **given))
