"""zstd and lz4: what comes back, what altered payloads do, and what they need of their library."""

import multiprocessing
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore import ActivationStore
from actstore.base.spec import Spec
from actstore.codecs import AtMost, Int8, Intpack, Lz4, Raw, Zmask, Zstd
from actstore.errors import ChainError, ConfigError, KernelUnavailable, PayloadError, SpecError
from actstore.kernels import blosc
from actstore.policy import parse_decision
from tests.codecs.contract import GUARD, POISON, aligned, check_codec, storage_bytes, tensor_of
from tests.oracles import blosc as oracle
from tests.oracles.samples import random_bits

CODECS = (Zstd(), Lz4(), Lz4(shuffle="none"), Zstd(Int8()), Lz4(Zmask()), Zstd(Intpack()))


def encode(codec, x):
    _, payload = aligned(codec.size(Spec.of(x)).nbytes)
    return payload, codec.encode(x, payload)


def guarded(x):
    """Poisoned memory around a tensor like `x`, and that tensor."""
    memory, middle = aligned(x.nbytes)
    return memory, middle.view(x.dtype).view(x.shape)


def compressible(codec, numel=700):
    dtype = torch.float32 if codec.accepts(torch.float32) else torch.int32
    return (torch.arange(numel) // 9 % 50).to(dtype)


@pytest.mark.parametrize("codec", [Zstd(), Zstd(shuffle="bit"), Zstd(shuffle="none"), Lz4(), Lz4(level=9)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern_of_16_bits(codec, dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    check_codec(codec, x)
    check_codec(codec, x[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))])


@pytest.mark.parametrize("codec", [Zstd(), Lz4(), Zstd(Int8())], ids=str)
@pytest.mark.parametrize("numel", [1, 100, 128, 129, 1000])
def test_several_frames(codec, numel, monkeypatch):
    monkeypatch.setattr(blosc, "FRAME_NBYTES", 256)
    monkeypatch.setattr(oracle, "FRAME", 256)
    for x in (
        torch.zeros(numel),
        torch.randn(numel),
        tensor_of(random_bits(numel, "bfloat16", seed=1), torch.bfloat16),
    ):
        check_codec(codec, x)


@pytest.mark.parametrize("codec", [Zstd(), Lz4()], ids=str)
def test_what_does_not_get_smaller_is_stored(codec):
    for numel in (1, 15, 16, 1000, 100_000):
        x = torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        payload, used = encode(codec, x)
        assert AtMost(used) == codec.size(Spec.of(x))
        assert used == 32 + -(-numel // 16) * 16
        assert torch.equal(payload[32 : 32 + numel], x)


def test_what_repeats_gets_small():
    x = torch.arange(50_000) // 100
    assert encode(Zstd(), x)[1] * 100 < x.nbytes
    assert encode(Lz4(), x)[1] * 20 < x.nbytes
    hidden = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert encode(Zstd(), hidden)[1] < 0.75 * hidden.nbytes
    assert encode(Lz4(), hidden)[1] < 0.90 * hidden.nbytes


def test_the_documented_example():
    payload, used = encode(Zstd(), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    header = (48).to_bytes(8, "little") + 2 * (16).to_bytes(8, "little") + bytes(8)
    assert bytes(payload[:used].tolist()) == header + np.array([1, 2, 3, 4], "<f4").tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_truncated_payloads(codec):
    x = compressible(codec)
    payload, used = encode(codec, x)
    assert used < x.nbytes
    for nbytes in {*range(0, used, 16), *range(40), used - 1}:
        memory, back = guarded(x)
        with pytest.raises(PayloadError):
            codec.decode(payload[:nbytes].clone(), back)
        assert (memory == POISON).all()


@given(
    st.sampled_from(CODECS), st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=4)
)
def test_altered_payloads(codec, flips):
    x = compressible(codec)
    payload, used = encode(codec, x)
    payload = payload[:used].clone()
    for place, change in flips:
        place = place % used if place % 2 else place // 2 % min(used, 80)  # half of them in the headers
        payload[place] ^= change
    memory, back = guarded(x)
    try:
        codec.decode(payload, back)
    except PayloadError as error:
        assert str(error)  # noqa: PT017 - both outcomes are right
    start = back.data_ptr() - memory.data_ptr()
    assert start >= GUARD
    assert (memory[:start] == POISON).all()
    assert (memory[start + x.nbytes :] == POISON).all()


@pytest.mark.parametrize("place", [2, 3, 4, 12, 16, 21, 31])
def test_an_altered_chunk_header_is_refused(place):
    x = compressible(Zstd())
    payload, used = encode(Zstd(), x)
    payload[32 + place] ^= 0x60
    with pytest.raises(PayloadError, match="does not hold 2800 bytes as zstd writes them"):
        Zstd().decode(payload[:used], torch.empty_like(x))


def test_a_payload_of_the_other_codec_is_refused():
    x = compressible(Zstd())
    payload, used = encode(Zstd(), x)
    for codec in (Lz4(), Zstd(shuffle="bit"), Zstd(Int8())):
        with pytest.raises(PayloadError):
            codec.decode(payload[:used], torch.empty_like(x))


def in_child(queue):
    x = compressible(Zstd())
    payload, used = encode(Zstd(Int8()), x)
    back = torch.empty_like(x)
    Zstd(Int8()).decode(payload[:used], back)
    queue.put(back.sum().item())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork():
    queue = multiprocessing.get_context("fork").SimpleQueue()
    in_child(queue)
    expected = queue.get()
    child = multiprocessing.get_context("fork").Process(target=in_child, args=(queue,))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert queue.get() == expected


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_other_devices_are_refused(device):
    spec = Spec((64,), (1,), torch.float32, torch.device(device))
    with pytest.raises(SpecError, match=f"zstd runs on the CPU, but the tensor is on {device}. Use 'int8' there"):
        Zstd(Int8()).size(spec)


def test_options_that_are_refused():
    for level in (0, 10, True, 1.0):
        with pytest.raises(ConfigError, match="from 1 to 9"):
            Zstd(level=level)
    for inner in (Zstd(), Lz4(Int8()), Int8, "int8"):
        with pytest.raises(ChainError, match="takes a codec of tensors inside"):
            Lz4(inner)


def test_policy_text():
    assert parse_decision("zstd(int8, level=3) @ disk").codec == Zstd(Int8(), level=3)
    assert parse_decision("lz4").codec == Lz4(Raw(), shuffle="bit")
    assert (Zstd().lossless, Zstd(Int8()).lossless, Zstd(Int8(axis="token")).shaped) == (True, False, True)
    assert (Zstd().keyed, Zstd(Int8(round="dither")).keyed, Zstd().reproducible) == (False, True, False)


@pytest.mark.parametrize("missing", [False, True])
def test_the_library_is_loaded_by_the_first_encode(missing):
    code = f"""
        import sys, torch, actstore
        from actstore.codecs import Zstd
        from actstore.errors import KernelUnavailable
        from actstore.base.spec import Spec
        x, out = torch.ones(64), torch.empty(512, dtype=torch.uint8)
        Zstd().size(Spec.of(x))
        assert "blosc2" not in sys.modules
        if {missing}:
            sys.modules["blosc2"] = None
        try:
            Zstd().encode(x, out)
        except KernelUnavailable as error:
            assert {missing} and "pip install 'actstore[bytes]'" in str(error) and error.package == "blosc2"
        else:
            assert not {missing} and "blosc2" in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("policy", ["zstd", "lz4(zmask) @ disk", "0 : recompute(zstd(int8) @ host)"])
def test_a_store_needs_the_library_when_it_is_built(policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "blosc2", None)
    blosc.library.cache_clear()
    with pytest.raises(KernelUnavailable, match=r"blosc2 is not installed. Run pip install 'actstore\[bytes\]'"):
        ActivationStore(torch.nn.Sequential(torch.nn.Linear(2, 2)), policy)


@pytest.mark.parametrize("shape", [(200, 30), (30, 200)])
def test_a_shaped_codec_inside(shape):
    x = torch.randn(shape)
    back = check_codec(Zstd(Int8(32, axis="token")), x)
    plain, used = encode(Int8(32, axis="token"), x)
    again = torch.empty_like(x)
    Int8(32, axis="token").decode(plain[:used], again)
    assert storage_bytes(back) == storage_bytes(again)
