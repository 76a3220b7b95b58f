"""expack: every bit comes back; which windows are taken; sizes; bytes that no encode wrote."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import dropout, gelu

from actstore.base.spec import Spec
from actstore.codecs import Expack
from tests.codecs import packed
from tests.codecs.contract import check_codec, tensor_of
from tests.oracles import expack as oracle
from tests.oracles.samples import DTYPES, ITEMSIZE, SPECIAL

CODEC = Expack()
FLOATS = [getattr(torch, dtype) for dtype in DTYPES]


@st.composite
def elements(draw, most=1500):
    """A dtype and elements of one to three runs, each of one kind."""
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    unsigned = np.dtype(f"<u{ITEMSIZE[dtype]}")
    lowest, bits = oracle.EXPONENT[dtype]
    runs = []
    for numel in draw(st.lists(st.integers(1, most), min_size=1, max_size=3)):
        kind = draw(st.sampled_from(["window", "bits", "special", "constant"]))
        run = rng.integers(0, 1 << 8 * unsigned.itemsize, numel, dtype=np.uint64)
        if kind == "window":  # geometric below a top, with zeros and a few exponents anywhere
            top = draw(st.integers(0, 2**bits - 1))
            exponents = np.maximum(top - rng.geometric(draw(st.sampled_from([0.06, 0.2, 0.5, 0.9])), numel), 0)
            exponents[rng.random(numel) < draw(st.sampled_from([0, 0.02, 0.5, 0.95]))] = 0
            anywhere = rng.random(numel) < draw(st.sampled_from([0, 0.01, 0.1]))
            exponents[anywhere] = rng.integers(0, 2**bits, anywhere.sum())
            run = run & ~np.uint64((2**bits - 1) << lowest) | exponents.astype(np.uint64) << np.uint64(lowest)
        elif kind == "special":
            run = rng.choice(np.array(SPECIAL[dtype], np.uint64), numel)
        elif kind == "constant":
            run[:] = run[0]
        runs.append(run.astype(unsigned))
    return tensor_of(np.concatenate(runs).tobytes(), getattr(torch, dtype))


@settings(max_examples=40)
@given(elements())
def test_all_implementations_agree(tensor):
    check_codec(CODEC, tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern_of_16_bits(dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    check_codec(CODEC, x)
    check_codec(CODEC, x[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))])


def test_the_documented_example():
    x = torch.tensor([1.0, -1.5, 0.5, 0.0, 2.0], dtype=torch.bfloat16)
    header = bytes.fromhex("c0 00 00 00 00 00 00 00 05 00 00 00 00 00 00 00")
    descriptor = bytes.fromhex("00 00 00 00 00 7f 61 00") + bytes(8)
    low = bytes.fromhex("00 c0 00 00 00") + bytes(11)
    part = b"\x1c" + bytes(127) + bytes.fromhex("7e 00 80") + bytes(13)
    assert packed.encode(CODEC, x).numpy().tobytes() == header + descriptor + low + part


def data(name):
    """What activations look like, 2**19 elements."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 1024, generator=generator)
    if name == "outlier channels":
        x[:, torch.randperm(1024, generator=generator)[:6]] *= 30
    if name == "dropout":
        torch.manual_seed(0)
        return dropout(x, 0.1)
    make = {"gelu": gelu, "relu": torch.relu, "softmax": lambda x: torch.softmax(2 * x, 1)}
    return make.get(name, lambda x: x)(x)


@pytest.mark.parametrize(
    ("name", "ratios"),
    [
        ("normal", (1.41, 1.115, 1.17)),
        ("gelu", (1.38, 1.10, 1.16)),
        ("outlier channels", (1.40, 1.11, 1.165)),
        ("relu", (1.41, 1.115, 1.17)),
        ("dropout", (1.39, 1.105, 1.16)),
        ("softmax", (1.31, 1.07, 1.13)),
    ],
)
def test_ratios(name, ratios):
    for dtype, ratio in zip((torch.bfloat16, torch.float16, torch.float32), ratios, strict=True):
        x = data(name).to(dtype)
        assert x.nbytes / len(packed.encode(CODEC, x)) >= ratio


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bound_is_met_by_noise(dtype):
    x = torch.randint(-(1 << 31), 1 << 31, (1 << 14,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    x = x.to(torch.int32).view(dtype)[: 1 << 14]
    assert len(packed.encode(CODEC, x)) == CODEC.size(Spec.of(x)).nbytes == x.nbytes + x.numel() // 128 + 16


@given(elements(200), st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=4))
def test_altered_payloads(tensor, flips):
    packed.check_altered(CODEC, tensor, flips)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_altered_bit_of_the_descriptors(dtype):
    x = torch.randn(1500, generator=torch.Generator().manual_seed(0)).to(dtype)
    refused = [packed.check_altered(CODEC, x, [(16 + bit // 8, 1 << bit % 8)]) is None for bit in range(128)]
    width, escapes = range(48, 52), range(53, 64)
    assert all(refused[at + tile] for tile in (0, 64) for at in (*range(8, 40), *width, *escapes))


@pytest.mark.parametrize("dtype", FLOATS)
def test_cut_payloads(dtype):
    packed.check_cut(CODEC, torch.randn(2500, generator=torch.Generator().manual_seed(0)).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_counts_on_the_device(dtype):
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed.check_counts(CODEC, x, (0, 1, 1023, 1024, 2049, 3000))


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_threads(dtype):
    packed.check_all_threads(CODEC, torch.randn((5 << 20) // dtype.itemsize + 77).to(dtype))


def test_several_chunks_of_tiles():
    tiles = 2051
    exponents = torch.randint(1, 1 << 8, (tiles, 1024), generator=torch.Generator().manual_seed(0))
    exponents >>= torch.arange(tiles)[:, None] % 8
    packed.check_chunks(CODEC, (exponents << 7).to(torch.int16).view(torch.bfloat16)[:, :1000].reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    assert not CODEC.accepts(dtype)
