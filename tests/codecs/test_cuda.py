"""CUDA kernels: their bytes, their stream, counts beyond 32 bits."""

from dataclasses import asdict
from importlib import import_module

import pytest
import torch

from actstore.codecs import Int8, Raw
from actstore.errors import SpecError
from actstore.spec import Spec
from tests.codecs.contract import tensor_of
from tests.oracles.samples import DTYPES, random_bits, samples

pytestmark = pytest.mark.gpu

CODECS = (Raw(), Int8(), Int8(32), Int8(64), Int8(256), Int8(512), Int8(1024))


@pytest.fixture(autouse=True, scope="module")
def cupy():
    return pytest.importorskip("cupy", reason="needs CuPy to compile the kernels")


def check(codec, data, dtype, offset=0):
    oracle = import_module(f"tests.oracles.{codec.name}")
    x = tensor_of(data, getattr(torch, dtype)).cuda()
    expected = oracle.encode(data, dtype, **asdict(codec))
    moved = torch.empty(x.numel() + offset, dtype=x.dtype, device="cuda")[offset:].copy_(x)
    payload = torch.full((len(expected) + 64,), 0xA5, dtype=torch.uint8, device="cuda")
    assert codec.encode(moved, payload) == len(expected)
    assert bytes(payload.tolist()) == expected + b"\xa5" * 64
    memory = torch.zeros(x.numel() + offset + 32, dtype=x.dtype, device="cuda")
    codec.decode(payload, memory[offset : offset + x.numel()])
    found = memory.view(torch.uint8).tolist()
    start, nbytes = offset * x.dtype.itemsize, len(data)
    assert bytes(found[start : start + nbytes]) == oracle.decode(expected, x.numel(), dtype, **asdict(codec))
    assert not any(found[:start])
    assert not any(found[start + nbytes :])


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(codec, dtype):
    for data in samples(dtype).values():
        check(codec, data, dtype)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_and_tails(codec, dtype):
    for numel in (1, 7, 16, 31, 32, 33, 127, 128, 129, 1000, 1024, 1025, 8191, 8193, 50_001):
        check(codec, random_bits(numel, dtype, seed=numel), dtype, offset=numel % 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pattern_of_16_bits(dtype):
    check(Int8(32), b"".join(i.to_bytes(2, "little") for i in range(1 << 16)), dtype)


@pytest.mark.parametrize("codec", CODECS[:2], ids=str)
def test_runs_on_the_current_stream(codec):
    x = torch.zeros(1 << 20, device="cuda")
    payload = torch.empty(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8, device="cuda")
    back = torch.empty_like(x)
    codec.encode(x, payload)
    codec.decode(payload, back)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # whoever does not wait for this stream sees the zeros
        x.fill_(127)
        codec.encode(x, payload)
        codec.decode(payload, back)
    assert not stream.query()
    stream.synchronize()
    assert (back == 127).all()


@pytest.mark.parametrize("codec", CODECS[:2], ids=str)
def test_never_waits_for_the_device(codec):
    x = torch.ones(1 << 20, device="cuda")
    payload = torch.empty(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8, device="cuda")
    codec.encode(x, payload)
    codec.decode(payload, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        codec.encode(x, payload)
        codec.decode(payload, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("codec", [Raw(), Int8()], ids=str)
def test_fallback_writes_the_same_bytes(codec):
    fallback = import_module(f"actstore.kernels.{codec.name}_torch")
    for dtype in DTYPES:
        kernels = fallback.kernels(getattr(torch, dtype), torch.device("cuda"), **asdict(codec))
        for data in samples(dtype).values():
            x = tensor_of(data, getattr(torch, dtype)).cuda()
            one, other = (
                torch.empty(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)
            )
            codec.encode(x, one)
            kernels.encode(x, other, x.numel())
            assert torch.equal(one, other)
            back, other_back = torch.empty_like(x), torch.empty_like(x)
            codec.decode(one, back)
            kernels.decode(one, other_back, x.numel())
            assert torch.equal(back.view(torch.uint8), other_back.view(torch.uint8))


def test_counts_beyond_32_bits():
    numel = (1 << 32) + 5
    if torch.cuda.mem_get_info()[0] < 5 * numel:
        pytest.skip("needs 20 GiB of free device memory")
    x = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    x[-5:] = torch.tensor([1.0, -1.0, 0.5, torch.nan, 0.25])
    codec = Int8()
    payload = torch.empty(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8, device="cuda")
    codec.encode(x, payload)
    assert payload[numel - 5 : numel].view(torch.int8).tolist() == [126, -126, 63, -128, 32]
    x.fill_(7)
    codec.decode(payload, x)
    assert x[-5:].nan_to_num(9).tolist() == [1.0, -1.0, 0.5, 9.0, 0.25390625]
    assert (x[:-5:4099] == 0).all()


def test_devices_are_not_mixed():
    with pytest.raises(SpecError, match="buffer on cuda"):
        Raw().encode(torch.ones(4, device="cuda"), torch.empty(64, dtype=torch.uint8))
