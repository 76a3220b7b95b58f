"""int8 by token axis on CUDA devices: csrc/int8_token.cu."""

from __future__ import annotations

from functools import partial

import torch

from actstore.kernels.base import Kernels, aligned
from actstore.kernels.cuda import int8 as int8_cuda
from actstore.kernels.cuda import launch
from actstore.kernels.cuda.groups import SUFFIX

BLOCK_COLUMNS = 64  # of a block of threads, in csrc/int8_token.cu


def kernels(dtype: torch.dtype, device: torch.device, group: int, round: str, keep: bool) -> Kernels:  # noqa: A002
    """Return the kernels for one dtype and set of options on one device."""
    kept = "_keep" * keep
    noise, dither = "_noise" * (round != "nearest"), ("_dither" + kept) * (round == "dither")
    run_encode = launch.launcher("int8_token", f"int8_token_encode_{SUFFIX[dtype]}{noise}{kept}", device)
    run_decode = launch.launcher("int8_token", f"int8_token_decode_{SUFFIX[dtype]}{dither}", device)
    along_elements = int8_cuda.kernels(dtype, device, group, round, keep)

    def blocks(numel: int, columns: int) -> int:
        return -(-numel // (columns * group)) * -(-columns // BLOCK_COLUMNS)

    def encode(numel: int, columns: int, src: torch.Tensor, out: torch.Tensor, key: int) -> None:
        run_encode(blocks(numel, columns), src, aligned(out), numel, key, group, columns)

    def decode(numel: int, columns: int, buf: torch.Tensor, out: torch.Tensor, key: int) -> None:
        run_decode(blocks(numel, columns), aligned(buf), out, numel, key, group, columns)

    return along_elements._replace(
        rows=lambda numel, columns: (partial(encode, numel, columns), partial(decode, numel, columns))
    )
