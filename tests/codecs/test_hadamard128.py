"""hadamard128: its error against that of its inner codec, special values, what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import Bit1, E5m6, Fp8, Hadamard128, Int4, Int8, Nf4, Raw, Zmask
from actstore.errors import ChainError, ConfigError, PayloadError
from actstore.policy import parse_decision
from tests.codecs.contract import KEY, aligned, check_codec, storage_bytes, tensor_of
from tests.oracles import hadamard128 as oracle
from tests.oracles import philox
from tests.oracles.samples import DTYPES, random_bits, samples

INNER = (Int4(), Int4(64, round="dither"), Int8(), Int8(affine=True), Nf4(), Fp8(), E5m6())


def roundtrip(x, codec, key=KEY):
    _, payload = aligned(codec.size(Spec.of(x)).nbytes)
    codec.encode(x, payload, key)
    back = torch.empty_like(x)
    codec.decode(payload, back, key)
    return payload, back


def hadamard():
    matrix = np.ones((1, 1))
    while len(matrix) < 128:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return torch.from_numpy(matrix / 128**0.5)


def error(x, codec):
    return ((x - roundtrip(x, codec)[1]).norm() / x.norm()).item()


@given(
    st.sampled_from(["normal", "heavy", "one-sided", "sparse", "constant", "tiny"]),
    st.sampled_from(DTYPES),
    st.sampled_from(INNER),
    st.integers(1, 700),
    st.integers(0, (1 << 63) - 1),
)
def test_error_is_that_of_the_inner_codec(kind, dtype, inner, numel, key):
    rng = np.random.default_rng(numel)
    values = {
        "normal": rng.standard_normal,
        "heavy": lambda n: rng.standard_t(2, n),
        "one-sided": rng.random,
        "sparse": lambda n: rng.standard_normal(n) * (rng.random(n) < 0.1),
        "constant": lambda n: np.full(n, -3.7),
        "tiny": lambda n: rng.standard_normal(n) * 2.0**-100,
    }[kind](numel)
    x = torch.tensor(values).to(getattr(torch, dtype))
    payload, back = roundtrip(x, Hadamard128(inner), key)

    groups = -(-numel // 128)
    padded = torch.zeros(groups * 128, dtype=torch.float64)
    padded[:numel] = x.double()
    exact = padded.view(-1, 128) * torch.from_numpy(philox.signs(key)).double() @ hadamard()
    rotated = torch.empty(groups * 128)
    inner.decode(payload, rotated, key)
    inner_error = (rotated.view(-1, 128).double() - exact).norm(dim=1)

    found = padded.clone()
    found[:numel] = back.double()
    error = (found - padded).view(-1, 128).norm(dim=1)
    eps = torch.finfo(x.dtype).eps
    half_ulps = ((found.abs().clamp(min=torch.finfo(x.dtype).smallest_normal)) * eps).view(-1, 128).norm(dim=1)
    assert (error <= inner_error + padded.view(-1, 128).norm(dim=1) * 2.0**-20 + half_ulps + 2.0**-92).all()


@given(st.sampled_from(DTYPES), st.integers(1, 400), st.integers(0, (1 << 63) - 1))
def test_all_implementations_agree(dtype, numel, seed):
    data = random_bits(numel, dtype, seed=seed)
    check_codec(Hadamard128(Int8(32)), tensor_of(data, getattr(torch, dtype)))


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_inner_codecs(inner):
    for data in (random_bits(1000, "bfloat16", seed=1), samples("bfloat16")["any bits"]):
        check_codec(Hadamard128(inner), tensor_of(data, torch.bfloat16))


@pytest.mark.parametrize("group", [32, 64, 128, 256, 512, 1024])
def test_groups_of_every_size(group):
    """Each has its elements of a rotation in other lanes; some warps have all of theirs, and one rotation no finite."""
    for dtype in DTYPES:
        x = torch.randn(2500, generator=torch.Generator().manual_seed(group)).to(getattr(torch, dtype))
        x[700] = torch.inf
        check_codec(Hadamard128(Int8(group)), x)


def test_the_documented_example():
    payload, back = roundtrip(torch.tensor([1.0, -0.5, 0.25]), Hadamard128(Int8(32)), key=0)
    assert bytes(payload.tolist()) == bytes.fromhex("a5ee81ca" * 32 + "a03a" * 4)
    assert back.tolist() == [1.0012742280960083, -0.5040897130966187, 0.24859219789505005]


def test_the_transform_is_the_hadamard_matrix():
    rows = [oracle.transform(row, np.float32(1)) for row in np.eye(128, dtype=np.float32)]
    assert np.allclose(rows, hadamard().numpy(), rtol=2.0**-20)


def test_the_key_decides():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    codec = Hadamard128(Int8())
    payload, back = roundtrip(x, codec, key=1)
    assert not torch.equal(payload, roundtrip(x, codec, key=2)[0])
    other = torch.empty_like(x)
    codec.decode(payload, other, 2)
    assert (back - x).norm() < 0.02 * x.norm() < (other - x).norm()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_that_is_not_finite_comes_back_as_nan(dtype, bad):
    x = torch.linspace(-1, 1, 500).to(getattr(torch, dtype))
    for codec in (Hadamard128(Int4()), Hadamard128(Int8())):
        clean = roundtrip(x, codec)[1]
        for place in (0, 130, 499):
            spoiled = x.clone()
            spoiled[place] = bad
            back = roundtrip(spoiled, codec)[1]
            group = torch.arange(500) // 128 == place // 128
            assert back[group].isnan().all()
            assert torch.equal(back[~group], clean[~group])


def test_what_leaves_float32_comes_back_as_nan_and_the_largest_of_float16_does_not():
    signs = torch.from_numpy(philox.signs(KEY))
    x = torch.cat([torch.full((128,), 3e38) * signs, torch.ones(128)])
    back = roundtrip(x, Hadamard128(Int8()))[1]
    assert back[:128].isnan().all()
    assert back[128:].isfinite().all()
    x = torch.full((128,), 65504.0, dtype=torch.float16)
    assert roundtrip(x, Hadamard128(Int8()))[1].isfinite().all()


def test_outliers_cost_less_and_data_of_one_sign_more():
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    assert error(x.relu(), Int4()) < 0.7 * error(x.relu(), Hadamard128(Int4()))
    x[:, [3, 200, 201]] *= 30
    assert error(x, Hadamard128(Int4())) < 0.7 * error(x, Int4())


def test_large_tensors():
    """Scratch in huge pages, many threads."""
    x = torch.randn(3_000_001, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    codec = Hadamard128(Int8())
    payload, back = roundtrip(x, codec)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        again, back_again = roundtrip(x, codec)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(payload, again)
    assert storage_bytes(back) == storage_bytes(back_again)
    assert (back - x).norm() < 0.01 * x.norm()


def test_policy_text():
    assert parse_decision("hadamard128(int8(group=64))").codec == Hadamard128(Int8(64))
    assert parse_decision("hadamard128").codec == Hadamard128(Int4())
    codec = Hadamard128(Int8())
    assert (codec.keyed, codec.chained, codec.exact, codec.lossless) == (True, True, True, False)


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (Raw(), "lossless"),
        (Bit1(), "lossless"),
        (Int8(axis="token"), "whole rows"),
        (Zmask(Int8()), "has an inner codec of its own"),
        (Int8, "Call it"),
    ],
)
def test_refused_inner_codecs(inner, words):
    with pytest.raises(ChainError, match=words):
        Hadamard128(inner)
    assert issubclass(ChainError, ConfigError)


def test_a_short_payload_is_refused():
    x = torch.ones(100)
    payload, _ = roundtrip(x, Hadamard128(Int8()))
    with pytest.raises(PayloadError, match="are needed"):
        Hadamard128(Int8()).decode(payload[:-1], x)
