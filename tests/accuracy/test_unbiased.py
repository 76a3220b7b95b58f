"""Rounding at random has no mean error: over keys on every kind of data, over draws in the gradients of a GPT."""

import pytest
import torch

from actstore import ActivationStore, encode, measure_gradient_error
from actstore.bench import data, workloads
from actstore.bench.workloads.workload import Workload

MODES = [
    f"{codec}{'(affine, ' if codec == 'int8' else '('}round={rounding})"
    for codec in ("int8", "int6", "int5", "int4", "int3", "int2")
    for rounding in ("stochastic", "dither")
] + ["int8(round=stochastic)", "fp8(round=stochastic)"]
FLOATS = [name for name in data.NAMES if data.make(name, (8, 64)).is_floating_point()]
KEYS = 16
DRAWS = 12

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FLOATS)
def test_the_mean_of_many_encodings_is_the_value(mode, name):
    """|mean error|^2, summed, is what independent errors leave by chance: their variance by the number of keys."""
    x = data.make(name, (64, 256), seed=1)
    errors = torch.stack([encode(x, mode, key).decode() - x for key in range(KEYS)]).double()
    mean, variance = errors.mean(0), errors.var(0)
    left, chance = mean.square().sum(), variance.sum() / KEYS
    assert left <= 1.1 * chance + 1e-11 * x.double().square().sum()
    spread = (errors.square().sum() ** 0.5).item()
    of_bytes = 2e-6 * KEYS * x.abs().sum()  # random bytes are off by 1/512 of a step on average
    assert errors.sum().abs() <= 5 * spread + of_bytes


@pytest.mark.parametrize("mode", ["int8(affine, round=dither)", "int4(round=dither)", "int4(round=stochastic)"])
def test_no_bias_in_the_gradients_of_a_gpt(mode):
    torch.manual_seed(0)
    job = workloads.make(Workload(layers=2, width=64, heads=2, context=64, batch=8, threads=1))
    optimizer = torch.optim.AdamW(job.model.parameters(), 1e-3)
    for step in range(20):
        job.model(*job.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with_store = ActivationStore(job.model, mode, min_bytes=0)
    result = measure_gradient_error(lambda: job.model(*job.batch(20)), with_store, draws=DRAWS)
    assert result.deviation > 1e-4
    assert result.bias <= max(result.least_bias, 0.1 * result.deviation)


def test_rounding_to_nearest_would_be_found():
    x = data.make("gaussian", (64, 256), seed=1)
    errors = torch.stack([encode(x, "int4", key).decode() - x for key in range(KEYS)]).double()
    assert errors.mean(0).square().sum() > 1.1 * errors.var(0).sum() / KEYS
