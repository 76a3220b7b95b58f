"""Figures of what a payload loses: against NumPy in float64, and on codecs with planted faults."""

import importlib
import pkgutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import tests.oracles
from actstore import encode
from actstore.accuracy import Total, measure
from actstore.accuracy.figures import FAINT_MAGNITUDE, MEASURED_NUMEL, MEASURED_RUNS, scratch_nbytes
from tests.codecs.contract import first_of_each, turn

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
VARIANTS = [
    codec
    for found in pkgutil.iter_modules(tests.oracles.__path__)
    for codec in getattr(importlib.import_module(f"tests.oracles.{found.name}"), "VARIANTS", [])
    if not codec.lossless
]
# The first of a codec and every third; the others are slow together.
SOME = [
    pytest.param(codec, marks=() if i % 3 == 0 or codec in first_of_each(VARIANTS) else pytest.mark.slow)
    for i, codec in enumerate(VARIANTS)
]


def figures(*pairs):
    """The figures of payloads, each as (what was encoded, what came back)."""
    total = Total()
    for x, back in pairs:
        total.add(measure(x, back).tolist())
    return total.figures(1, "test", len(pairs), len(pairs), sum(x.nbytes for x, _ in pairs))


def oracle(*pairs):
    """Relative error, gain, bias, largest error, standard error of gain, not finite, lost, as the definitions say."""
    x = np.concatenate([x.double().flatten().numpy() for x, _ in pairs])
    y = np.concatenate([y.double().flatten().numpy() for _, y in pairs])
    largest = [[max([0.0, *q[q.isfinite()].abs().tolist()]) for q in pair] for pair in pairs]
    limits = [most if max(of_x, most) > FAINT_MAGNITUDE else np.inf for of_x, most in largest]
    most = np.concatenate([np.full(q.numel(), limit) for limit, (_, q) in zip(limits, pairs, strict=True)])
    both = np.isfinite(x) & np.isfinite(y)
    lost = (np.isfinite(x) != np.isfinite(y)) | (both & (np.abs(np.where(both, x, 0)) > 2 * most))
    counts = int((~np.isfinite(x)).sum()), int(lost.sum())
    x, e = x[both], y[both] - x[both]
    if not (x**2).sum():
        return None, counts
    rms = np.sqrt((x**2).mean())
    relative = np.sqrt((e**2).sum() / (x**2).sum())
    gain = ((x + e) * x).sum() / (x**2).sum()
    noise = np.sqrt(((e * x) ** 2).sum()) / (x**2).sum()
    return (relative, gain, e.mean() / rms, np.abs(e).max() / rms, noise), counts


def check(*pairs):
    found = figures(*pairs)
    wanted, counts = oracle(*pairs)
    assert (found.nonfinite, found.lost) == counts
    if wanted is not None:
        exact = pytest.approx(wanted, rel=2e-5, abs=2e-6 * (1 + wanted[0] + wanted[3]))
        assert (found.relative, found.gain, found.bias, found.largest, found.gain_noise) == exact
    return found


def noisy(x, generator, size=0.1):
    return (x + size * x.abs() * torch.randn(x.shape, generator=generator)).to(x.dtype)


@given(
    seed=st.integers(0, 2**31),
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]),
    bad=st.lists(st.tuples(st.integers(0, 400), st.booleans(), st.sampled_from([np.nan, np.inf, -np.inf]))),
)
def test_they_are_those_of_the_definition(seed, shapes, dtype, scale, bad):
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for shape in shapes:
        x = (torch.randn(shape, generator=generator) * scale).to(dtype)
        back = noisy(x, generator)
        for at, before, value in bad:
            if x.numel():
                (x if before else back).view(-1)[at % x.numel()] = value
        pairs.append((x, back))
    check(*pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_large_ones_the_chunks_add_up(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1111, generator=generator).to(dtype)
    check((x, noisy(x, generator)))


@pytest.mark.parametrize("order", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:1].expand(5, -1)])
def test_any_layout(order):
    generator = torch.Generator().manual_seed(0)
    x = order(torch.randn(40, 30, generator=generator))
    check((x, noisy(x, generator)))
    check((x, torch.empty_like(x).copy_(noisy(x, generator))))


def test_of_very_large_ones_runs_from_one_end_to_the_other_are_measured():
    x = torch.ones(MEASURED_NUMEL // MEASURED_RUNS + (MEASURED_RUNS - 1) * 2**16)
    back = x.clone()
    back[-1] = 2.0
    found = figures((x, back))
    assert found.largest == 1.0
    back[: x.numel() // 2] = 1.5
    assert figures((x, back)).gain == pytest.approx(1.25, rel=0.01)
    assert scratch_nbytes(x) < x.nbytes


@pytest.mark.parametrize(
    ("x", "back", "wanted"),
    [
        ([], [], (0.0, 1.0, 0.0, 0.0)),
        ([0.0, 0.0], [0.0, 0.0], (0.0, 1.0, 0.0, 0.0)),
        ([0.0, 0.0], [1.0, 0.0], (np.inf, 1.0, np.inf, np.inf)),
        ([3.0] * 5, [3.0] * 5, (0.0, 1.0, 0.0, 0.0)),
        ([np.nan, np.inf], [np.nan, np.nan], (0.0, 1.0, 0.0, 0.0)),
        ([2.0, -2.0], [2.0, -1.0], (0.125**0.5, 0.75, 0.25, 0.5)),
    ],
)
def test_at_the_edges(x, back, wanted):
    found = figures((torch.tensor(x), torch.tensor(back)))
    assert (found.relative, found.gain, found.bias, found.largest) == pytest.approx(wanted)


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_on_a_cpu_only_chunks_with_nan_or_inf_are_masked():
    x = torch.randn(4 * 2**14)
    y = x + 0.01
    with Operators() as found:
        row = measure(x, y)
    assert "aten::bitwise_and.Tensor" not in found.names
    with Operators() as masked:
        x[3], y[2**14] = float("nan"), float("inf")
        other = measure(x, y)
    assert masked.names.count("aten::bitwise_and.Tensor") == 2
    assert other[:3].tolist() == [row[0] - 2, 1, 2]


def test_without_a_payload_that_was_measured_nothing_is_known():
    found = Total().figures(3, "int4", 2, 0, 0)
    assert np.isnan([found.relative, found.gain, found.bias, found.largest]).all()
    assert "no room" in str(found)


def planted(fault):
    """Figures of a codec with a fault, on normal data."""
    x = torch.randn(100, 1000, generator=torch.Generator().manual_seed(1))
    x[3, 5] = np.nan
    return figures((x, fault(x)))


def test_a_sound_codec_raises_no_suspicion():
    generator = torch.Generator().manual_seed(2)
    found = planted(lambda x: noisy(x, generator, 0.3))
    assert found.relative == pytest.approx(0.3, rel=0.02)
    assert (found.nonfinite, found.lost, found.shrunk) == (1, 0, False)
    assert abs(found.bias) < 0.005


@pytest.mark.parametrize("gain", [0.95, 1.05, 0.5])
def test_a_codec_that_shrinks_is_seen(gain):
    found = planted(lambda x: gain * x)
    assert found.gain == pytest.approx(gain)
    assert found.relative == pytest.approx(abs(1 - gain))
    assert found.shrunk
    assert not found.lost


def test_a_codec_with_an_offset_is_seen():
    found = planted(lambda x: x + 0.05)
    assert found.bias == pytest.approx(0.05, rel=0.01)
    assert not found.shrunk


def test_a_codec_that_loses_nan_is_seen():
    assert planted(lambda x: x.nan_to_num(0.0)).lost == 1


def test_a_codec_that_makes_nan_is_seen():
    assert planted(lambda x: torch.where(x > 3, torch.nan, x)).lost > 10


def test_a_codec_that_clips_is_seen():
    found = planted(lambda x: x.clamp(-1, 1))
    assert 4000 < found.lost < 5000  # beyond two standard deviations
    assert found.gain < 0.9


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("codec", SOME, ids=str)
def test_codecs_raise_no_suspicion_on_what_models_save(codec, others):
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(16, 1024, generator=generator)
    outliers = torch.where(torch.arange(1024) % 256 == 3, 60 * normal, normal)
    for x in (normal, normal.relu(), outliers, normal.tanh(), normal[0, :40], 1e4 * normal[0], normal[0, :1]):
        for dtype in (dtype for dtype in DTYPES if (dtype != getattr(torch, turn(codec))) == others):
            tensor = x.to(dtype)
            bound = codec.bind(tensor)
            buffer = torch.empty(bound.nbytes + 64, dtype=torch.uint8)
            payload, back = buffer[-buffer.data_ptr() % 64 :][: bound.nbytes], torch.empty_like(tensor)
            bound.encode(tensor, payload, 5)
            bound.decode(payload, back, 5)
            found = figures((tensor, back))
            assert not found.shrunk, found
            assert not found.lost, found


@pytest.mark.parametrize("codec", ["int8", "int4", "nf4"])
def test_a_payload_that_is_as_good_as_zero_may_vanish(codec):
    """As uninitialized memory may be, on which pipelines run a stage once to know its shapes."""
    x = torch.rand(64, 32, generator=torch.Generator().manual_seed(0)) * 1e-36
    back = encode(x, codec).decode()
    assert figures((x, back)).lost == 0
    assert figures((x, torch.full_like(x, torch.nan))).lost == x.numel()
    assert figures((x * 1e16, torch.zeros_like(x))).lost == x.numel()
