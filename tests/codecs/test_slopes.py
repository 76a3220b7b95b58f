"""Levels of what some slopes depend on: sides are exact, the rest is off by half a level at most."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from actstore.base.spec import Spec
from actstore.codecs.slopes import BITS, Levels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def decoded(codec, x):
    out = torch.empty(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8)
    assert codec.encode(x, out) == out.numel()
    back = torch.full_like(x, 7)
    codec.decode(out, back)
    return back


def numbers(dtype):
    torch.manual_seed(0)
    ends = torch.tensor([-3.0, 3.0, 0.0, -0.0, torch.inf, -torch.inf, 1e-6, -1e-6], dtype=dtype)
    beside = [torch.nextafter(ends, torch.tensor(end, dtype=dtype)) for end in (9.0, -9.0)]
    return torch.cat([ends, *beside, 2 * torch.randn(5003).to(dtype)])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_between_the_bounds(bits, dtype):
    codec, x = Levels(bits=bits), numbers(dtype)
    back = decoded(codec, x)
    assert torch.equal(back <= -3, x <= -3)
    assert torch.equal(back >= 3, x >= 3)
    inside = (x > -3) & (x < 3)
    bound = 3 / codec.count * (1 + torch.finfo(dtype).eps) + 3 * torch.finfo(dtype).eps
    assert (back - x)[inside].abs().max() <= bound


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slopes_of_elu(bits, rate, dtype):
    codec, x = Levels(curve="exp", rate=rate, bits=bits), numbers(dtype)
    back = decoded(codec, x)
    assert torch.equal(back > 0, x > 0)
    inside = x <= 0
    off = (back.float() * rate).exp() - (x.float() * rate).exp()
    assert off[inside].abs().max() <= 0.5 / codec.count + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("codec", [Levels(), Levels(curve="exp"), Levels(bits=4)])
def test_nan_stays(codec):
    x = torch.tensor([1.0, torch.nan, -1.0])
    assert torch.equal(decoded(codec, x).isnan(), x.isnan())


@pytest.mark.parametrize(
    ("function", "codec", "most"),
    [
        (F.hardswish, Levels(), 1 / 253),
        (F.selu, Levels(curve="exp"), 0.88 / 253),
        (F.elu, Levels(curve="exp"), 0.5 / 253),
    ],
)
def test_gradients(function, codec, most):
    """Their slopes are off by the bound, and nowhere by a decision."""
    x = numbers(torch.float32)
    found = []
    for values in (x, decoded(codec, x)):
        values.requires_grad_()
        found += torch.autograd.grad(function(values).sum(), values)
    assert (found[1] - found[0]).abs().max() <= most * 1.001 + 1e-6


def test_what_fits():
    assert [Levels().within(nbytes, 1000).bits for nbytes in (1016, 875, 750, 625, 500, 375, 250)] == [
        8,
        6,
        6,
        5,
        4,
        3,
        2,
    ]
    assert Levels().within(100, 1000) is None
