"""The workload: its checks, its text, its batches."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from actstore.bench import workloads
from actstore.bench.workloads.text import Batches, text, text_digest, vocabulary
from actstore.bench.workloads.workload import Workload
from actstore.errors import ConfigError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "--heads 3: must be a divisor of --width 32"),
        ({"layers": 0}, "--layers 0: must be 1 or more"),
        ({"steps": -1}, "--steps -1: must be 1 or more"),
        ({"warmup": -1}, "--warmup -1"),
        ({"dropout": 1.0}, "--dropout 1.0: must be 0 or more"),
        ({"dtype": "int8"}, "must be one of float32, bfloat16, float16"),
    ],
)
def test_refuses(tiny: Workload, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(tiny, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "message"),
    [("tpu9", "must be cpu, cuda"), ("meta", "must be cpu or cuda"), ("cuda:99", "torch sees")],
)
def test_refuses_device(tiny: Workload, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(tiny, device=device).check_device()


def test_survives_a_trip_as_dict(tiny: Workload) -> None:
    assert Workload.from_dict(tiny.to_dict()) == tiny


def test_text_is_english_and_large() -> None:
    assert len(text()) > 100_000
    assert text().count(" the ") > 1000
    assert len(vocabulary()) < 300
    assert len(text_digest()) == 12


def test_batches_follow_the_step_and_the_seed(tiny: Workload) -> None:
    x, y = Batches(tiny)(3)
    again, _ = Batches(tiny)(3)
    assert torch.equal(x, again)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert x.shape == (tiny.batch, tiny.context)
    assert not torch.equal(x, Batches(tiny)(4)[0])
    assert not torch.equal(x, Batches(dataclasses.replace(tiny, seed=1))(3)[0])


def test_the_seed_makes_the_model(tiny: Workload) -> None:
    for a, b in zip(workloads.make(tiny).model.parameters(), workloads.make(tiny).model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_dropout_and_autocast_reach_the_model(tiny: Workload) -> None:
    work = dataclasses.replace(tiny, dropout=0.5, dtype="bfloat16")
    job = workloads.make(work)
    batch = job.batch(0)
    seen: list[torch.dtype] = []
    job.model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    one, other = job.loss(*batch), job.loss(*batch)
    assert one.item() != other.item()
    assert seen[0] == torch.bfloat16
