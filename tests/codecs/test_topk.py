"""topk: which elements are kept, and what becomes of them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import AtMost, Int8, Topk
from actstore.errors import ConfigError, SpecError
from tests.codecs.contract import check_codec, storage_bytes, tensor_of
from tests.codecs.test_int8 import elements

TILE = 1024


def roundtrip(codec, x, key=0):
    out = torch.empty(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8)
    assert codec.encode(x, out, key) == len(out)
    back = torch.empty_like(x)
    codec.decode(out, back, key)
    return out, back


def magnitudes(x):
    bits = x.view(torch.int32 if x.dtype.itemsize == 4 else torch.int16)
    return bits & torch.iinfo(bits.dtype).max


def kept_of(payload, numel):
    octets = payload[16:][: -(-numel // 8)].view(-1, 1) >> torch.arange(8)
    return octets.view(-1)[:numel] & 1 != 0


def check_rows(x, payload, back, row, kept_of_row):
    """Kept elements come back bit for bit, dropped ones as +0.0 and none larger than a kept one; how many are kept."""
    kept = kept_of(payload, x.numel())
    found = magnitudes(x)
    bits = back.view(torch.int32 if x.dtype.itemsize == 4 else torch.int16)
    assert storage_bytes(back[kept]) == storage_bytes(x[kept])
    assert not bits[~kept].any()
    for start in range(0, x.numel(), row):
        mask, values = kept[start : start + row], found[start : start + row]
        assert mask.sum() == kept_of_row(len(values))
        if mask.all():
            continue
        least, largest = values[mask].min(), values[~mask].max()
        assert least >= largest
        if least == largest:  # the first of equal ones
            assert (values[mask] == least).nonzero().size(0) > 0
            ties = (values == least).nonzero().view(-1)
            taken = mask[ties]
            assert taken[: int(taken.sum())].all()


@given(elements(), st.floats(0.001, 1))
def test_keeps_the_largest(case, fraction):
    dtype, data = case
    x = tensor_of(data, getattr(torch, dtype))
    fraction = round(fraction, 3)
    payload, back = roundtrip(Topk(fraction), x)
    check_rows(x, payload, back, TILE, lambda size: math.ceil(round(fraction * 1000) * size / 1000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_several_tiles(dtype):
    x = torch.randn(5 * TILE + 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    payload, back = roundtrip(Topk(0.1), x)
    check_rows(x, payload, back, TILE, lambda size: 103 if size == TILE else 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern_of_16_bits(dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))
    for codec, y in ((Topk(0.5), x), (Topk(0.5), x[order]), (Topk(1.0), x[order])):
        payload, back = roundtrip(codec, y)
        check_rows(y, payload, back, TILE, lambda size, codec=codec: int(codec.fraction * size))
    check_codec(Topk(0.5), x[order][:4096])


def test_bad_elements_come_first():
    x = torch.cat([torch.full((500,), 3.4e38), torch.tensor([torch.inf, torch.nan, -torch.inf]), torch.ones(521)])
    _, back = roundtrip(Topk(0.002), x)
    assert back.nonzero().view(-1).tolist() == [500, 501, 502]
    _, back = roundtrip(Topk(0.001), x[:1000])
    assert back.nonzero().view(-1).tolist() == [501]


def test_inner_codec():
    """What is kept has the bound of int8: its groups hold kept elements alone."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    payload, back = roundtrip(Topk(0.25, Int8(32)), x)
    kept = kept_of(payload, 4096)
    groups = x[kept].view(-1, 32)
    bound = groups.abs().amax(1, keepdim=True) / 127 * (1 + 2.0**-7) / 2 * (1 + 2.0**-15) + 2.0**-22
    assert ((groups - back[kept].view(-1, 32)).abs() <= bound).all()
    assert not back[~kept].any()


@pytest.mark.parametrize(
    ("fraction", "size", "kept"), [(0.07, 100, 7), (0.3, 10, 3), (0.25, 3, 1), (1, 5, 5), (1e-6, 9, 1)]
)
def test_the_fraction_is_the_decimal_that_it_is_written_as(fraction, size, kept):
    assert Topk(fraction)._rule.of(size) == kept


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, True, "0.5", None, float("nan")])
def test_other_fractions_are_refused(fraction):
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        Topk(fraction)


def test_is_for_floats_and_lossy():
    assert not Topk(1.0).lossless
    assert not isinstance(Topk().size(Spec.of(torch.ones(5))), AtMost)
    with pytest.raises(SpecError, match="Use 'raw'"):
        Topk().size(Spec.of(torch.ones(5, dtype=torch.int32)))
