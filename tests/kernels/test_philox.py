"""Random bits by position and key, in each language, against the oracle."""

import numba
import numpy as np
import pytest
import torch

from actstore.kernels.cpu import philox as philox_cpu
from actstore.kernels.torch import philox as philox_torch
from tests.oracles import philox as oracle

KEYS = (0, 1, 0x1234_5678_9ABC_DEF0, (1 << 63) - 1)
BLOCKS = (0, 1, 5, (1 << 32) - 1, 1 << 32, (1 << 40) + 3)


def test_the_published_vectors():
    # Random123's known answers for philox4x32-10: counter and key all zeros, and all ones in what a key can be here
    assert oracle.words(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("purpose", [0, 1])
def test_words(key, purpose):
    run = numba.njit(philox_cpu.philox.py_func)
    found = philox_torch.philox(torch.tensor(BLOCKS), purpose, key)
    for block, words in zip(BLOCKS, found.tolist(), strict=True):
        expected = oracle.words(block, purpose, key)
        assert words == expected
        assert [int(word) for word in run(block, purpose, key)] == expected


@pytest.mark.parametrize("key", KEYS)
def test_offsets(key):
    expected = oracle.offsets(48, 100, key)
    assert np.array_equal(philox_torch.offsets(48, 100, key, torch.device("cpu")).numpy(), expected)
    assert (np.abs(expected) < 0.5).all()


def test_noise_has_mean_zero_and_the_variance_of_a_uniform():
    noise = philox_torch.offsets(0, 1 << 20, 7, torch.device("cpu")).double()
    assert abs(noise.mean().item()) < 4 * (1 / 12 / 2**20) ** 0.5
    assert noise.var().item() == pytest.approx(1 / 12, rel=0.005)
