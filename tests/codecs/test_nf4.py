"""nf4: the error bound, special values, every pattern of the 16-bit floats, and bitsandbytes' own bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import Nf4
from actstore.errors import ConfigError, SpecError
from actstore.kernels.nf4 import BOUNDS, VALUES
from actstore.policy import parse_decision
from tests.codecs.contract import aligned, cases, check_codec, drawn, implementations, storage_bytes, tensor_of
from tests.codecs.counted import check_counts
from tests.codecs.floats import check_all_threads, every_pattern, float_tensors, roundtrip, top_of_groups, ulp
from tests.oracles import nf4 as oracle
from tests.oracles.samples import DTYPES, samples

BNB = Nf4(64, "bnb")
ROUNDING = [codec for codec in oracle.VARIANTS if codec.signs == "auto"]


def sections(codec, payload, numel):
    """The packed codes, and the absmaxes, float64."""
    packed_nbytes = (numel + 1) // 2
    absmax = payload[-(-packed_nbytes // 16) * 16 :].view(torch.bfloat16 if codec.layout == "plain" else torch.float32)
    return payload[:packed_nbytes], absmax


def check_bound(codec, x):
    """The bound of csrc/nf4.md, in float64, with the stored absmax."""
    payload, back = roundtrip(codec, x)
    absmax = sections(codec, payload, len(x))[1].double().repeat_interleave(codec.group)[: len(x)]
    broken = top_of_groups((~x.isfinite()).float(), codec.group) > 0
    assert torch.equal(absmax.isnan(), broken)
    assert torch.equal(back.isnan(), broken)
    assert not back.isinf().any()
    top, whole = top_of_groups(x, codec.group), ~broken
    bound = 0.152 * absmax + ulp(back) / 2 + 2.0**-110
    assert ((x.double() - back.double()).abs() <= bound)[whole].all()
    if codec.layout == "plain":
        none = top == 0 if codec.signs == "keep" else top < 2.0**-110
        assert torch.equal(absmax[whole] == 0, none[whole])
        if codec.signs == "keep":
            whole &= top >= 2.0**-110  # below, the absmax is that
        capped = top.clamp(max=torch.finfo(torch.bfloat16).max)
        assert ((absmax >= capped) & (absmax <= top * (1 + 2.0**-7)) | (absmax == 0))[whole].all()
    else:
        last = torch.arange(len(x)) >= len(x) // 64 * 64
        assert torch.equal(absmax[whole & ~last], top[whole & ~last])
        assert (absmax == top.clamp(min=float(oracle.BNB_LEAST)))[whole & last].all()


def test_the_values_and_boundaries_of_the_page():
    assert np.array_equal(np.float32(VALUES), oracle.VALUES)
    assert np.array_equal(np.float32(BOUNDS), oracle.BOUNDS)
    assert [float(np.float32(number)) for number in (*VALUES, *BOUNDS)] == [*VALUES, *BOUNDS]


@given(drawn(ROUNDING, float_tensors))
def test_all_implementations_agree(case):
    check_codec(*case)


@given(drawn(ROUNDING, float_tensors))
def test_error_bound(case):
    check_bound(*case)


@pytest.mark.parametrize(("codec", "dtype"), cases(oracle.VARIANTS, DTYPES))
def test_error_bound_of_samples(dtype, codec):
    for data in samples(dtype).values():
        check_bound(codec, tensor_of(data, getattr(torch, dtype)))


@pytest.mark.parametrize("codec", [Nf4(), BNB], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern_of_16_bits(dtype, codec):
    x = every_pattern(dtype)
    check_codec(codec, x)
    check_bound(codec, x)
    finite = x[x.isfinite()]
    shuffled = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))]
    check_codec(codec, shuffled)
    check_bound(codec, shuffled)


@pytest.mark.parametrize("codec", [Nf4(), BNB], ids=str)
@pytest.mark.parametrize(
    "magnitude", [1.0, 2.0**-109, 2.0**-125, 2.0**-130, 2.0**126.5, float.fromhex("0x1.fffffep127")]
)
def test_neighbours_of_every_boundary(codec, magnitude):
    """Numbers within a few units in the last place of the boundaries, in groups of every kind of magnitude."""
    near = (np.float32(BOUNDS) * np.float32(magnitude)).astype(np.float32).view(np.int32)[:, None] + np.arange(-3, 4)
    values = near.astype(np.int32).view(np.float32).reshape(-1)
    groups = [[magnitude, *values[start : start + 31]] for start in range(0, len(values), 31)]
    x = torch.tensor([element for group in groups for element in group], dtype=torch.float32)
    check_codec(codec, x)
    check_codec(codec, x[:-1])


@pytest.mark.parametrize(("codec", "dtype"), cases(oracle.VARIANTS, DTYPES))
def test_all_threads(dtype, codec):
    check_all_threads(codec, getattr(torch, dtype))


@pytest.mark.parametrize("codec", oracle.VARIANTS, ids=str)
def test_a_count_on_the_device(codec):
    x = torch.randn(9000, generator=torch.Generator().manual_seed(0)).bfloat16()
    check_counts(codec, x, (0, 1, 2, 31, 33, 64, 1000, 1024, 9000))


@pytest.mark.parametrize(
    ("codec", "payload"),
    [(Nf4(), "4f787c" + "00" * 13 + "803f"), (BNB, "f487c7" + "00" * 13 + "0000803f")],
    ids=str,
)
def test_the_documented_example(codec, payload):
    found, back = roundtrip(codec, torch.tensor([1.0, -0.3, 0.05, -0.0, 0.4]))
    assert bytes(found.tolist()) == bytes.fromhex(payload)
    assert back.tolist() == [VALUES[code] for code in (15, 4, 8, 7, 12)]
    assert not back.signbit()[3]


@pytest.mark.parametrize(("codec", "dtype"), cases(oracle.VARIANTS, DTYPES))
def test_any_code_decodes_alike_with_any_absmax(dtype, codec):
    groups, rng = 40, np.random.default_rng(0)
    exponents = np.concatenate([[0, 1, 16, 17, 18, 254], rng.integers(17, 255, groups - 6)]).astype(np.uint32)
    absmaxes = exponents << 23 | rng.integers(0, 128, groups).astype(np.uint32) << 16
    absmaxes[7] = 0x7FC00000
    stored = (absmaxes >> 16).astype("<u2") if codec.layout == "plain" else absmaxes.astype("<u4")
    numel = groups * codec.group
    payload = rng.integers(0, 256, numel // 2, dtype=np.uint8).tobytes() + stored.tobytes()
    expected = oracle.decode(payload, numel, dtype, codec.group, codec.layout)
    assert not np.isinf(oracle.to_float32(expected, dtype)).any()
    for way in implementations(codec, getattr(torch, dtype)):
        _, buf = aligned(len(payload))
        back = torch.empty(numel, dtype=getattr(torch, dtype))
        way.decode(buf.copy_(tensor_of(payload, torch.uint8)), back)
        assert storage_bytes(back) == expected, way.name


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("codec", [Nf4(), Nf4(64), BNB], ids=str)
def test_one_bad_element_makes_its_group_nan(codec, bad):
    x = torch.linspace(-1, 1, 256)
    _, clean = roundtrip(codec, x)
    x[130] = bad
    _, back = roundtrip(codec, x)
    group = torch.arange(256) // codec.group == 130 // codec.group
    assert back[group].isnan().all()
    assert torch.equal(back[~group], clean[~group])


def test_flushing_denormals_changes_nothing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        for dtype in DTYPES:
            for data in samples(dtype).values():
                payload, back = roundtrip(Nf4(), tensor_of(data, getattr(torch, dtype)))
                torch.set_flush_denormal(False)
                expected = oracle.encode(data, dtype)
                expected_back = oracle.decode(expected, back.numel(), dtype)
                torch.set_flush_denormal(True)
                assert bytes(payload.tolist()) == expected
                assert storage_bytes(back) == expected_back
    finally:
        torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def functional():
    return pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes to compare with")


class TestBitsandbytes:
    """Its bytes are ours, and it reads ours."""

    def check(self, functional, x):
        payload, back = roundtrip(BNB, x)
        packed, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
        ours, absmax = sections(BNB, payload, len(x))
        assert torch.equal(ours, packed.view(-1))
        assert torch.equal(absmax.view(torch.int32), state.absmax.view(torch.int32))
        # an odd number of elements goes to its slow path, which it compiles
        if len(x) % 2 == 0:
            state.absmax = absmax.clone()
            theirs = functional.dequantize_4bit(ours.clone().view(-1, 1), state).view(-1)
            large = (absmax >= 2.0**-110).repeat_interleave(64)[: len(x)]
            assert torch.equal(theirs[large], back[large])
            assert (theirs[~large].double().abs() < 2.0**-109).all()
            assert (back[~large] == 0).all()

    @given(st.sampled_from(DTYPES).flatmap(float_tensors))
    def test_any_finite_elements(self, functional, x):
        self.check(functional, x.nan_to_num(0, posinf=1, neginf=-2))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_samples(self, functional, dtype):
        for data in samples(dtype).values():
            x = tensor_of(data, getattr(torch, dtype))
            self.check(functional, x[x.isfinite()])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_every_finite_pattern_of_16_bits(self, functional, dtype):
        x = every_pattern(dtype)
        x = x[x.isfinite()]
        self.check(functional, x)
        self.check(functional, x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_large_tensor(self, functional, dtype):
        x = torch.randn((1 << 20) + 26, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.check(functional, x)


@pytest.mark.parametrize("group", [0, 16, 48, 512, 32.0, True, "32", None])
def test_other_groups_are_refused(group):
    with pytest.raises(ConfigError, match="must be 32, 64, 128 or 256"):
        Nf4(group)


def test_other_layouts_are_refused():
    with pytest.raises(ConfigError, match="must be plain or bnb"):
        Nf4(layout="gguf")
    with pytest.raises(ConfigError, match=r"groups of 64 elements, not of 32. Write nf4\(group=64, layout=bnb\)"):
        Nf4(layout="bnb")


def test_policy_text():
    assert parse_decision("nf4(group=64, layout=bnb)").codec == BNB


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(SpecError, match="Use 'raw'"):
        Nf4().size(Spec.of(torch.empty(8, dtype=dtype)))
