"""Launch sizes of codecs of groups: csrc/groups.cuh."""

from __future__ import annotations

import torch

from actstore.kernels.cuda.launch import THREADS

THREAD_NUMEL = 32  # elements per thread, in csrc/groups.cuh
SUFFIX = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def log2_lanes(group: int) -> int:
    """Return the binary logarithm of the number of threads that share a group."""
    return (group // THREAD_NUMEL).bit_length() - 1


def group_blocks(numel: int, group: int) -> int:
    """Count the blocks of a launch with a thread for each 32 elements of whole groups."""
    return -(-(-(-numel // group) * group // THREAD_NUMEL) // THREADS)
