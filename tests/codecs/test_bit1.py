"""bit1: bools bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import Bit1, Exact
from actstore.errors import SpecError
from tests.codecs.contract import aligned, check_codec, implementations, storage_bytes, tensor_of
from tests.codecs.counted import check_counts
from tests.codecs.floats import roundtrip


@given(st.lists(st.booleans(), max_size=700), st.integers(0, 3))
def test_any_bools(values, offset):
    x = torch.tensor(values, dtype=torch.bool)[offset:]
    back = check_codec(Bit1(), x)
    assert torch.equal(back, x)


@pytest.mark.parametrize("numel", [4095, 4096, 4097, 8192, 8193 + 64])
def test_blocks(numel):
    x = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) < 0.3
    assert torch.equal(check_codec(Bit1(), x), x)


def test_more_than_one_thread():
    x = torch.rand((1 << 22) + 13, generator=torch.Generator().manual_seed(0)) < 0.3
    payload, back = roundtrip(Bit1(), x)
    assert torch.equal(back, x)
    places = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128])
    assert torch.equal(payload[:-2], (x[:-13].view(-1, 8) * places).sum(1).to(torch.uint8))


def test_any_byte_but_zero_is_true():
    x = tensor_of(bytes(range(256)) + b"\x00" * 5 + b"\x80\x00\xff", torch.bool)
    for way in implementations(Bit1(), torch.bool):
        _, payload = aligned(33)
        way.encode(x, payload)
        assert bytes(payload.tolist()) == b"\xfe" + b"\xff" * 31 + b"\xa0", way.name
        back = torch.empty_like(x)
        way.decode(payload, back)
        assert storage_bytes(back) == b"\x00" + b"\x01" * 255 + b"\x00" * 5 + b"\x01\x00\x01", way.name


def test_unused_bits_are_not_looked_at():
    for way in implementations(Bit1(), torch.bool):
        _, payload = aligned(2)
        back = torch.empty(10, dtype=torch.bool)
        way.decode(payload.copy_(torch.tensor([0x8D, 0xFD], dtype=torch.uint8)), back)
        assert back.tolist() == [1, 0, 1, 1, 0, 0, 0, 1, 1, 0], way.name


def test_a_count_on_the_device():
    x = torch.rand(9000, generator=torch.Generator().manual_seed(0)) < 0.3
    check_counts(Bit1(), x, (0, 1, 2, 31, 33, 64, 1000, 1024, 9000))


def test_the_documented_example():
    payload, back = roundtrip(Bit1(), torch.tensor([1, 0, 1, 1, 0, 0, 0, 1, 1, 0], dtype=torch.bool))
    assert bytes(payload.tolist()) == bytes.fromhex("8d01")
    assert back.tolist() == [1, 0, 1, 1, 0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize("numel", [0, 1, 8, 9, 1 << 40])
def test_size(numel):
    assert Bit1().size(Spec((numel,), (1,), torch.bool, torch.device("cpu"))) == Exact(-(-numel // 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int8, torch.int64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(SpecError, match="Use 'raw'"):
        Bit1().size(Spec.of(torch.empty(8, dtype=dtype)))
