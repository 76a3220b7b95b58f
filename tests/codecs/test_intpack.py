"""intpack: every integer comes back; widths; bytes that no encode wrote."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import Intpack
from actstore.kernels.intpack import DTYPES
from tests.codecs import packed
from tests.codecs.contract import check_codec, tensor_of
from tests.oracles.intpack import numpy_dtype

CODEC = Intpack()
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


@st.composite
def elements(draw, most=1500):
    """Elements of one to three runs, each from a range of its own."""
    dtype = draw(st.sampled_from(NAMES))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    kind = numpy_dtype(dtype)
    least, largest = (0, 1) if dtype == "bool" else (np.iinfo(kind).min, np.iinfo(kind).max)
    runs = []
    for numel in draw(st.lists(st.integers(1, most), min_size=1, max_size=3)):
        low = draw(st.integers(least, largest) | st.sampled_from([least, largest]))
        high = draw(st.integers(low, largest) | st.just(largest))
        runs.append(rng.integers(low, high, numel, kind.newbyteorder("="), endpoint=True))
    return tensor_of(np.concatenate(runs).astype(kind).tobytes(), getattr(torch, dtype))


@settings(max_examples=40)
@given(elements())
def test_all_implementations_agree(tensor):
    check_codec(CODEC, tensor)


@pytest.mark.parametrize("width", range(65))
def test_every_width(width):
    x = torch.randint(-(1 << 63), (1 << 63) - 1, (1100,), generator=torch.Generator().manual_seed(0))
    x = (x >> 1 & (1 << width >> 1) - 1) * 2 + torch.arange(1100) % 2 if 0 < width < 64 else x * (width > 0)
    x[0], x[1] = (0, (1 << width) - 1) if width < 64 else (-(1 << 63), (1 << 63) - 1)
    check_codec(CODEC, x)
    assert packed.encode(CODEC, x)[24] == width


def test_the_documented_example():
    found = packed.encode(CODEC, torch.tensor([1000, 1003, 1001, 1000, 1007])).numpy().tobytes()
    header = bytes.fromhex("a0 01 00 00 00 00 00 00 05 00 00 00 00 00 00 00")
    descriptor = bytes.fromhex("e8 03 00 00 00 00 00 00 03 00 00 00 00 00 00 00")
    assert found == header + descriptor + b"".join(bytes([plane]) + bytes(127) for plane in (0x16, 0x12, 0x10))


@pytest.mark.parametrize(
    ("dtype", "below", "bits"),
    [(torch.int64, 50_257, 16), (torch.int32, 1000, 10), (torch.int64, 2, 1), (torch.bool, 2, 1), (torch.uint8, 1, 0)],
)
def test_bits_per_element(dtype, below, bits):
    x = torch.randint(0, below, (1 << 16,), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert len(packed.encode(CODEC, x)) == 16 + (1 << 16) * (bits + 1 / 8) / 8


@pytest.mark.parametrize("dtype", DTYPES[:-1])
def test_the_bound_is_met_by_noise(dtype):
    x = torch.randint(-(1 << 63), (1 << 63) - 1, (1 << 13,), generator=torch.Generator().manual_seed(0))
    x = x.view(dtype)[: 1 << 13]
    assert len(packed.encode(CODEC, x)) == CODEC.size(Spec.of(x)).nbytes == x.nbytes + x.numel() // 64 + 16


@given(elements(200), st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=4))
def test_altered_payloads(tensor, flips):
    packed.check_altered(CODEC, tensor, flips)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_altered_bit_of_the_descriptors(dtype):
    x = torch.randint(0, 2, (1500,), generator=torch.Generator().manual_seed(0)).to(dtype)
    refused = [packed.check_altered(CODEC, x, [(24 + bit // 8, 1 << bit % 8)]) is None for bit in range(64)]
    assert all(refused[7:8] + refused[16:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_cut_payloads(dtype):
    packed.check_cut(CODEC, torch.arange(2500).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_on_the_device(dtype):
    packed.check_counts(CODEC, torch.arange(3000).to(dtype), (0, 1, 1023, 1024, 2049, 3000))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_threads(dtype):
    packed.check_all_threads(CODEC, torch.randint(0, 100, ((5 << 20) // dtype.itemsize + 77,)).to(dtype))


def test_several_chunks_of_tiles():
    numel = 2051 * 1024 - 5
    x = torch.randint(0, 256, (numel,), generator=torch.Generator().manual_seed(0)) >> (torch.arange(numel) >> 10) % 9
    packed.check_chunks(CODEC, x.to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.uint16])
def test_other_dtypes_are_refused(dtype):
    assert not CODEC.accepts(dtype)
