"""What codecs whose payload says its own length promise on a CPU about bytes that no `encode` wrote."""

from __future__ import annotations

import pytest
import torch

from actstore.base.spec import Spec
from actstore.errors import PayloadError
from tests.codecs.contract import aligned, check_guards, implementations, storage_bytes
from tests.emulator.device import emulated
from tests.oracles import find


def encode(codec, tensor):
    """The payload, cut to its length."""
    _, out = aligned(codec.size(Spec.of(tensor)).nbytes)
    return out[: codec.encode(tensor, out)].clone()


def decode(way, payload, like):
    """What comes back of a payload that is alone in its memory; None where it is refused."""
    _, buf = aligned(len(payload))
    memory, out = aligned(like.numel() * like.dtype.itemsize)
    try:
        way.decode(buf.copy_(payload), out.view(like.dtype))
        return out.numpy().tobytes()
    except PayloadError:
        return None
    finally:
        check_guards(memory, out, len(out))


def check_altered(codec, tensor, flips):
    """Refused, or the same bytes by everyone.

    Parameters
    ----------
    flips : (position, byte) to change in the payload
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    payload = encode(codec, tensor)
    for position, byte in flips:
        payload[position % len(payload)] ^= byte
    found = {way.name: decode(way, payload, tensor) for way in implementations(codec, tensor.dtype, cuda=False)}
    assert found["codec"] == found["fallback"]
    if found["codec"] is not None:
        assert found["codec"] == find.decode(codec, payload.numpy().tobytes(), tensor.numel(), dtype)
    return found["codec"]


def check_cut(codec, tensor):
    """A payload that ends early, or that is one of other elements, is refused before anything is written."""
    payload = encode(codec, tensor)
    for way in implementations(codec, tensor.dtype, cuda=False):
        for nbytes in (0, 7, 8, 16, len(payload) // 2, len(payload) - 1):
            back = torch.full_like(tensor, 1)
            with pytest.raises(PayloadError):
                way.decode(payload[:nbytes], back)
            assert (back == 1).all()
        for numel in (tensor.numel() - 1, tensor.numel() + 1):
            said = rf"for {tensor.numel()} elements: must have \d+ to \d+ bytes for {numel} elements"
            with pytest.raises(PayloadError, match=said):
                way.decode(payload, torch.empty(numel, dtype=tensor.dtype))


def check_counts(codec, tensor, counts):
    """A device that is told how many elements there are writes what is written of so many, and reads it."""
    kernels = emulated(codec, tensor.dtype)
    dtype = str(tensor.dtype).removeprefix("torch.")
    for count in counts:
        expected = find.encode(codec, storage_bytes(tensor[:count]), dtype) or bytes(16)
        _, out = aligned(codec.size(Spec.of(tensor)).nbytes)
        kernels.encode(tensor, out, tensor.numel(), 0, count=torch.tensor(count))
        assert out[: len(expected)].numpy().tobytes() == expected
        back = torch.full_like(tensor, 1)
        kernels.decode(out, back, tensor.numel(), 0, count=torch.tensor(count))
        assert storage_bytes(back[:count]) == storage_bytes(tensor[:count])
        assert (back[count:] == 1).all()


def check_all_threads(codec, tensor):
    """A tensor large enough for all threads has the bytes that the fallback writes on one."""
    one, other = implementations(codec, tensor.dtype, cuda=False)
    (_, out), (_, other_out) = (aligned(codec.size(Spec.of(tensor)).nbytes) for _ in range(2))
    used = one.encode(tensor, out)
    other.encode(tensor, other_out)
    assert torch.equal(out[:used], other_out[:used])
    assert decode(one, out[:used], tensor) == storage_bytes(tensor)
    assert decode(other, out[:used], tensor) == storage_bytes(tensor)


def check_chunks(codec, tensor):
    """Offsets that more than one block of a device adds up."""
    kernels = emulated(codec, tensor.dtype)
    expected = encode(codec, tensor)
    _, out = aligned(codec.size(Spec.of(tensor)).nbytes)
    kernels.encode(tensor, out, tensor.numel(), 0)
    assert torch.equal(out[: len(expected)], expected)
