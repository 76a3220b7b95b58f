"""int8: the error bound, special values, and every pattern of the 16-bit floats."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import Int8
from actstore.codecs.int8 import GROUPS, ROUNDINGS
from actstore.errors import ConfigError, SpecError
from tests.codecs.contract import aligned, check_codec, drawn, implementations, storage_bytes, tensor_of
from tests.oracles import int8 as oracle
from tests.oracles.samples import DTYPES, ITEMSIZE, SPECIAL, every_code_and_scale, samples, to_bytes

PLAIN = [codec for codec in oracle.VARIANTS if codec == Int8(codec.group)]


def roundtrip(x, group=128):
    codec = Int8(group)
    payload = torch.empty(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8)
    codec.encode(x, payload)
    back = torch.empty_like(x)
    codec.decode(payload, back)
    return payload, back


def check_bound(x, group):
    """The bound of csrc/int8.md, in float64, with the stored scales."""
    payload, back = roundtrip(x, group)
    numel = x.numel()
    scales = payload[-(-numel // 16) * 16 :].view(torch.bfloat16).double().repeat_interleave(group)[:numel]
    finite = x.isfinite()
    assert torch.equal(back.isnan(), ~finite)
    assert not back.isinf().any()

    info = torch.finfo(x.dtype)
    ulp = torch.maximum(back.double().abs(), torch.tensor(info.smallest_normal, dtype=torch.float64))
    ulp = 2.0 ** ulp.nan_to_num(1).log2().floor() * info.eps
    error = (x.double() - back.double()).abs()
    bound = scales / 2 * (1 + 2.0**-15) + ulp / 2 + 2.0**-110
    assert (error[finite] <= bound[finite]).all()

    for start in range(0, numel, group):
        members = x[start : start + group].double()
        largest = members[members.isfinite()].abs().max().item() if members.isfinite().any() else 0.0
        assert scales[start] <= largest / 127 * (1 + 2.0**-7)
        assert (scales[start] == 0) == (largest < 2.0**-110)


@st.composite
def elements(draw, dtype=None):
    """A dtype and 1 to 600 elements: constants, any bits, special values, values of one or of all magnitudes."""
    dtype = dtype or draw(st.sampled_from(DTYPES))
    numel = draw(st.integers(1, 600))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    itemsize = ITEMSIZE[dtype]
    unsigned = np.dtype(f"<u{itemsize}")
    kind = draw(st.sampled_from(["normal", "constant", "bits", "powers", "special"]))
    special = np.array(SPECIAL[dtype], unsigned)
    special = np.concatenate([special, special | unsigned.type(1 << (8 * itemsize - 1))])
    if kind == "bits":
        return dtype, rng.integers(0, 256, numel * itemsize, dtype=np.uint8).tobytes()
    if kind == "special":
        return dtype, rng.choice(special, numel).tobytes()
    magnitude = 2.0 ** draw(st.integers(-150, 127))
    if kind == "normal":
        data = to_bytes(rng.standard_normal(numel) * magnitude, dtype)
    elif kind == "constant":
        data = to_bytes(np.full(numel, draw(st.sampled_from([-1, 1])) * magnitude), dtype)
    else:
        data = to_bytes(rng.choice([-1, 1], numel) * 2.0 ** rng.uniform(-150, 128, numel), dtype)
    bits = np.frombuffer(data, unsigned).copy()
    for position in draw(st.lists(st.integers(0, numel - 1), max_size=3)):
        bits[position] = draw(st.sampled_from(list(special)))
    return dtype, bits.tobytes()


@given(drawn(PLAIN, elements))
def test_all_implementations_agree(case):
    codec, (dtype, data) = case
    check_codec(codec, tensor_of(data, getattr(torch, dtype)))


@given(drawn(PLAIN, elements))
def test_error_bound(case):
    codec, (dtype, data) = case
    check_bound(tensor_of(data, getattr(torch, dtype)), codec.group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", samples("float32"))
def test_error_bound_of_samples(dtype, case):
    check_bound(tensor_of(samples(dtype)[case], getattr(torch, dtype)), 128)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern_of_16_bits(dtype, group):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    check_codec(Int8(group), x)
    check_bound(x, group)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))
    check_codec(Int8(group), x[order])


@pytest.mark.slow
@given(
    st.sampled_from(DTYPES).flatmap(elements),
    st.builds(
        Int8,
        st.sampled_from(GROUPS),
        round=st.sampled_from(ROUNDINGS),
        axis=st.sampled_from(["element", "token"]),
        signs=st.sampled_from(["auto", "keep"]),
    ),
)
def test_all_options(case, codec):
    dtype, data = case
    check_codec(codec, tensor_of(data, getattr(torch, dtype)))


def test_the_documented_example():
    payload, back = roundtrip(torch.tensor([1.0, -0.5, 0.25, torch.nan, -0.0]), 32)
    assert bytes(payload.tolist()) == bytes.fromhex("7ec1208000" + "00" * 11 + "023c")
    assert back.nan_to_num(7).tolist() == [0.999755859375, -0.4998779296875, 0.25390625, 7, 0]
    assert not back.signbit()[-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_code_with_any_normal_scale_decodes_alike(dtype):
    payload = every_code_and_scale()
    expected = oracle.decode(payload, 256 * 32, dtype, 32)
    assert np.isinf(oracle.to_float32(expected, dtype)).sum() == 0
    for way in implementations(Int8(32), getattr(torch, dtype)):
        _, buf = aligned(len(payload))
        back = torch.empty(256 * 32, dtype=getattr(torch, dtype))
        way.decode(buf.copy_(tensor_of(payload, torch.uint8)), back)
        assert storage_bytes(back) == expected, way.name


def test_ties_go_to_even():
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    payload, _ = roundtrip(x, 32)
    assert payload[:7].view(torch.int8).tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_one_bad_element_leaves_its_group_alone(bad):
    x = torch.linspace(-1, 1, 128)
    _, clean = roundtrip(x)
    x[64] = bad
    _, back = roundtrip(x)
    assert back[64].isnan()
    assert torch.equal(back[:64], clean[:64])
    assert torch.equal(back[65:], clean[65:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_values_stay_finite(dtype):
    largest = torch.finfo(dtype).max
    _, back = roundtrip(torch.tensor([largest, -largest], dtype=dtype))
    assert back.isfinite().all()
    assert back.double()[0] >= largest * (1 - 2.0**-7)
    assert back[0] == -back[1]


def test_flushing_denormals_changes_nothing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        for dtype in DTYPES:
            for data in samples(dtype).values():
                payload, back = roundtrip(tensor_of(data, getattr(torch, dtype)))
                numel = back.numel()
                torch.set_flush_denormal(False)
                expected = oracle.encode(data, dtype)
                expected_back = oracle.decode(expected, numel, dtype)
                torch.set_flush_denormal(True)
                assert bytes(payload.tolist()) == expected
                assert bytes(back.view(torch.uint8).tolist()) == expected_back
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("group", [0, 16, 48, 2048, 128.0, True, "128", None])
def test_other_groups_are_refused(group):
    with pytest.raises(ConfigError, match="must be 32, 64, 128, 256, 512 or 1024"):
        Int8(group)


@pytest.mark.parametrize("options", [{"round": "up"}, {"round": None}, {"axis": "channel"}, {"axis": 1}])
def test_other_choices_are_refused(options):
    with pytest.raises(ConfigError, match=r"must be"):
        Int8(**options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    x = torch.empty(8, dtype=dtype)
    assert not Int8().accepts(dtype)
    with pytest.raises(SpecError, match="Use 'raw'"):
        Int8().size(Spec.of(x))
    with pytest.raises(SpecError, match="Use 'raw'"):
        Int8().encode(x, torch.empty(256, dtype=torch.uint8))
    with pytest.raises(SpecError, match="Use 'raw'"):
        Int8().decode(torch.empty(256, dtype=torch.uint8), x)


@given(drawn([codec for codec in oracle.VARIANTS if codec.signs == "keep" and not codec.affine], elements))
def test_signs_are_kept(case):
    codec, (dtype, data) = case
    x = tensor_of(data, getattr(torch, dtype))
    back = check_codec(codec, x)
    finite = x.isfinite()
    assert torch.equal(back.isnan(), ~finite)
    assert torch.equal(back.sign()[finite], x.sign()[finite])
