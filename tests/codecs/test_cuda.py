"""CUDA kernels of every codec with every option: their bytes, their stream, counts beyond 32 bits."""

import fcntl
import tempfile
from pathlib import Path

import pytest
import torch

from actstore.base.spec import Spec
from actstore.codecs import Raw
from actstore.codecs.dispatch import KernelCodec
from actstore.errors import ActstoreError, KernelUnavailable, SpecError
from actstore.policy.options import codec_text
from tests.codecs.contract import GUARD, KEY, POISON, Implementation, sizes_of, storage_bytes, tensor_of
from tests.oracles import find
from tests.oracles.samples import DTYPES, EVERY_DTYPE, elements, random_bits, samples

pytestmark = pytest.mark.gpu

EVERY = find.variants()
VARIANTS = [codec for codec in EVERY if isinstance(codec, KernelCodec)]
# One of each kernel, for what does not hang on the other options.
CODECS = list({(codec.name, codec.kernel_name): codec for codec in reversed(VARIANTS)}.values())
DEVICE = torch.device("cuda", 0)
LARGE = (1 << 32) + 5
OTHERS_NBYTES = 8 << 30  # left to processes that run beside a large test


def params(codecs, dtypes):
    return [
        pytest.param(codec, dtype, id=f"{codec_text(codec)}-{dtype}")
        for codec in codecs
        for dtype in dtypes
        if codec.accepts(getattr(torch, dtype))
    ]


def first_dtype(codec):
    return next(dtype for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.float32) if codec.accepts(dtype))


@pytest.fixture(autouse=True, scope="module")
def cupy():
    return pytest.importorskip("cupy", reason="needs CuPy to compile the kernels")


def ways(codec, dtype, fallback):
    """The codec itself, and where asked the same as PyTorch operations."""
    yield Implementation("codec", codec)
    if fallback:
        yield Implementation("fallback", codec, lambda codec: codec.kernels("torch", dtype, DEVICE))


def on_device(tensor, offset):
    """A copy with the same strides, `offset` elements behind the start of poisoned memory; and that memory."""
    nbytes = (tensor.numel() + offset) * tensor.dtype.itemsize
    memory = torch.full((nbytes + GUARD,), POISON, dtype=torch.uint8, device=DEVICE)
    moved = memory[:nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset)
    return moved.copy_(tensor), memory


def bytes_of(tensor):
    return tensor.cpu().view(torch.uint8).numpy().tobytes()


def check(codec, tensor, offset=0, fallback=False):
    """A CPU tensor on the device, against the oracle, with guards around everything that is written."""
    dtype, data, sizes = str(tensor.dtype).removeprefix("torch."), storage_bytes(tensor), sizes_of(tensor)
    expected = find.encode(codec, data, dtype, KEY, sizes)
    expected_back = find.decode(codec, expected, tensor.numel(), dtype, KEY, sizes)
    nbytes, used = codec.size(Spec.of(tensor)).nbytes, len(expected)
    poison, start = bytes([POISON]), offset * tensor.dtype.itemsize
    source, memory = on_device(tensor, offset)
    before = bytes_of(memory)
    for way in ways(codec, tensor.dtype, fallback):
        payload = torch.full((nbytes + GUARD,), POISON, dtype=torch.uint8, device=DEVICE)
        said = way.encode(source, payload)
        assert said == nbytes if way.name == "codec" else said in (used, nbytes, None)
        found = bytes_of(payload)
        assert found[:used] == expected, way.name
        assert found[nbytes:] == poison * GUARD, way.name
        assert bytes_of(memory) == before, way.name
        back, written = on_device(tensor, offset)
        written.fill_(POISON)
        way.decode(payload, back)
        assert bytes_of(written) == poison * start + expected_back + poison * GUARD, way.name


@pytest.mark.parametrize(("codec", "dtype"), params(VARIANTS, DTYPES))
def test_values(codec, dtype):
    for data in samples(dtype).values():
        check(codec, tensor_of(data, getattr(torch, dtype)))


@pytest.mark.parametrize(("codec", "dtype"), params(VARIANTS, DTYPES))
def test_sizes_and_tails(codec, dtype):
    for numel in (1, 7, 16, 31, 33, 127, 129, 1000, 1025, 8193):
        data = random_bits(numel, dtype, seed=numel)
        check(codec, tensor_of(data, getattr(torch, dtype)), offset=numel % 4, fallback=numel in (33, 1025, 8193))


@pytest.mark.parametrize(("codec", "dtype"), params(VARIANTS, EVERY_DTYPE[len(DTYPES) :]))
def test_other_dtypes(codec, dtype):
    for numel in (1, 15, 129, 1025, 8193):
        for kind in ("normal", "special"):
            check(codec, elements(kind, dtype, numel), offset=numel % 3, fallback=numel == 1025)


@pytest.mark.parametrize(("codec", "dtype"), params(CODECS, (*DTYPES, "int64", "bool")))
def test_many_blocks(codec, dtype):
    check(codec, elements("normal", dtype, 50_001))


@pytest.mark.parametrize("codec", VARIANTS, ids=codec_text)
def test_shapes(codec):
    dtype = str(first_dtype(codec)).removeprefix("torch.")
    x = elements("normal", dtype, 3 * 37 * 130)
    for tensor in (x.view(111, 130), x.view(130, 111).t(), x.view(3, 37, 130).permute(2, 0, 1), x.view(1, -1, 1)):
        check(codec, tensor, fallback=True)


@pytest.mark.parametrize(("codec", "dtype"), params(CODECS, ("float16", "bfloat16")))
def test_every_pattern_of_16_bits(codec, dtype):
    check(codec, tensor_of(b"".join(i.to_bytes(2, "little") for i in range(1 << 16)), getattr(torch, dtype)))


@pytest.mark.parametrize("codec", CODECS, ids=codec_text)
def test_runs_on_the_current_stream(codec):
    values = torch.arange(1 << 20, device=DEVICE).remainder(2).to(first_dtype(codec))
    payload = torch.zeros(codec.size(Spec.of(values)).nbytes, dtype=torch.uint8, device=DEVICE)
    x, back = torch.zeros_like(values), torch.zeros_like(values)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # compiles, and brings the stream's memory
        codec.encode(values, payload, KEY)
        codec.decode(payload, back, KEY)
    torch.cuda.synchronize()
    expected = bytes_of(back)
    payload.zero_(), back.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # whoever does not wait for this stream sees zeros
        x.copy_(values)
        codec.encode(x, payload, KEY)
        codec.decode(payload, back, KEY)
    assert not stream.query()
    stream.synchronize()
    assert bytes_of(back) == expected


@pytest.mark.parametrize("codec", VARIANTS, ids=codec_text)
def test_never_waits_for_the_device(codec):
    x = torch.ones(1 << 16, device=DEVICE, dtype=first_dtype(codec))
    payload = torch.empty(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8, device=DEVICE)
    codec.encode(x, payload, KEY)
    codec.decode(payload, x, KEY)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert codec.encode(x, payload, KEY) == payload.numel()
        codec.decode(payload, x, KEY)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def most_memory():
    """Most of the free memory of the device, for one process at a time, which gives it back."""
    with (Path(tempfile.gettempdir()) / "actstore-large-tests").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        most = torch.cuda.memory_reserved() + free - OTHERS_NBYTES
        torch.cuda.set_per_process_memory_fraction(max(0.0, most / total))
        yield most
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.parametrize("codec", [codec for codec in CODECS if not codec.keyed], ids=codec_text)
def test_counts_beyond_32_bits(codec, most_memory):
    """The last elements are a group, or a tile, of their own: what is before them changes nothing."""
    dtype = first_dtype(codec)
    tail = torch.tensor([1.0, -1.0, 0.5, 0.0, 0.25]).to(dtype)
    expected, small = torch.empty_like(tail), torch.empty(codec.size(Spec.of(tail)).nbytes, dtype=torch.uint8)
    codec.encode(tail, small)
    codec.decode(small, expected)
    if most_memory < 5 * LARGE:
        pytest.skip("needs 20 GiB of free device memory")
    try:
        x = torch.zeros(LARGE, dtype=dtype, device=DEVICE)
        x[-5:] = tail.to(DEVICE)
        payload = torch.empty(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8, device=DEVICE)
        codec.encode(x, payload)
        x.view(torch.uint8).fill_(1)
        codec.decode(payload, x)
        assert torch.equal(x[-5:].cpu(), expected)
        assert not x[:-5:4099].any()
    except torch.cuda.OutOfMemoryError as error:
        pytest.skip(f"needs more device memory: {error}")


@pytest.mark.parametrize("codec", [codec for codec in EVERY if not isinstance(codec, KernelCodec)], ids=codec_text)
def test_codecs_without_kernels(codec):
    """Codecs through other libraries refuse a device that they do not know, or come back near."""
    x = torch.randn(100, 128, device=DEVICE)
    payload = torch.empty(codec.size(Spec.of(x.cpu())).nbytes, dtype=torch.uint8, device=DEVICE)
    back = torch.empty_like(x)
    try:
        codec.encode(x, payload, KEY)
        codec.decode(payload, back, KEY)
        refused = ""
    except KernelUnavailable as error:
        pytest.skip(str(error))
    except ActstoreError as error:
        refused = str(error)
    if refused:
        assert "cpu" in refused.lower()
    else:
        assert (back - x).norm() <= (0 if codec.lossless else 0.05) * x.norm()


def test_devices_are_not_mixed():
    with pytest.raises(SpecError, match="buffer on cuda"):
        Raw().encode(torch.ones(4, device="cuda"), torch.empty(64, dtype=torch.uint8))
