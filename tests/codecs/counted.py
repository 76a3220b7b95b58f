"""What CUDA kernels promise about a number of elements that only the device knows."""

from __future__ import annotations

import torch

from actstore.base.spec import Spec
from tests.codecs.contract import KEY, POISON, aligned, check_guards, storage_bytes
from tests.emulator.device import emulated
from tests.oracles import find


def check_counts(codec, tensor, counts):
    """The kernels, told the size of `tensor` and given a `count` of elements, do as if there were only so many."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    kernels, numel = emulated(codec, tensor.dtype), tensor.numel()
    for number in counts:
        count = torch.tensor(number)
        data = storage_bytes(tensor[:number])
        expected = find.encode(codec, data, dtype, KEY)
        memory, out = aligned(codec.size(Spec.of(tensor)).nbytes)
        kernels.encode(tensor, out, numel, KEY, count=count)
        assert out[: len(expected)].numpy().tobytes() == expected
        assert (out[len(expected) :] == POISON).all()

        back_memory, back = aligned(numel * tensor.dtype.itemsize)
        kernels.decode(out, back.view(tensor.dtype), numel, KEY, count=count)
        decoded = find.decode(codec, expected, number, dtype, KEY)
        assert back[: len(decoded)].numpy().tobytes() == decoded
        assert (back[len(decoded) :] == POISON).all()
        check_guards(memory, out, len(out))
        check_guards(back_memory, back, len(back))
