"""fp8: the error bound, bias, special values, every code and every pattern of the 16-bit floats."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import Fp8
from actstore.codecs.int8 import GROUPS
from actstore.errors import ConfigError, SpecError
from tests.codecs.contract import (
    KEY,
    aligned,
    cases,
    check_codec,
    compiled,
    drawn,
    implementations,
    storage_bytes,
    tensor_of,
)
from tests.codecs.counted import check_counts
from tests.codecs.floats import check_all_threads, every_pattern, float_tensors, roundtrip, top_of_groups, ulp
from tests.oracles import fp8 as oracle
from tests.oracles.samples import DTYPES, samples

ROUNDING = [codec for codec in oracle.VARIANTS if codec.signs == "auto"]


def scales_of(codec, payload, numel):
    """The scale of each element, float64."""
    scales = payload[-(-numel // 16) * 16 :].view(torch.bfloat16).double()
    return scales.repeat_interleave(codec.group)[:numel]


def check_bound(codec, x):
    """The bound of csrc/fp8.md, in float64, with the stored scales."""
    payload, back = roundtrip(codec, x)
    exact, found, scales = x.double(), back.double(), scales_of(codec, payload, len(x))
    finite = x.isfinite()
    assert torch.equal(back.isnan(), ~finite)
    assert not back.isinf().any()
    assert torch.equal(back.signbit()[finite], x.signbit()[finite])

    keep = codec.signs == "keep"
    least = scales / (512 if keep else 1024)
    first = torch.maximum(exact.abs() / 16, least) * (1 if codec.round == "nearest" else 2)
    bound = first * (1 + 2.0**-20) + ulp(back) / 2 + 2.0**-98
    assert ((exact - found).abs() <= bound)[finite].all()

    top = top_of_groups(x, codec.group)
    assert torch.equal(scales == 0, top == 0 if keep else top < 2.0**-98)
    if keep:
        assert (scales[(top > 0) & (top < 2.0**-98)] == 2.0**-107).all()
        scales, top = scales[top >= 2.0**-98], top[top >= 2.0**-98]
    assert (scales <= top / 448 * (1 + 2.0**-7 if codec.scale == "linear" else 2)).all()
    assert (scales >= top / 448 * (1 - 2.0**-23))[scales > 0].all()
    if codec.scale == "pow2":
        assert (scales[scales > 0].log2() % 1 == 0).all()


@given(drawn(ROUNDING, float_tensors))
def test_all_implementations_agree(case):
    check_codec(*case)


@pytest.mark.slow
@given(
    st.sampled_from(DTYPES).flatmap(float_tensors),
    st.builds(
        Fp8, st.sampled_from(GROUPS), st.sampled_from(["linear", "pow2"]), st.sampled_from(["nearest", "stochastic"])
    ),
)
def test_all_options(x, codec):
    check_codec(codec, x)
    check_bound(codec, x)


@given(drawn(ROUNDING, float_tensors))
def test_error_bound(case):
    check_bound(*case)


@pytest.mark.parametrize(("codec", "dtype"), cases(oracle.VARIANTS, DTYPES))
def test_error_bound_of_samples(dtype, codec):
    for data in samples(dtype).values():
        check_bound(codec, tensor_of(data, getattr(torch, dtype)))


@pytest.mark.parametrize(("codec", "dtype"), [case for case in cases(ROUNDING, DTYPES) if case.values[1] != "float32"])
def test_every_pattern_of_16_bits(dtype, codec):
    x = every_pattern(getattr(torch, dtype))
    check_codec(codec, x)
    check_bound(codec, x)
    check_codec(codec, x[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))])


@pytest.mark.parametrize(("codec", "dtype"), cases(oracle.VARIANTS, DTYPES))
def test_all_threads(dtype, codec):
    check_all_threads(codec, getattr(torch, dtype))


@pytest.mark.parametrize("codec", oracle.VARIANTS, ids=str)
def test_a_count_on_the_device(codec):
    x = torch.randn(9000, generator=torch.Generator().manual_seed(0)).bfloat16()
    check_counts(codec, x, (0, 1, 2, 31, 33, 64, 1000, 1024, 9000))


def test_the_documented_example():
    payload, back = roundtrip(Fp8(32), torch.tensor([1.0, -0.3, 0.001, torch.nan, -0.0]))
    assert bytes(payload.tolist()) == bytes.fromhex("7ef02e7f80" + "00" * 11 + "133b")
    assert back.nan_to_num(7).tolist() == [1.0048828125, -0.287109375, 0.0009813308715820312, 7, 0]
    assert back.signbit()[-1]


def test_codes_are_those_of_torch():
    """With a scale of 1: the conversion that torch has."""
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-12, 4).repeat(1 << 10)
    x = x.clamp(-448, 448).view(-1, 1024)
    x[:, 0] = 448
    payload, back = roundtrip(Fp8(1024), x)
    assert torch.equal(payload[: x.numel()], x.to(torch.float8_e4m3fn).view(torch.uint8).flatten())
    assert torch.equal(back, x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_code_decodes_alike_with_any_scale(dtype):
    codes = np.repeat(np.arange(256, dtype=np.uint8).reshape(8, 32), 30, axis=0)
    exponents = np.linspace(10, 246, 30).astype(np.uint16)  # 2^-117 to just below 2^120
    scales = np.tile(exponents << 7 | 0x7F, 8).astype("<u2")
    payload = codes.tobytes() + scales.tobytes()
    expected = oracle.decode(payload, codes.size, dtype, 32)
    assert not np.isinf(oracle.to_float32(expected, dtype)).any()
    for way in implementations(Fp8(32), getattr(torch, dtype)):
        _, buf = aligned(len(payload))
        back = torch.empty(codes.size, dtype=getattr(torch, dtype))
        way.decode(buf.copy_(tensor_of(payload, torch.uint8)), back)
        assert storage_bytes(back) == expected, way.name


def test_stochastic_rounding_has_no_bias():
    """The mean over many keys, element by element, in units of the distance of the codes."""
    t = torch.cat([torch.linspace(-448, 448, 255), torch.linspace(-0.03, 0.03, 256), torch.tensor([448.0])])
    codec, total, rounds = Fp8(512, "pow2", "stochastic"), torch.zeros(512, dtype=torch.float64), 2000
    for key in range(rounds):
        payload, back = roundtrip(codec, t, key)
        total += back.double()
    assert (scales_of(codec, payload, 512) == 1).all()
    step = 2.0 ** (t.double().abs().clamp(min=2.0**-6).log2().floor() - 3)
    error = ((total / rounds - t.double()) / step).abs()
    assert error.max() < 1 / 512 + 5 * 0.5 / rounds**0.5
    assert error.mean() < 1 / 512 + 0.4 / rounds**0.5
    exact = t == t.to(torch.float8_e4m3fn).float()
    assert 0 < exact.sum() < 40
    assert (error[exact] == 0).all()


def test_nearest_rounding_goes_to_even():
    _, back = roundtrip(Fp8(32), torch.tensor([448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10]))
    assert back.tolist() == [448, 16, 20, -16, 0, 2.0**-8]


def test_the_key_matters_only_where_it_is_used():
    x = torch.randn(512, generator=torch.Generator().manual_seed(0))
    for codec in oracle.VARIANTS:
        one, other = roundtrip(codec, x, KEY)[0], roundtrip(codec, x, KEY + 1)[0]
        assert torch.equal(one, other) != codec.keyed
        assert torch.equal(one, roundtrip(codec, x, KEY)[0])


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_one_bad_element_leaves_its_group_alone(bad):
    x = torch.linspace(-1, 1, 128)
    _, clean = roundtrip(Fp8(), x)
    x[64] = bad
    _, back = roundtrip(Fp8(), x)
    assert back[64].isnan()
    assert torch.equal(back[:64], clean[:64])
    assert torch.equal(back[65:], clean[65:])


def test_flushing_denormals_changes_nothing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        for codec, dtype in compiled(ROUNDING):
            options = {"group": codec.group, "scale": codec.scale, "round": codec.round, "key": KEY}
            for data in samples(dtype).values():
                payload, back = roundtrip(codec, tensor_of(data, getattr(torch, dtype)))
                torch.set_flush_denormal(False)
                expected = oracle.encode(data, dtype, **options)
                expected_back = oracle.decode(expected, back.numel(), dtype, **options)
                torch.set_flush_denormal(True)
                assert bytes(payload.tolist()) == expected
                assert storage_bytes(back) == expected_back
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("group", [0, 16, 48, 2048, 128.0, True, "128", None])
def test_other_groups_are_refused(group):
    with pytest.raises(ConfigError, match="must be 32, 64, 128, 256, 512 or 1024"):
        Fp8(group)


def test_other_options_are_refused():
    with pytest.raises(ConfigError, match="must be linear or pow2"):
        Fp8(scale="floor")
    with pytest.raises(ConfigError, match="must be nearest or stochastic"):
        Fp8(round="dither")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(SpecError, match="Use 'raw'"):
        Fp8().size(Spec.of(torch.empty(8, dtype=dtype)))
