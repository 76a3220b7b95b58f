"""e5m6: the error bound, special values, every code and every pattern of the 16-bit floats."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import E5m6, Exact
from actstore.errors import SpecError
from tests.codecs.contract import aligned, check_codec, implementations, storage_bytes, tensor_of
from tests.codecs.counted import check_counts
from tests.codecs.floats import check_all_threads, every_pattern, float_tensors, roundtrip
from tests.oracles import e5m6 as oracle
from tests.oracles.samples import DTYPES, samples

OVER = 65280  # from here on Inf


def check_bound(x):
    """The bound of csrc/e5m6.md, in float64."""
    _, back = roundtrip(E5m6(), x)
    exact, found = x.double(), back.double()
    magnitude = exact.abs()
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.isinf(), magnitude >= OVER)
    assert torch.equal(back.signbit()[~x.isnan()], x.signbit()[~x.isnan()])
    fits = magnitude < OVER
    assert ((exact - found).abs() <= (magnitude / 128).clamp(min=2.0**-21))[fits].all()


def all_codes():
    """Payload of the codes 0 to 4095, in order."""
    codes = torch.arange(4096)
    low = (codes & 15).view(-1, 2)
    return torch.cat([codes >> 4, low[:, 0] + 16 * low[:, 1]]).to(torch.uint8)


@given(st.sampled_from(DTYPES).flatmap(float_tensors))
def test_all_implementations_agree(x):
    check_codec(E5m6(), x)


@given(st.sampled_from(DTYPES).flatmap(float_tensors))
def test_error_bound(x):
    check_bound(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", samples("float32"))
def test_error_bound_of_samples(dtype, case):
    check_bound(tensor_of(samples(dtype)[case], getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern_of_16_bits(dtype):
    x = every_pattern(dtype)
    check_codec(E5m6(), x)
    check_bound(x)
    check_codec(E5m6(), x[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code(dtype):
    """Decodes alike everywhere, and what it stands for has that code."""
    payload, kind = all_codes(), getattr(torch, dtype)
    for way in implementations(E5m6(), kind):
        _, buf = aligned(len(payload))
        back = torch.empty(4096, dtype=kind)
        way.decode(buf.copy_(payload), back)
        assert storage_bytes(back) == oracle.decode(payload.numpy().tobytes(), 4096, dtype), way.name
    again, _ = roundtrip(E5m6(), back)
    numbers = ~back.isnan()
    assert numbers.sum() == 4096 - 2 * 63
    assert torch.equal(again[:4096][numbers], payload[:4096][numbers])
    assert torch.equal(again[4096:][numbers.view(-1, 2).all(1)], payload[4096:][numbers.view(-1, 2).all(1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ties_go_to_even_codes(dtype):
    x = torch.tensor([1 + 1 / 128, 1 + 3 / 128, -1 - 5 / 128, 2.0**-21, 3 * 2.0**-21, 65248.0, 65280.0], dtype=dtype)
    _, back = roundtrip(E5m6(), x)
    assert back.tolist() == [1.0, 1 + 2 / 64, -1 - 2 / 64, 0.0, 2.0**-19, 65024.0, torch.inf]


@pytest.mark.parametrize("codec", [E5m6()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_threads(dtype, codec):
    check_all_threads(codec, getattr(torch, dtype))


@pytest.mark.parametrize("codec", [E5m6()], ids=str)
def test_a_count_on_the_device(codec):
    x = torch.randn(9000, generator=torch.Generator().manual_seed(0)).bfloat16()
    check_counts(codec, x, (0, 1, 2, 31, 33, 64, 1000, 1024, 9000))


def test_the_documented_example():
    payload, back = roundtrip(E5m6(), torch.tensor([1.0, -0.3, 70000.0, torch.nan, -0.0]))
    assert bytes(payload.tolist()) == bytes.fromhex("3cb47c7e80" + "00" * 11 + "d00000")
    assert back.nan_to_num(7, posinf=8).tolist() == [1.0, -0.30078125, 8, 7, 0]
    assert back.signbit().tolist() == [False, True, False, False, True]


def test_flushing_denormals_changes_nothing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        for dtype in DTYPES:
            for data in samples(dtype).values():
                payload, back = roundtrip(E5m6(), tensor_of(data, getattr(torch, dtype)))
                torch.set_flush_denormal(False)
                expected = oracle.encode(data, dtype)
                expected_back = oracle.decode(expected, back.numel(), dtype)
                torch.set_flush_denormal(True)
                assert bytes(payload.tolist()) == expected
                assert storage_bytes(back) == expected_back
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(("numel", "nbytes"), [(0, 0), (1, 17), (2, 17), (16, 24), (17, 41), (1 << 40, 3 << 39)])
def test_size(numel, nbytes):
    assert E5m6().size(Spec((numel,), (1,), torch.float32, torch.device("cpu"))) == Exact(nbytes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(SpecError, match="Use 'raw'"):
        E5m6().size(Spec.of(torch.empty(8, dtype=dtype)))
