"""int2 to int6 and int8(affine): the error bound, special values, bias, and every pattern of the 16-bit floats."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import Int2, Int3, Int4, Int5, Int6, Int8
from actstore.codecs.int8 import ROUNDINGS
from actstore.errors import ConfigError, SpecError
from actstore.kernels.affine import LEVELS, sections
from actstore.policy import parse_decision
from tests.codecs.contract import (
    KEY,
    aligned,
    cases,
    check_codec,
    check_guards,
    compiled,
    drawn,
    storage_bytes,
    tensor_of,
)
from tests.emulator.device import emulated
from tests.oracles import affine as oracle
from tests.oracles import find
from tests.oracles.samples import DTYPES, ITEMSIZE, SPECIAL, random_bits, samples, to_bytes

BITS = {f"int{bits}": bits for bits in LEVELS}
CODECS = (  # variants of the oracles: other tests compile their kernels, too
    *(Int8(64, affine=True, round=round) for round in ("stochastic", "dither")),  # noqa: A001
    *(Int8(group, affine=True) for group in (32, 1024)),
    *(Int4(group, round) for group, round in ((32, "nearest"), (256, "nearest"), (32, "stochastic"), (32, "dither"))),  # noqa: A001
    *(Int6(group, round) for group, round in ((32, "nearest"), (128, "dither"))),  # noqa: A001
    *(Int5(group, round) for group, round in ((64, "stochastic"), (256, "nearest"))),  # noqa: A001
    *(Int3(group, round) for group, round in ((32, "nearest"), (64, "stochastic"), (128, "dither"))),  # noqa: A001
    *(Int2(group, round) for group, round in ((256, "stochastic"), (64, "dither"))),  # noqa: A001
)
PAIRS = cases(CODECS, DTYPES)
OPTIONS = [
    kind(group, round=round, signs=signs)
    for kind in (partial(Int8, affine=True), Int6, Int5, Int4, Int3, Int2)
    for group in (32, 64, 128, 256)
    for round in ROUNDINGS  # noqa: A001
    for signs in ("auto", "keep")
    if kind is not Int2 or round != "nearest"
]
every = pytest.mark.parametrize("codec", CODECS, ids=str)
of_16_bits = pytest.mark.parametrize(("codec", "dtype"), [pair for pair in PAIRS if pair.values[1] != "float32"])
LOWEST = -float.fromhex("0x1.fep127")  # of bfloat16


def roundtrip(codec, x, key=KEY):
    payload = torch.empty(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8)
    codec.encode(x, payload, key)
    back = torch.empty_like(x)
    codec.decode(payload, back, key)
    return payload, back


def check_bound(codec, x):
    """The bound of csrc/affine.md, in float64, with the stored scales and minima."""
    payload, back = roundtrip(codec, x)
    numel, group, bits = x.numel(), codec.group, BITS[codec.name]
    at = sections(numel, bits, group)
    groups = -(-numel // group)
    scales, minima = (payload[start:][: 2 * groups].view(torch.bfloat16).double() for start in (at.scales, at.minima))

    def grouped(values, fill):
        return torch.nn.functional.pad(values, (0, groups * group - numel), value=fill).view(groups, group)

    finite, exact = x.isfinite(), x.double().clamp(min=LOWEST)
    low = grouped(exact.where(finite, torch.inf), torch.inf).amin(1)
    high = grouped(exact.where(finite, -torch.inf), -torch.inf).amax(1)
    whole = grouped(finite, True).all(1)
    known = low <= high if bits == 8 else whole
    assert torch.equal(minima.isnan(), ~whole if bits < 8 else torch.zeros_like(whole))
    assert (scales[~known] == 0).all()
    assert ((minima <= low) | (low.abs() < 2.0**-110))[known].all()
    assert ((low - minima).abs() <= (low.abs() * 2.0**-7).clamp(min=2.0**-110))[known].all()
    width = (high - minima).clamp(min=0)
    assert (scales <= width / LEVELS[bits] * (1 + 2.0**-7))[known].all()
    assert ((scales >= width / LEVELS[bits] * (1 - 2.0**-22)) | (width < 2.0**-80 * (1 + 2.0**-22)))[known].all()

    missing = ~finite if bits == 8 else ~whole.repeat_interleave(group)[:numel]
    assert torch.equal(back.isnan(), missing)
    assert not back.isinf().any()
    same = ((low == high) & (low == minima)).repeat_interleave(group)[:numel] & ~missing
    assert torch.equal(back[same].double(), exact[same])
    info = torch.finfo(x.dtype)
    ulp = torch.maximum(back.double().abs(), torch.tensor(info.smallest_normal, dtype=torch.float64))
    ulp = 2.0 ** ulp.nan_to_num(1).log2().floor() * info.eps
    steps = 1 if codec.round == "stochastic" else 0.5
    bound = steps * scales.repeat_interleave(group)[:numel] * (1 + 2.0**-12) + ulp + 2.0**-80
    assert ((exact - back.double()).abs() <= bound)[~missing].all()


KINDS = {
    "gaussian": lambda rng, n: rng.standard_normal(n),
    "heavy": lambda rng, n: rng.standard_t(2, n),
    "one-sided": lambda rng, n: rng.exponential(size=n) + rng.choice([0, 1, 300]),
    "sparse": lambda rng, n: np.maximum(rng.standard_normal(n), 0),
    "constant": lambda rng, n: np.full(n, rng.standard_normal()),
    "powers": lambda rng, n: rng.choice([-1, 1], n) * 2.0 ** rng.uniform(-150, 128, n),
}


@st.composite
def tensors(draw, dtype):
    """1 to 700 elements of one kind and magnitude, a few of them special."""
    numel = draw(st.integers(1, 700))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    kind = draw(st.sampled_from([*KINDS, "bits", "special"]))
    unsigned = np.dtype(f"<u{4 if dtype == 'float32' else 2}")
    special = np.array(SPECIAL[dtype], unsigned)
    special = np.concatenate([special, special | unsigned.type(1 << (8 * unsigned.itemsize - 1))])
    if kind == "bits":
        bits = rng.integers(0, 1 << (8 * unsigned.itemsize), numel, dtype=unsigned)
    elif kind == "special":
        bits = rng.choice(special, numel)
    else:
        magnitude = 1 if kind == "powers" else 2.0 ** draw(st.integers(-150, 127))
        with np.errstate(over="ignore"):
            bits = np.frombuffer(to_bytes(KINDS[kind](rng, numel) * magnitude, dtype), unsigned).copy()
    for position in draw(st.lists(st.integers(0, numel - 1), max_size=3)):
        bits[position] = draw(st.sampled_from(list(special)))
    return tensor_of(bits.tobytes(), getattr(torch, dtype))


@pytest.mark.more
@given(drawn(CODECS, tensors))
def test_all_implementations_agree(case):
    check_codec(*case)


@pytest.mark.slow
@given(st.sampled_from(DTYPES).flatmap(tensors), st.sampled_from(OPTIONS))
def test_all_options(x, codec):
    check_codec(codec, x)
    if codec.signs == "auto":
        check_bound(codec, x)


@given(drawn(CODECS, tensors))
@example((Int4(), torch.tensor([-torch.finfo(torch.float32).max, LOWEST, LOWEST * (1 - 2.0**-8)])))
def test_error_bound(case):
    check_bound(*case)


@pytest.mark.parametrize(("codec", "dtype"), PAIRS)
def test_error_bound_of_samples(codec, dtype):
    for data in samples(dtype).values():
        check_bound(codec, tensor_of(data, getattr(torch, dtype)))


@of_16_bits
def test_every_pattern_of_16_bits(codec, dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(getattr(torch, dtype))
    check_bound(codec, x)
    check_bound(codec, x[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))])
    check_bound(codec, x[x.isfinite()])


@of_16_bits
def test_every_pattern_of_16_bits_alike(codec, dtype):
    check_codec(codec, torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(getattr(torch, dtype)))


@pytest.mark.parametrize(
    ("codec", "codes", "scale", "decoded"),
    [
        (Int6(), "604d0f 4803", "233d", [-0.5, 1.012207, 0.017333984, 0.29589844, 2.00708]),
        (Int5(), "30a60f 12", "a63d", [-0.5, 1.0400391, -0.013671875, 0.31054688, 2.0126953]),
        (Int4(), "90530f", "2b3e", [-0.5, 1.0029297, 0.0009765625, 0.33496094, 2.0048828]),
        (Int3(), "9003 12", "b73e", [-0.5, 0.9296875, -0.14257812, 0.21484375, 2.0019531]),
        (Int2(), "4803", "563f", [-0.5, 1.171875, -0.5, 0.3359375, 2.0078125]),
        (Int2(round="dither"), "4803", "563f", [-0.77919006, 0.8306427, -0.2110138, 0.4192047, 1.9637299]),
    ],
    ids=str,
)
def test_the_documented_examples(codec, codes, scale, decoded):
    payload, back = roundtrip(codec, torch.tensor([-0.5, 1.0, 0.0, 0.3, 2.0]), key=0)
    sections = [bytes.fromhex(section).ljust(16, b"\0") for section in (*codes.split(), scale)]
    assert bytes(payload.tolist()) == b"".join(sections) + b"\x00\xbf"
    torch.testing.assert_close(back, torch.tensor(decoded), rtol=2.0**-24, atol=0)


@every
def test_a_maximum_never_decodes_as_the_minimum(codec):
    generator = torch.Generator().manual_seed(0)
    ranges = 2.0 ** torch.randint(-60, 60, (4000, 2), generator=generator) * torch.rand(4000, 2, generator=generator)
    x = torch.stack([ranges[:, 0], ranges.sum(1)], 1).repeat(1, codec.group // 2)
    back = roundtrip(codec, x)[1].view(-1, 2)
    low, high = x.view(-1, 2).unbind(1)
    step = (high - low * (1 - 2.0**-7)) / LEVELS[BITS[codec.name]] * (1 + 2.0**-6)
    assert ((back[:, 1] - high).abs() <= step + high * 2.0**-22).all()


@pytest.mark.parametrize(("codec", "dtype"), [pair for pair in PAIRS if pair.values[1] != "float16"])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1.0078125, 3e38, -1e-30])
def test_a_constant_comes_back_exactly(codec, dtype, value):
    x = torch.full((1000,), value).to(torch.bfloat16).to(getattr(torch, dtype))
    assert torch.equal(roundtrip(codec, x)[1], x)


@every
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_one_bad_element(codec, bad):
    x = torch.linspace(-1, 1, 4 * codec.group)
    clean = roundtrip(codec, x)[1]
    at = codec.group + 7
    x[at] = bad
    back = roundtrip(codec, x)[1]
    expected = torch.zeros_like(x, dtype=torch.bool)
    expected[at if codec.name == "int8" else slice(codec.group, 2 * codec.group)] = True
    assert torch.equal(back.isnan(), expected)
    assert torch.equal(back[~expected], clean[~expected])


@pytest.mark.parametrize(("codec", "dtype"), PAIRS)
def test_the_largest_values_stay_finite(codec, dtype):
    dtype = getattr(torch, dtype)
    largest = torch.finfo(dtype).max
    back = roundtrip(codec, torch.tensor([largest, -largest] * 32, dtype=dtype))[1]
    assert back.isfinite().all()
    if codec.round == "nearest":
        assert (back[::2] >= largest * (1 - 2.0**-6)).all()
        assert (back[1::2] <= -largest * (1 - 2.0**-6)).all()


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.keyed], ids=str)
def test_random_rounding_is_unbiased(codec):
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    keys = 256
    total = torch.zeros_like(x)
    for key in range(keys):
        total += roundtrip(codec, x, key)[1] - x
    step = (x.view(-1, codec.group).amax(1) - x.view(-1, codec.group).amin(1)) / LEVELS[BITS[codec.name]]
    bias = (total / keys).view(-1, codec.group) / step[:, None]
    assert bias.abs().max() < 6 * 0.5 / keys**0.5  # the deviation of one error is at most half a step
    assert bias.mean().abs() < 0.004  # 1/512 of a step comes from random bytes


@every
def test_flushing_denormals_changes_nothing(codec):
    dtypes = {"float32", *(dtype for each, dtype in compiled(CODECS) if each == codec)}
    tensors = [tensor_of(data, getattr(torch, dtype)) for dtype in dtypes for data in samples(dtype).values()]
    tiny = 2.0 ** torch.arange(-149, -70).float()
    tensors += [torch.cat([tiny[: n + 1], -tiny[: n + 1]]) for n in range(0, len(tiny), 3)]
    tensors += [torch.cat([-tiny[n : n + 1], tiny[:60:2]]) for n in range(len(tiny))]
    expected = [roundtrip(codec, x) for x in tensors]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        found = [roundtrip(codec, x) for x in tensors]
    finally:
        torch.set_flush_denormal(False)
    for (payload, back), (other_payload, other_back) in zip(expected, found, strict=True):
        assert torch.equal(payload, other_payload)
        assert torch.equal(back.view(torch.uint8), other_back.view(torch.uint8))


@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_count_on_the_device(codec, dtype):
    """Kernels launched for more elements than there are write what they would for those that there are."""
    data, numel, itemsize = random_bits(2500, dtype, seed=1), 2500, ITEMSIZE[dtype]
    kernels, options = emulated(codec, getattr(torch, dtype)), codec._options()
    keyed = {"key": KEY} if codec.keyed else {}
    del options["keep"]
    for count in (0, 1, 33, 1024, 2049, 2500):
        expected = oracle.encode(data[: count * itemsize], dtype, **options, **keyed)
        x, there = tensor_of(data, getattr(torch, dtype)), torch.tensor([count])
        memory, out = aligned(codec.size(Spec.of(x)).nbytes)
        kernels.encode(x, out, numel, KEY, count=there)
        assert out[: len(expected)].numpy().tobytes() == expected
        check_guards(memory, out, len(expected))
        x[:] = 7
        kernels.decode(out, x, numel, KEY, count=there)
        assert storage_bytes(x[:count]) == oracle.decode(expected, count, dtype, **options, **keyed)
        assert (x[count:] == 7).all()


@pytest.mark.parametrize("bits", BITS.values())
def test_any_payload_decodes_somehow(bits):
    """No payload makes a kernel read or write beyond its buffers: sizes follow from the number of elements alone."""
    numel = 1500
    codec = next(codec for codec in CODECS if codec.name == f"int{bits}")
    rng = np.random.default_rng(0)
    payload = torch.from_numpy(rng.integers(0, 256, codec.size(Spec.of(torch.empty(numel))).nbytes, dtype=np.uint8))
    memory = torch.full((numel + 64,), 7.0)
    codec.decode(payload, memory[32:-32], KEY)
    assert (memory[:32] == 7).all()
    assert (memory[-32:] == 7).all()


@pytest.mark.parametrize("kind", [Int6, Int5, Int4, Int3, Int2])
@pytest.mark.parametrize("group", [0, 16, 48, 512, 32.0, True, "32", None])
def test_other_groups_are_refused(kind, group):
    with pytest.raises(ConfigError, match=f"{kind.name}.*must be 32, 64, 128 or 256"):
        kind(group)


def test_what_is_refused_with_a_reason():
    with pytest.raises(ConfigError, match=r"does not average out. Choose stochastic or dither, or int4"):
        Int2(round="nearest")
    with pytest.raises(ConfigError, match="does not average out"):
        parse_decision("int2(round=nearest)")
    with pytest.raises(ConfigError, match="Leave out"):
        Int8(affine=True, axis="token")


def test_policy_text():
    assert parse_decision("int8(affine)").codec == Int8(affine=True)
    assert parse_decision("int8(affine, round=dither, group=64)").codec == Int8(64, affine=True, round="dither")
    assert parse_decision("int4(group=64, round=stochastic)").codec == Int4(64, "stochastic")


@pytest.mark.parametrize("codec", [Int6(), Int5(), Int4(), Int3(), Int2()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_are_refused(codec, dtype):
    with pytest.raises(SpecError, match="Use 'raw'"):
        codec.size(Spec.of(torch.empty(8, dtype=dtype)))


def test_bits_per_element():
    x = torch.empty(1 << 20)
    codecs = (Int8(affine=True), Int6(), Int5(64), Int4(), Int4(64), Int3(256), Int2())
    sizes = [codec.size(Spec.of(x)).nbytes * 8 / x.numel() for codec in codecs]
    assert sizes == [8.25, 7.0, 5.5, 5.0, 4.5, 3.125, 3.0]
    assert all(codec.keyed == (codec.round != "nearest") for codec in CODECS)


def test_the_oracle_stays_within_bfloat16():
    values = np.array([0x7F7FFFFF, 0xFF7FFFFF, 0x3F800001, 0xBF800001], np.uint32).view(np.float32)
    below = [float(oracle.down(value)) for value in values]
    assert below == [-LOWEST, LOWEST, 1.0, -1.0078125]


KEEPING = [
    codec
    for codec in find.variants()
    if (codec.name in BITS or getattr(codec, "affine", False)) and codec.signs == "keep"
]


@given(drawn(KEEPING, tensors))
def test_signs_are_kept(case):
    codec, x = case
    back = check_codec(codec, x)
    known = ~back.isnan()
    assert torch.equal(back.sign()[known], x.sign()[known])
    assert known[x.isfinite()].all() or codec.name != "int8"
