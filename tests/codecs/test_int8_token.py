"""int8(axis=token): groups of rows in one column, for every form of matrix, and what it does for outlier channels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import Int8
from actstore.codecs.int8 import GROUPS
from actstore.policy import parse_decision
from tests.codecs.contract import check_codec, storage_bytes, tensor_of
from tests.oracles.samples import DTYPES, random_bits, samples

SHAPES = [(2, 2), (3, 600), (33, 65), (32, 64), (64, 3), (65, 24), (257, 2), (130, 17)]


def roundtrip(x, codec):
    payload = torch.empty(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8)
    codec.encode(x, payload)
    back = torch.empty_like(x)
    codec.decode(payload, back)
    return payload, back


def error(x, codec):
    _, back = roundtrip(x, codec)
    return ((x - back).norm() / x.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matrices(shape, dtype):
    numel = shape[0] * shape[1]
    for group, round in ((32, "nearest"), (32, "stochastic"), (64, "dither"), (256, "nearest")):  # noqa: A001
        data = random_bits(numel, dtype, seed=numel + group)
        check_codec(Int8(group, round=round, axis="token"), tensor_of(data, getattr(torch, dtype)).view(shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype):
    for data in samples(dtype).values():
        x = tensor_of(data, getattr(torch, dtype))
        for columns in (4, 8):
            check_codec(Int8(32, axis="token"), x[: len(x) // columns * columns].view(-1, columns))


@given(
    st.tuples(st.integers(1, 150), st.integers(1, 40)),
    st.sampled_from(DTYPES),
    st.sampled_from(GROUPS),
    st.integers(0, 3),
    st.integers(-120, 100),
)
def test_error_bound(shape, dtype, group, offset, exponent):
    numel = shape[0] * shape[1]
    wide = tensor_of(random_bits(numel + offset, dtype, seed=numel), getattr(torch, dtype))
    x = (wide[offset:] * 2.0**exponent).to(wide.dtype).view(shape)
    codec = Int8(group, axis="token")
    payload, back = roundtrip(x, codec)
    columns = shape[1] if min(shape) > 1 else 1
    rows = numel // columns
    scales = payload[-(-numel // 16) * 16 :].view(torch.bfloat16).double().view(-1, columns)
    assert len(scales) == -(-rows // group)
    step = scales.repeat_interleave(group, 0)[:rows].reshape(shape)
    finite = x.isfinite()
    assert torch.equal(back.isnan(), ~finite)
    info = torch.finfo(x.dtype)
    ulp = 2.0 ** back.double().abs().clamp(min=info.smallest_normal).nan_to_num(1).log2().floor() * info.eps
    bound = step / 2 * (1 + 2.0**-15) + ulp / 2 + 2.0**-110
    assert ((x.double() - back.double()).abs()[finite] <= bound[finite]).all()


def test_the_documented_example():
    x = torch.tensor([[1.0, 100.0], [-0.5, -50.0], [0.25, torch.nan]])
    payload, back = roundtrip(x, Int8(32, axis="token"))
    assert bytes(payload.tolist()) == bytes.fromhex("7e7fc1c12080" + "00" * 10 + "023c4a3f")
    assert back.nan_to_num(7).tolist() == [
        [0.999755859375, 100.2109375],
        [-0.4998779296875, -49.7109375],
        [0.25390625, 7],
    ]


def test_one_dimension_is_the_same_as_along_elements():
    for x in (torch.randn(1000), torch.randn(1, 1000), torch.randn(1000, 1), torch.randn(1000, 1)[:, 0]):
        for round in ("nearest", "dither"):  # noqa: A001
            plain, token = (roundtrip(x, Int8(round=round, axis=axis)) for axis in ("element", "token"))
            assert torch.equal(plain[0], token[0])
            assert torch.equal(plain[1], token[1])


def test_the_row_is_the_dimension_with_the_least_stride():
    x = torch.randn(6, 50, 7)
    codec = Int8(32, axis="token")
    payload, back = roundtrip(x, codec)
    assert torch.equal(payload, roundtrip(x.view(300, 7), codec)[0])
    turned = x.permute(2, 0, 1)  # the same storage
    assert torch.equal(payload, roundtrip(turned, codec)[0])
    assert torch.equal(back.permute(2, 0, 1), roundtrip(turned, codec)[1])


def test_outlier_channels_cost_the_others_nothing():
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    even = error(x, Int8()), error(x, Int8(axis="token"))
    x[:, [17, 100, 230]] *= 30
    outliers = error(x, Int8()), error(x, Int8(axis="token"))
    assert even[1] == pytest.approx(even[0], rel=0.05)
    assert outliers[1] == pytest.approx(even[1], rel=0.05)
    assert outliers[0] > 3 * outliers[1]


@pytest.mark.parametrize("shape", [(3000, 700), (70_000, 24)], ids=str)
def test_many_threads_write_the_same_bytes(shape):
    x = torch.randn(shape)
    codec = Int8(round="stochastic", axis="token")
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(roundtrip(x, codec))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0][0], found[1][0])
    assert storage_bytes(found[0][1]) == storage_bytes(found[1][1])


def test_policy_text():
    assert parse_decision("int8(axis=token, group=64)").codec == Int8(64, axis="token")
    assert Int8()._flat
    assert not Int8(axis="token")._flat
