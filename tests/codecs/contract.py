"""What every codec promises, checked on one tensor: each implementation, the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import pytest
import torch
from hypothesis import strategies as st

from actstore.base.spec import Spec
from actstore.codecs import AtMost, Codec, Exact
from actstore.codecs.dispatch import KernelCodec
from actstore.errors import PayloadError, SpecError
from actstore.policy.options import codec_text
from tests.emulator.device import emulated
from tests.oracles import find
from tests.oracles.samples import DTYPES, EVERY_DTYPE

POISON = 0xA5
GUARD = 64  # bytes on either side that must stay as they were
KEY = 0x1234_5678_9ABC_DEF0


def first_of_each(variants):
    """The first variant of each codec."""
    return [variant for i, variant in enumerate(variants) if type(variant) not in map(type, variants[:i])]


def cases(variants, dtypes):
    """Every variant with the dtypes that it takes; the first of a codec with all of them, others with one in turn.

    The others are slow together: most of their time goes to compiling kernels.
    """
    made, first = [], first_of_each(variants)
    for codec in variants:
        for dtype in _taken(codec, dtypes):
            marks = () if codec in first or dtype == turn(codec, dtypes) else pytest.mark.slow
            made.append(pytest.param(codec, dtype, id=f"{codec_text(codec)}-{dtype}", marks=marks))
    return made


def compiled(variants, dtypes=DTYPES):
    """The pairs of `cases` that are not slow. Tests that draw pairs draw these, whose kernels are compiled anyway."""
    return [case.values for case in cases(variants, dtypes) if not case.marks]


def drawn(variants, tensors):
    """A strategy: pairs of `compiled`, each codec with what ``tensors(dtype)`` draws."""
    return st.sampled_from(compiled(variants)).flatmap(
        lambda pair: st.tuples(st.just(pair[0]), tensors(pair[1])),
    )


def turn(codec, dtypes=DTYPES):
    """One dtype that a codec takes, of these if it can be, and the same in all tests; the variants take turns."""
    taken = _taken(codec, dtypes) or _taken(codec, EVERY_DTYPE)
    return taken[_places()[codec] % len(taken)]


def _taken(codec, dtypes):
    return [dtype for dtype in dtypes if codec.accepts(getattr(torch, dtype))]


@cache
def _places():
    return {codec: place for place, codec in enumerate(find.variants())}


def storage_bytes(tensor):
    """The bytes of the elements in storage order."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.clone().view(torch.uint8).numpy().tobytes()


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


def sizes_of(tensor):
    """The sizes of the dimensions greater than one, that with the largest stride first."""
    dims = sorted(((st, n) for n, st in zip(tensor.shape, tensor.stride(), strict=True) if n > 1), reverse=True)
    return tuple(n for _, n in dims) if tensor.numel() else ()


class Implementation:
    """One way to run a codec on a CPU tensor: its own, or by the kernels that a function returns for a codec."""

    def __init__(self, name, codec, kernels=None):
        self.name = name
        self._codec = codec
        self._kernels = kernels

    def encode(self, tensor, out):
        """Bytes used; None where only the device knows."""
        if self._kernels is None:
            return self._codec.encode(tensor, out, KEY)
        if tensor.numel():
            self._ways(tensor)[0](tensor, out)
        return None

    def decode(self, payload, out):
        if self._kernels is None:
            self._codec.decode(payload, out, KEY)
        elif out.numel():
            self._ways(out)[1](payload, out)

    def _ways(self, tensor):
        codec, width = self._codec._fitted(tensor.shape, tensor.stride())
        kernels, numel = self._kernels(codec), tensor.numel()
        if width:
            return [partial(way, key=KEY) for way in kernels.rows(numel, width)]
        return [lambda source, target, way=way: way(source, target, numel, KEY) for way in kernels[:2]]


def implementations(codec: Codec, dtype, *, cuda: bool = True) -> Iterator[Implementation]:
    """Each way to run `codec` on the CPU: its own, the fallback, and the CUDA source in the emulator."""
    yield Implementation("codec", codec)
    if isinstance(codec, KernelCodec):
        device = torch.device("cpu")
        yield Implementation("fallback", codec, lambda codec: codec.kernels("torch", dtype, device))
        if cuda:
            yield Implementation("cuda", codec, lambda codec: emulated(codec, dtype))


def check_codec(codec: Codec, tensor: torch.Tensor, *, cuda: bool = True) -> torch.Tensor:
    """Check one tensor and return what comes back."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    sizes = sizes_of(tensor)
    before = storage_bytes(tensor)
    expected = find.encode(codec, before, dtype, KEY, sizes)
    expected_back = find.decode(codec, expected, tensor.numel(), dtype, KEY, sizes)
    size, used = codec.size(Spec.of(tensor)), len(expected)
    if isinstance(size, Exact) or not used:  # the length of nothing is known
        assert size == Exact(used)
    else:
        assert isinstance(size, AtMost)
        assert used <= size.nbytes
        assert int.from_bytes(expected[:8], "little") == used

    for way in implementations(codec, tensor.dtype, cuda=cuda):
        for spare in (0, 48):
            memory, out = aligned(size.nbytes + spare)
            assert way.encode(tensor, out) in ((used,) if way.name == "codec" else (used, size.nbytes, None))
            assert out[:used].numpy().tobytes() == expected, way.name
            check_guards(memory, out, size.nbytes)
        assert storage_bytes(tensor) == before
        for payload in (out, out[:used]):
            back = blank(tensor)
            way.decode(payload, back)
            assert storage_bytes(back) == expected_back, way.name
        assert out[:used].numpy().tobytes() == expected

    check_refusals(codec, tensor, expected)
    assert not codec.lossless or expected_back == before
    return back


def check_refusals(codec, tensor, payload):
    """Too little room for a payload, and payloads that are cut."""
    if not payload:
        return
    needed = codec.size(Spec.of(tensor)).nbytes
    _, out = aligned(needed)
    with pytest.raises(SpecError, match=f"has {needed - 1} bytes, but {needed} are needed") as caught:
        codec.encode(tensor, out[:-1])
    assert caught.value.needed == needed
    assert (out == POISON).all()
    back = blank(tensor)
    out[: len(payload)] = tensor_of(payload, torch.uint8)
    with pytest.raises(PayloadError):
        codec.decode(out[: len(payload) - 1], back)
    assert storage_bytes(back) == storage_bytes(blank(tensor))
