"""raw: every dtype, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.codecs import Raw
from actstore.errors import SpecError
from tests.codecs.contract import check_codec, tensor_of

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.binary(max_size=300), st.integers(0, 3))
def test_any_bits_of_any_dtype(dtype, data, offset):
    data = bytes(byte & 1 for byte in data) if dtype is torch.bool else data
    data = data[: len(data) // dtype.itemsize * dtype.itemsize]
    assert Raw().accepts(dtype)
    check_codec(Raw(), tensor_of(data, dtype)[offset:])


def test_pending_conjugation_is_refused():
    with pytest.raises(SpecError, match="resolve_conj"):
        Raw().encode(torch.ones(4, dtype=torch.complex64).conj(), torch.empty(64, dtype=torch.uint8))
