"""What zmask, topk and nm share: the format, inner codecs, payloads that were altered, the parts of the kernels."""

import ctypes
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import Codec, Exact, Int8, Nm, Raw, Topk, Zmask
from actstore.codecs.dispatch import KernelCodec
from actstore.errors import ChainError, PayloadError
from actstore.kernels.cpu import sparse as sparse_cpu
from actstore.kernels.sparse import PERIOD, TILE, Growth, SparseSections
from actstore.policy import parse_decision
from actstore.policy.options import codec_text
from tests.codecs.contract import GUARD, POISON, aligned, check_codec, check_guards, first_of_each, storage_bytes, turn
from tests.emulator.device import emulation, launch
from tests.oracles import find
from tests.oracles.samples import elements

LEAVES = [codec for codec in find.variants() if isinstance(codec, KernelCodec) and not codec.chained and codec._flat]
INNER = [pytest.param(leaf, marks=() if leaf in first_of_each(LEAVES) else pytest.mark.slow) for leaf in LEAVES]


def payload_of(codec, x, key=0):
    out = torch.empty(codec.size(Spec.of(x)).nbytes, dtype=torch.uint8)
    return out[: codec.encode(x, out, key)]


def half_zeros(dtype, numel, seed=0):
    x = elements("normal", dtype, numel)
    return torch.where(torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < 0.5, x, torch.zeros_like(x))


def test_the_documented_example():
    x = torch.tensor([0.0, 1.0, -0.0, 0.0, 2.0], dtype=torch.bfloat16)
    expected = "36" + "00" * 7 + "03" + "00" * 7 + "16" + "00" * 15 + "00" * 16 + "803f00800040"
    assert payload_of(Zmask(), x).numpy().tobytes().hex() == expected


# -- inner codecs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNER, ids=codec_text)
def test_any_leaf_can_be_inside(inner):
    dtype = turn(inner)
    cuda = inner in first_of_each(LEAVES)  # the emulator takes its time
    for numel in (40, 2500):
        check_codec(Zmask(inner), half_zeros(dtype, numel), cuda=cuda)
    if Topk(0.5, inner).accepts(getattr(torch, dtype)):
        check_codec(Topk(0.5, inner), half_zeros(dtype, 1100), cuda=cuda)


@pytest.mark.parametrize("inner", LEAVES, ids=codec_text)
def test_no_element_at_all(inner):
    check_codec(Zmask(inner), torch.zeros(1030, dtype=getattr(torch, turn(inner))), cuda=False)


@pytest.mark.parametrize("inner", [leaf for leaf in LEAVES if leaf.exact], ids=codec_text)
def test_a_device_computes_the_size_of_the_inner_payload(inner):
    for itemsize in (1, 2, 4, 8):
        growth = Growth.of(lambda numel, itemsize=itemsize: inner._nbytes(numel, itemsize))
        for numel in (0, 1, PERIOD - 1, PERIOD, 3 * PERIOD + 77, 10_000_019, (1 << 33) + 1234):
            assert numel // PERIOD * growth.step + growth.table[numel % PERIOD] == inner._nbytes(numel, itemsize)


@pytest.mark.parametrize("text", ["zmask(zmask)", "topk(zmask(int8))", "nm(topk)"])
def test_chains_inside_are_refused(text):
    with pytest.raises(ChainError, match="has an inner codec of its own"):
        parse_decision(text)


@pytest.mark.parametrize("outer", [Zmask, lambda inner: Topk(0.5, inner), lambda inner: Nm(1, 4, inner)])
@pytest.mark.parametrize(
    ("inner", "words"),
    [(Int8, r"Call it: Int8\(\)"), ("int8", "takes a codec"), (Int8(axis="token"), "needs whole rows")],
    ids=["class", "text", "shaped"],
)
def test_what_cannot_be_inside(outer, inner, words):
    with pytest.raises(ChainError, match=words):
        outer(inner)


def test_codecs_that_are_no_kernels_cannot_be_inside():
    class Other(Codec):
        name, lossless = "other", True
        accepts = size = encode = decode = None

    with pytest.raises(ChainError, match="needs to know how many there are"):
        Zmask(Other())


def test_chained():
    assert [codec.chained for codec in (Raw(), Int8(), Zmask(), Topk(), Nm())] == [False, False, True, True, True]
    for codec in find.variants():
        assert codec.chained == any(isinstance(getattr(codec, field.name), Codec) for field in fields(codec))


def test_policy_text():
    assert parse_decision("zmask(int8(group=32, round=dither))").codec == Zmask(Int8(32, round="dither"))
    assert parse_decision("topk(fraction=0.25, int8)").codec == Topk(0.25, Int8())
    assert parse_decision("nm(n=1, m=8)").codec == Nm(1, 8)
    for codec in (Zmask(Int8()), Topk(0.1, Int8()), Nm(3, 8, Int8(64))):
        assert parse_decision(codec_text(codec)).codec == codec


# -- payloads that no encoder wrote ------------------------------------------------------------------------------------

SPARSE = (Zmask(), Zmask(Int8(32)), Topk(0.3), Nm(2, 8, Int8()))


def decode_guarded(codec, payload, x):
    """Decode a buffer that ends with its last byte; what came back, and that nothing else was written."""
    memory, buf = aligned(len(payload))
    buf.copy_(payload)
    before = memory.clone()
    space = torch.full((x.numel() * x.dtype.itemsize + 2 * GUARD,), POISON, dtype=torch.uint8)
    out = space[GUARD:-GUARD].view(x.dtype)
    try:
        codec.decode(buf, out)
    finally:
        check_guards(space, out, x.numel() * x.dtype.itemsize)
        assert torch.equal(memory, before)
    return out


@pytest.mark.parametrize("codec", SPARSE, ids=codec_text)
@given(data=st.data())
def test_altered_payloads(codec, data):
    """They are refused with nothing written, or decode to something, always the same, within the tensor."""
    x = half_zeros("float32", 2100)
    payload = payload_of(codec, x).clone()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 31) | st.integers(0, len(payload) - 1))
        payload[at] ^= data.draw(st.integers(1, 255))
    found = []
    for _ in range(2):
        try:
            found.append(storage_bytes(decode_guarded(codec, payload, x)))
        except PayloadError as error:
            found.append(str(error))
    assert found[0] == found[1]


@pytest.mark.parametrize("codec", SPARSE, ids=codec_text)
@given(data=st.data())
def test_altered_masks_and_starts_are_noticed(codec, data):
    x = half_zeros("bfloat16", 2100)
    payload = payload_of(codec, x).clone()
    sections = SparseSections.of(2100)
    used = [*range(16), *range(16, 16 + 4 * 66), *range(sections.starts, sections.starts + 24)]
    payload[data.draw(st.sampled_from(used))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(PayloadError, match="sparse payload"):
        decode_guarded(codec, payload, x)


@pytest.mark.parametrize("codec", SPARSE, ids=codec_text)
def test_truncated_payloads(codec):
    x = half_zeros("float16", 2100)
    payload = payload_of(codec, x)
    for nbytes in (
        0,
        7,
        8,
        15,
        16,
        300,
        SparseSections.of(2100).inner - 1,
        SparseSections.of(2100).inner,
        len(payload) - 1,
    ):
        with pytest.raises(PayloadError):
            decode_guarded(codec, payload[:nbytes], x)


def test_the_fallback_refuses_altered_payloads_too():
    x = half_zeros("float32", 2100)
    payload, back = payload_of(Zmask(), x), torch.empty_like(x)
    decode = Zmask().kernels("torch", x.dtype, x.device).decode
    for at, value in ((0, 1), (7, 128), (8, 1), (15, 128), (20, 4)):
        _, altered = aligned(len(payload))
        altered.copy_(payload)
        altered[at] ^= value
        with pytest.raises(PayloadError, match="sparse payload"):
            decode(altered, back, 2100, 0)
    _, short = aligned(20)
    with pytest.raises(PayloadError, match="ends after 20 bytes"):
        decode(short, back, 2100, 0)


# -- the kernels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
def test_loops_for_processors_that_cannot_compress(dtype):
    kind = getattr(torch, dtype)
    compact = sparse_cpu.compile_compact(kind.itemsize, False)
    expand = sparse_cpu.compile_expand(kind.itemsize, False)
    tensors = [half_zeros(dtype, numel) for numel in (1, 31, 1024, 1025, 5000)]
    for x in (*tensors, torch.zeros(2000, dtype=kind), torch.ones(2000, dtype=kind)):
        numel, payload = len(x), payload_of(Zmask(), x)
        kept, tiles = len(x[x != 0]) * kind.itemsize, -(-numel // TILE)
        memory, values = aligned(kept)
        compact(x.data_ptr(), values.data_ptr(), numel, 0, payload.data_ptr(), 0, tiles)
        assert torch.equal(values, payload[SparseSections.of(numel).inner :])
        check_guards(memory, values, kept)
        back = torch.full_like(x, 7)
        expand(values.data_ptr(), back.data_ptr(), numel, 0, payload.data_ptr(), 0, tiles)
        assert torch.equal(back, x)


def test_the_check_of_a_whole_tile_too_many():
    x = torch.ones(2048)
    payload = payload_of(Zmask(), x)
    wrong = ctypes.c_int64(0)
    sparse_cpu.check(payload.data_ptr(), ctypes.addressof(wrong), 2048, 0, 0, 0, 2)
    assert wrong.value == 0
    payload[SparseSections.of(2048).starts + 8] += 1
    sparse_cpu.check(payload.data_ptr(), ctypes.addressof(wrong), 2048, 0, 0, 0, 2)
    assert wrong.value == 1


@pytest.mark.parametrize("codec", [Zmask(), Zmask(Int8(round="dither")), Topk(0.3), Nm(2, 8)], ids=codec_text)
def test_several_threads(codec):
    x = half_zeros("float32", 3_000_001)
    parts = [payload_of(codec, x, 5) for _ in range(2)]
    assert torch.equal(*parts)
    back, fallback = torch.empty_like(x), torch.empty_like(x)
    codec.decode(parts[0], back, 5)
    _, out = aligned(codec.size(Spec.of(x)).nbytes)
    kernels = codec.kernels("torch", x.dtype, x.device)
    assert kernels.encode(x, out, x.numel(), 5) == len(parts[0])
    assert torch.equal(out[: len(parts[0])], parts[0])
    kernels.decode(out, fallback, x.numel(), 5)
    assert torch.equal(back, fallback)


@pytest.mark.parametrize(("count", "per_block"), [(1, 2048), (2048, 2048), (2049, 2048), (5000, 2048), (5000, 5000)])
def test_the_scan_on_a_device(count, per_block):
    with emulation():
        scan = launch.launcher("sparse", "sparse_scan", torch.device("cpu"))
    rng = np.random.default_rng(count)
    numbers = torch.tensor(rng.integers(0, 1 << 40, count))
    parts = numbers.split(per_block)
    sums, starts = torch.stack([part.sum() for part in parts]), torch.cat([part.cumsum(0) - part for part in parts])
    totals = torch.full((len(parts),), -1)
    scan(len(parts), numbers, totals, count, per_block)
    assert torch.equal(totals, sums)
    assert torch.equal(numbers, starts)


def test_sizes():
    spec = Spec((1000,), (1,), torch.float16, torch.device("cpu"))
    head = 16 + 128 + 16
    assert Zmask().size(spec).nbytes == head + 2000
    assert Topk(0.25).size(spec) == Exact(head + 500)
    assert Nm(2, 4).size(spec) == Exact(head + 1000)
    assert Topk(0.25, Int8()).size(spec) == Exact(head + 256 + 4)
