"""What every codec promises, checked on one tensor: three implementations, the same bytes."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module

import pytest
import torch

from actstore.codecs import Codec, Exact
from actstore.errors import PayloadError, SpecError
from actstore.spec import Spec

POISON = 0xA5
GUARD = 64  # bytes on either side that must stay as they were


def storage_bytes(tensor):
    """The bytes of the elements in storage order."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return bytes(flat.clone().view(torch.uint8).tolist())


def aligned(nbytes):
    """Poisoned memory, and the middle of it, which starts at a multiple of 16."""
    memory = torch.full((nbytes + 2 * GUARD + 16,), POISON, dtype=torch.uint8)
    start = GUARD + -(memory.data_ptr() + GUARD) % 16
    return memory, memory[start : start + nbytes]


def check_guards(memory, payload, nbytes):
    start = payload.data_ptr() - memory.data_ptr()
    assert (memory[:start] == POISON).all()
    assert (memory[start + nbytes :] == POISON).all()


def tensor_of(data, dtype):
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def blank(tensor):
    """A tensor of the same spec, at the same offset in a storage of its own, poisoned."""
    span = tensor.storage_offset() + tensor.numel()
    memory = torch.full((span * tensor.dtype.itemsize,), POISON, dtype=torch.uint8).view(tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def implementations(codec: Codec, dtype):
    """(name, encode, decode) of each way to run `codec` on the CPU."""
    fallback = import_module(f"actstore.kernels.{codec.name}_torch").kernels(
        dtype, torch.device("cpu"), **asdict(codec)
    )
    yield "codec", codec.encode, codec.decode
    yield (
        "fallback",
        lambda src, out: fallback.encode(src, out, src.numel()) if src.numel() else None,
        lambda buf, out: fallback.decode(buf, out, out.numel()) if out.numel() else None,
    )


def check_codec(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    """Check one tensor and return what comes back."""
    oracle = import_module(f"tests.oracles.{codec.name}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    before = storage_bytes(tensor)
    expected = oracle.encode(before, dtype, **asdict(codec))
    expected_back = oracle.decode(expected, tensor.numel(), dtype, **asdict(codec))
    size = codec.size(Spec.of(tensor))
    assert size == Exact(len(expected))

    for name, encode, decode in implementations(codec, tensor.dtype):
        for spare in (0, 48):
            memory, out = aligned(size.nbytes + spare)
            used = encode(tensor, out)
            assert used == (size.nbytes if name == "codec" else None)
            assert bytes(out[: size.nbytes].tolist()) == expected, name
            check_guards(memory, out, size.nbytes)
        assert storage_bytes(tensor) == before
        for payload in (out, out[: size.nbytes]):
            back = blank(tensor)
            decode(payload, back)
            assert storage_bytes(back) == expected_back, name
        assert bytes(out[: size.nbytes].tolist()) == expected

    check_refusals(codec, tensor, size.nbytes)
    assert not codec.lossless or expected_back == before
    return back


def check_refusals(codec, tensor, nbytes):
    if not nbytes:
        return
    _, out = aligned(nbytes)
    with pytest.raises(SpecError, match=f"has {nbytes - 1} bytes, but {nbytes} are needed") as caught:
        codec.encode(tensor, out[:-1])
    assert caught.value.needed == nbytes
    assert (out == POISON).all()
    back = blank(tensor)
    with pytest.raises(PayloadError, match=f"has {nbytes - 1} bytes, but {nbytes} are needed"):
        codec.decode(out[:-1], back)
    assert storage_bytes(back) == storage_bytes(blank(tensor))
