"""Fit of a step: predicted peaks against those that the allocator counts."""

import gc
import json
import resource
import sys
from contextlib import closing, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actstore import ActivationStore, fit_step
from actstore.bench import workloads
from actstore.devices import cpu_memory
from actstore.errors import ConfigError, PolicyError, StateError
from actstore.inspection.fit.largest import largest

EXACT = ("plain", "keep", "recompute", "int8", "int4", "raw @ host")
TOLERANCE = 0.03
SIZES = {
    "gpt": {"layers": 2, "batch": 8},
    "llama": {"layers": 2, "batch": 8},
    "vit": {"layers": 2, "batch": 32},
    "resnet": {"batch": 16},
    "lora": {"layers": 2, "batch": 8},
}

pytestmark = pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here")


def maker(name, **sizes):
    def make_step(batch=SIZES[name]["batch"]):
        job = workloads.make(workloads.sized(name, **{**SIZES[name], **sizes, "batch": batch}, threads=1))
        data = job.batch(0)
        return job.model, lambda: job.loss(*data)

    return make_step


def measured(make_step, policy="plain", **sizes):
    """Return the allocator's peak in the third step, above the bytes before the model was made."""
    gc.collect()
    before = cpu_memory.memory_allocated()
    model, step = make_step(**sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    with nullcontext() if policy == "plain" else closing(ActivationStore(model, policy)) as store:
        for _ in range(3):
            gc.collect()
            cpu_memory.reset_peak()
            with store or nullcontext():
                loss = step()
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        return cpu_memory.max_memory_allocated() - before


def errors(name, policies):
    make_step = maker(name)
    found = fit_step(make_step, policies)
    return {row.policy: row.peak_bytes / measured(make_step, row.policy) - 1 for row in found.rows}


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_predicted_peaks_are_those_of_the_allocator(name):
    assert {policy: error for policy, error in errors(name, EXACT[1:]).items() if abs(error) > TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "vit", "lora"])
def test_predicted_peaks_of_more_models_are_those_of_the_allocator(name):
    assert {policy: error for policy, error in errors(name, EXACT[1:]).items() if abs(error) > TOLERANCE} == {}
