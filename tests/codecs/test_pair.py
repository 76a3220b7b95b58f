"""Tensors of two values: one bit an element, and back with every bit."""

import pytest
import torch

from actstore.base.spec import Spec
from actstore.codecs.pair import INTEGERS, Pair
from tests.oracles import bit1


def mask(low, high, dtype, shape=(7, 33)):
    torch.manual_seed(0)
    return torch.where(torch.rand(shape) < 0.3, low, high).to(dtype)


def check_bits(tensor):
    codec = Pair.of(tensor)
    out = torch.empty(codec.size(Spec.of(tensor)).nbytes, dtype=torch.uint8)
    assert codec.encode(tensor, out) == out.numel() == -(-tensor.numel() // 8)
    back = torch.full_like(tensor, 7)
    codec.decode(out, back)
    assert torch.equal(*(t.contiguous().view(INTEGERS[tensor.dtype]) for t in (back, tensor)))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1 / 0.9), (0.0, -0.0), (-0.0, 1.0), (float("-inf"), 0.0), (float("nan"), 1.0), (-3.0, 2.0)]
)
def test_every_bit_comes_back(dtype, low, high):
    check_bits(mask(low, high, dtype))


def test_two_kinds_of_nan():
    tensor = torch.tensor([0x7FC00000, 0x7FC00001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    check_bits(tensor)


def test_strides_and_sizes():
    tensor = mask(0.0, 2.0, torch.float32, (2, 3, 5, 4)).to(memory_format=torch.channels_last)
    check_bits(tensor)
    check_bits(mask(0.0, 2.0, torch.float32, (11,)))
    assert Pair.of(mask(0.0, 2.0, torch.float32, (4, 8))[:, ::2]) is None
    assert Pair.of(torch.empty(0)) is None


def test_the_payload_is_that_of_bit1():
    tensor = mask(0.0, 1.25, torch.float32, (1001,))
    codec = Pair.of(tensor)
    out = torch.empty(codec.size(Spec.of(tensor)).nbytes, dtype=torch.uint8)
    assert codec.encode(tensor, out) == len(out) == 126
    assert out.numpy().tobytes() == bit1.encode((tensor != 0).numpy().tobytes(), "bool")


@pytest.mark.parametrize("third", [-0.0, 1.0, 3.0, -3.0, float("inf"), float("nan")])
@pytest.mark.parametrize("at", [0, 5, 40, 230])
def test_a_third_value_anywhere_is_found(at, third):
    for low, high in ((0.0, 2.0), (-2.0, 2.0)):
        tensor = mask(low, high, torch.float32)
        tensor.view(-1)[at] = third
        assert Pair.of(tensor) is None


def test_the_second_value_may_come_late():
    tensor = torch.zeros(100)
    assert Pair.of(tensor) is None  # as of a dry step
    tensor[70] = 2.0
    check_bits(tensor)


def test_equal_masks_have_one_codec():
    """By which the route of a site knows it."""
    assert Pair.of(mask(0.0, 2.0, torch.float32)) is Pair.of(mask(2.0, 0.0, torch.float32))
    assert Pair.of(torch.arange(4)) is Pair.of(torch.zeros(4, dtype=torch.complex64)) is None
