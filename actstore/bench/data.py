"""Synthetic activations by name, from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from actstore.errors import ConfigError

OUTLIER_SHARE = 0.01  # of the channels of `hidden`
OUTLIER_SCALE = 30.0
VOCABULARY = 50_000

Shape = Sequence[int]
Make = Callable[[Shape, Generator], Tensor]


def make(
    name: str, shape: Shape, dtype: torch.dtype | None = None, seed: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Make synthetic activations.

    Parameters
    ----------
    name : one of `NAMES`
    shape : any; the last dimension holds the channels of ``hidden`` and the rows of ``softmax``
    dtype : None takes float32, int64 for ``indices``, bool for ``mask``
    seed : the same one gives the same values on the same kind of device

    Raises
    ------
    ConfigError : `NAMES` has no such name
    """
    if name not in _MAKE:
        near = get_close_matches(name, NAMES, n=2, cutoff=0.4) or NAMES
        raise ConfigError(f"data={name!r}: unknown name. Near names: {', '.join(near)}.")
    found = _MAKE[name](shape, Generator(device).manual_seed(seed))
    return found if dtype is None else found.to(dtype)


def _gaussian(shape: Shape, generator: Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, device=generator.device)


def _student_t3(shape: Shape, generator: Generator) -> Tensor:
    """Draw from Student's t with 3 degrees of freedom: a normal variable over the root of a mean of three squares."""
    squares = torch.zeros(tuple(shape), device=generator.device)
    for _ in range(3):
        squares += _gaussian(shape, generator).square_()
    return _gaussian(shape, generator) / (squares / 3).sqrt_()


def _hidden(shape: Shape, generator: Generator) -> Tensor:
    """Draw hidden states: Gaussian, some channels far larger."""
    channels, device = shape[-1] if shape else 1, generator.device
    order = torch.randperm(channels, generator=generator, device=device)
    scales = torch.ones(channels, device=device)
    scales[order[: math.ceil(OUTLIER_SHARE * channels)]] = OUTLIER_SCALE
    return _gaussian(shape, generator) * (scales if shape else scales[0])


def _gelu(shape: Shape, generator: Generator) -> Tensor:
    return F.gelu(_gaussian(shape, generator))


def _relu(shape: Shape, generator: Generator) -> Tensor:
    """Draw Gaussian values after a ReLU: half of them are zero."""
    return _gaussian(shape, generator).relu_()


def _softmax(shape: Shape, generator: Generator) -> Tensor:
    return _gaussian(shape, generator).softmax(-1)


def _constant(shape: Shape, generator: Generator) -> Tensor:
    return _gaussian((1,), generator).repeat(math.prod(shape)).reshape(tuple(shape))


def _sparse(shape: Shape, generator: Generator) -> Tensor:
    """Draw Gaussian values, nine in ten of them zero."""
    kept = torch.rand(tuple(shape), generator=generator, device=generator.device) < 0.1
    return _gaussian(shape, generator) * kept


def _indices(shape: Shape, generator: Generator) -> Tensor:
    return torch.randint(VOCABULARY, tuple(shape), generator=generator, device=generator.device)


def _mask(shape: Shape, generator: Generator) -> Tensor:
    return torch.rand(tuple(shape), generator=generator, device=generator.device) < 0.5


_MAKE: dict[str, Make] = {
    "gaussian": _gaussian,
    "student_t3": _student_t3,
    "hidden": _hidden,
    "gelu": _gelu,
    "relu": _relu,
    "softmax": _softmax,
    "constant": _constant,
    "sparse": _sparse,
    "indices": _indices,
    "mask": _mask,
}
NAMES = tuple(_MAKE)
