"""The CUDA bindings of codecs on CPU tensors: every launch runs in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise

import pytest
import torch

from actstore.kernels.base import Kernels
from actstore.kernels.cuda import launch
from tests.emulator.emulator import Buffer, Emulator, Launch, compiler

emulator = cache(Emulator)


def emulated(codec, dtype: torch.dtype, flush_denormals: bool = True) -> Kernels:
    """What ``actstore.kernels.cuda.codecs`` gives for `codec`, with the emulator in the place of a GPU."""
    if compiler() is None:
        pytest.skip("needs g++ to run the CUDA sources on the CPU")
    with emulation(flush_denormals):
        kernels: Kernels = codec.kernels("cuda", dtype, torch.device("cpu"))
        return kernels


@contextmanager
def emulation(flush_denormals: bool = True) -> Iterator[None]:
    """Kernels that are looked up inside run in the emulator, now and later."""

    def launcher(name, kernel, device):
        return lambda blocks, *args: _launch(name, kernel, blocks, args, flush_denormals)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "launcher", launcher)
        yield


def _launch(name, kernel, blocks, args, flush_denormals):
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    memories = [_memory(tensor) for tensor in tensors]
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + len(memory)) for tensor, memory in zip(tensors, memories))  # noqa: B905
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "buffers overlap"
    given = iter(zip(tensors, memories, strict=True))
    words: list[Buffer | int] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            tensor, memory = next(given)
            words.append(Buffer(memory.numpy().tobytes(), tensor.data_ptr() % 16))
        else:
            words.append(arg or 0)
    (found,) = emulator(name).run([Launch(kernel, blocks, words, launch.THREADS, flush_denormals)])
    for memory, data in zip(memories, found, strict=True):
        if data:
            memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _memory(tensor):
    """The bytes of a dense tensor."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)
