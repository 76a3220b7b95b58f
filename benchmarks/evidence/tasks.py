"""Tasks and stores of `benchmarks.evidence.run`, on data that come with Python and scikit-learn."""

from __future__ import annotations

import argparse
import inspect
import statistics
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import isfinite
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actstore import ActivationStore, Bits
from actstore.bench.workloads import digits, text
from actstore.bench.workloads.gpt import GPT
from actstore.bench.workloads.job import fix_seed
from actstore.bench.workloads.llama import Llama, adapt
from actstore.bench.workloads.lstm import LSTM
from actstore.bench.workloads.resnet import ResNet
from actstore.bench.workloads.vit import ViT
from actstore.bench.workloads.workload import Workload
from benchmarks.evidence.experts import MixtureGPT

HELD_OUT_SHARE = 0.1  # share of a text, at its end, that training never sees
FOLDS = 5  # every fifth scan is held out
EVALUATED_BATCHES = 8  # batches of held-out text
BASE_STEPS = 200  # training steps of the model that adapters are added to

PLAIN = "plain"
ROWS: dict[str, dict[str, Any]] = {  # arguments of ActivationStore; "keep" is bit-identical to plain training
    PLAIN: {"policy": "keep"},
    "int8": {"policy": "int8"},
    "int8(affine)": {"policy": "int8(affine)"},
    "fp8": {"policy": "fp8"},
    "int4": {"policy": "int4"},
    "int4, stochastic": {"policy": "int4(round=stochastic)"},
    "int4, dither": {"policy": "int4(round=dither)"},
    "int4, dither, zeros exact": {"policy": "zmask(int4(round=dither))"},
    "int2, dither": {"policy": "int2(group=32, round=dither)"},
    "topk, a quarter": {"policy": "topk(fraction=0.25)"},
    "bits, noise 0.1": {"policy": "bits", "max_noise": 0.1},
    "bits, as many as int4": {"policy": "bits", "budget_of": "int4(group=64)"},
    "recompute(int8)": {"policy": "recompute(int8)"},  # every block
    "recompute(int4)": {"policy": "recompute(int4)"},
}
# The day since which stores treat a row otherwise: older cells are marked until they run again.
CHANGED = {
    "bits, noise 0.1": "2026-11-25",
    "bits, as many as int4": "2026-11-25",
}

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Data:
    """Data of a task: ``draw(step, seed)`` is a batch to train on; training never sees those of `held_out`."""

    draw: Callable[[int, int], Batch]
    held_out: list[Batch]


@dataclass(frozen=True)
class Task:
    """One model with its data.

    Attributes
    ----------
    title : model and data, for people
    build : builds the model, from generators in the state of `fix_seed`; the model returns the loss of a batch
    data : of these sizes
    work : sizes and steps
    rate : initial learning rate of AdamW; it decays linearly to 0
    classes : whether the head gives classes, whose accuracy is then reported
    stores : version of what stores do to this task's lossy rows; a new one makes their cells run again
    """

    title: str
    build: Callable[[Workload], nn.Module]
    data: Callable[[Workload], Data]
    work: Workload
    rate: float
    classes: bool = False
    stores: int = 1

    def sizes(self) -> dict[str, Any]:
        """Return everything that determines the losses, except the seed."""
        return asdict(self.work) | {"rate": self.rate, "stores": self.stores}


def _windows(characters: str, work: Workload) -> Data:
    codes = {character: code for code, character in enumerate(text.vocabulary())}
    data = torch.tensor([codes[character] for character in characters if character in codes])
    cut = len(data) - int(HELD_OUT_SHARE * len(data))

    def batch(part: Tensor, starts: Tensor) -> Batch:
        index = starts.unsqueeze(1) + torch.arange(work.context)
        return part[index], part[index + 1]

    def draw(step: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        return batch(data[:cut], torch.randint(cut - work.context, (work.batch,), generator=generator))

    count = EVALUATED_BATCHES * work.batch
    starts = torch.linspace(0, len(data) - cut - work.context - 1, count).long()
    return Data(draw, [batch(data[cut:], some) for some in starts.split(work.batch)])


@lru_cache(maxsize=1)
def _help(work: Workload) -> Data:
    return _windows(text.text(), work)


@lru_cache(maxsize=1)
def _source(work: Workload) -> Data:
    modules = (argparse, inspect, statistics, subprocess, tarfile, zipfile)
    return _windows("".join(map(inspect.getsource, modules)), work)


@lru_cache(maxsize=1)
def _digits(work: Workload) -> Data:
    images, labels = digits.scans()
    images = F.interpolate(images, (work.context, work.context), mode="bilinear")
    apart = torch.arange(len(labels)) % FOLDS == 0
    seen = (~apart).nonzero().flatten()

    def draw(step: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        chosen = seen[torch.randint(len(seen), (work.batch,), generator=generator)]
        return images[chosen], labels[chosen]

    return Data(draw, [(images[apart], labels[apart])])


@lru_cache(maxsize=1)
def _base(work: Workload) -> dict[str, Tensor]:
    """Return the weights of a Llama that was trained on help topics, without a store."""
    fix_seed(work.seed)
    model, data = Llama(work), _help(work)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(BASE_STEPS):
        model(*data.draw(step, work.seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _lora(work: Workload) -> nn.Module:
    weights = _base(work)
    fix_seed(work.seed)
    model = Llama(work)
    model.load_state_dict(weights)
    model.requires_grad_(False)
    adapt(model.blocks)
    return model


TASKS = {
    "gpt": Task(
        "a GPT, character by character, on Python's help topics",
        GPT,
        _help,
        Workload("gpt", layers=2, width=96, heads=4, context=64, batch=16, steps=250),
        4e-3,
    ),
    "vit": Task(
        "a vision transformer on scanned digits",
        ViT,
        _digits,
        Workload("vit", layers=2, width=64, heads=2, context=16, batch=64, steps=300),
        2e-3,
        classes=True,
    ),
    "cnn": Task(
        "a ResNet with BatchNorm and ReLU on scanned digits",
        ResNet,
        _digits,
        Workload("resnet", layers=1, width=16, heads=1, context=16, batch=64, steps=150),
        3e-3,
        classes=True,
        stores=2,  # signs are kept after ReLU
    ),
    "moe": Task(
        "a GPT with 2 of 8 experts for each token, character by character, on Python's help topics",
        MixtureGPT,
        _help,
        Workload("moe", layers=2, width=64, heads=4, context=64, batch=16, steps=150),
        4e-3,
    ),
    "lstm": Task(
        "an LSTM cell, character by character, on Python's help topics",
        LSTM,
        _help,
        Workload("lstm", layers=1, width=128, heads=1, context=32, batch=64, steps=150),
        5e-3,
    ),
    "lora": Task(
        "LoRA adapters, on the source of Python modules, of a Llama trained on the help topics",
        _lora,
        _source,
        Workload("lora", layers=2, width=96, heads=4, context=64, batch=16, steps=150),
        5e-3,
    ),
}


def train(task: Task, kwargs: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Train one cell.

    Parameters
    ----------
    kwargs : of ActivationStore, or of `Bits` where its policy is "bits"; without `min_bytes` tensors of any size go
        through the policy. With `budget_of` the budget is what that policy holds in the first step
    seed : of the weights, the order of batches and the store

    Returns
    -------
    dict : losses (of every step; they end where one is not finite), held (bytes at the end of the last forward, by
        those that plain autograd holds; None where the run ended early), held_out, accuracy (None without classes)
    """
    torch.set_num_threads(1)
    work = replace(task.work, seed=seed)
    data = task.data(task.work)
    options = {"min_bytes": 0, "seed": seed, **kwargs}
    if policy := options.pop("budget_of", None):
        options["held"] = _held(task, work, data, {**options, "policy": policy})
    if options["policy"] == "bits":
        options["policy"] = Bits(options.pop("max_noise", None), options.pop("held", None))
    fix_seed(seed)
    model = task.build(work)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], task.rate)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / work.steps)
    store = ActivationStore(model, **options)
    losses: list[float] = []
    for step in range(work.steps):
        with store:
            loss = model(*data.draw(step, seed))
        losses.append(loss.item())
        if not isfinite(losses[-1]):
            break
        report = store.report() if step == work.steps - 1 else None
        loss.backward()
        optimizer.step()
        falling.step()
        optimizer.zero_grad()
    store.close()
    held = None if report is None else report.held_bytes / report.saved_bytes
    return {"losses": losses, "held": held, **_evaluate(model, data.held_out, task.classes)}


def _held(task: Task, work: Workload, data: Data, options: dict[str, Any]) -> int:
    """Return the bytes held at the end of the first forward."""
    fix_seed(work.seed)
    model = task.build(work)
    store = ActivationStore(model, **options)
    with store:
        _loss = model(*data.draw(0, work.seed))  # holds the graph
    return store.report().held_bytes


def _evaluate(model: nn.Module, held_out: list[Batch], classes: bool) -> dict[str, float | None]:
    """Return mean loss, and share of right answers, on data that training never saw."""
    model.eval()
    right: list[float] = []

    def judge(_head: nn.Module, _inputs: Batch, logits: Tensor) -> None:
        right.append((logits.argmax(-1) == held_out[0][1]).double().mean().item())

    if classes:
        model.get_submodule("head").register_forward_hook(judge)
    with torch.no_grad():
        losses = [model(*batch).item() for batch in held_out]
    return {"held_out": fmean(losses), "accuracy": right[0] if classes else None}
