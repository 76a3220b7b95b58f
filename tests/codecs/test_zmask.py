"""zmask: lossless where its inner codec is, exact zeros, and the sizes that it is there for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import Int8, Zmask
from actstore.errors import SpecError
from tests.codecs.contract import check_codec, storage_bytes, tensor_of
from tests.oracles.samples import DTYPES, EVERY_DTYPE, ITEMSIZE, SPECIAL


def roundtrip(codec, x, key=0):
    out = torch.empty(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8)
    used = codec.encode(x, out, key)
    back = torch.empty_like(x)
    codec.decode(out[:used], back, key)
    return used, back


def relu_output(dtype, numel=1 << 20):
    return torch.relu(torch.randn(numel, generator=torch.Generator().manual_seed(0))).to(dtype)


@given(st.sampled_from(EVERY_DTYPE), st.integers(1, 4000), st.floats(0, 1), st.integers(0, 1 << 30))
def test_every_bit_comes_back(dtype, numel, share, seed):
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2 if kind is torch.bool else 256, (numel, kind.itemsize), generator=generator)
    data *= torch.rand((numel, 1), generator=generator) < share
    x = data.to(torch.uint8).view(kind).view(-1)
    used, back = roundtrip(Zmask(), x)
    assert storage_bytes(back) == storage_bytes(x)
    kept = int(data.any(1).sum())
    assert used == 16 + -(-numel // 128) * 16 + -(-numel // 2048) * 16 + kept * kind.itemsize


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern_of_16_bits(dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    check_codec(Zmask(), x)
    sparse = x.clone()
    sparse[torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) < 0.7] = 0
    check_codec(Zmask(), sparse, cuda=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_are_kept_and_zeros_left_out(dtype):
    unsigned = {2: "<u2", 4: "<u4"}[ITEMSIZE[dtype]]
    sign = 1 << (8 * ITEMSIZE[dtype] - 1)
    patterns = [bits | extra for bits in SPECIAL[dtype] for extra in (0, sign)]
    x = tensor_of(b"".join(bits.to_bytes(ITEMSIZE[dtype], "little") for bits in patterns), getattr(torch, dtype))
    used, back = roundtrip(Zmask(), x)
    assert storage_bytes(back) == storage_bytes(x), unsigned
    assert used == 16 + 16 + 16 + (len(patterns) - 1) * ITEMSIZE[dtype]  # all but +0.0


@given(
    st.sampled_from(DTYPES),
    st.integers(1, 3000),
    st.sampled_from(["nearest", "stochastic", "dither"]),
    st.sampled_from(["normal", "heavy", "one-sided", "constant", "denormal"]),
    st.integers(0, (1 << 63) - 1),
)
def test_zeros_are_exact_and_the_others_have_the_bound_of_the_inner_codec(dtype, numel, rounding, kind, key):
    generator = torch.Generator().manual_seed(key % 1000)
    x = torch.randn(numel, generator=generator)
    if kind == "heavy":
        x = x / torch.rand(numel, generator=generator).clamp_min(1e-4)
    elif kind == "one-sided":
        x = x.abs() + 1
    elif kind == "constant":
        x = torch.full((numel,), -3.0)
    elif kind == "denormal":
        x = x * 2.0**-127
    x = (x * (torch.rand(numel, generator=generator) < 0.5)).to(getattr(torch, dtype))
    x[x == 0] = 0  # no -0.0
    _, back = roundtrip(Zmask(Int8(32, round=rounding)), x, key)
    kept = x.view(torch.int16 if ITEMSIZE[dtype] == 2 else torch.int32) != 0
    assert not back[~kept].view(torch.int16 if ITEMSIZE[dtype] == 2 else torch.int32).any()
    values = x[kept]
    expected = torch.empty_like(values)
    if len(values):
        expected = roundtrip(Int8(32, round=rounding), values, key)[1]
    assert torch.equal(back[kept], expected)


def test_dither_alone_spoils_zeros():
    """The reason to put it under a mask."""
    x = relu_output(torch.float32, 4096)
    dither = Int8(round="dither")
    assert (roundtrip(dither, x, 3)[1][x == 0] != 0).float().mean() > 0.9
    assert not roundtrip(Zmask(dither), x, 3)[1][x == 0].any()


@pytest.mark.parametrize(
    ("dtype", "codec", "ratio"),
    [
        (torch.bfloat16, Zmask(), 1.75),
        (torch.bfloat16, Zmask(Int8()), 3.1),
        (torch.float32, Zmask(), 1.87),
        (torch.float32, Zmask(Int8()), 6.2),
    ],
)
def test_ratio_on_relu_outputs(dtype, codec, ratio):
    x = relu_output(dtype)
    used, back = roundtrip(codec, x)
    assert x.numel() * dtype.itemsize / used >= ratio
    assert codec.lossless == torch.equal(back, x)


def test_dtypes():
    assert all(Zmask().accepts(getattr(torch, dtype)) for dtype in EVERY_DTYPE)
    assert not Zmask().accepts(torch.complex128)
    assert not Zmask(Int8()).accepts(torch.int32)
    with pytest.raises(SpecError, match="Use 'raw'"):
        Zmask().size(Spec.of(torch.empty(4, dtype=torch.complex128)))
