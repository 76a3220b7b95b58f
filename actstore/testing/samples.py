"""Sample tensors of every kind that a codec may encode."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
SIZES = (0, 1, 15, 17, 127, 129, 1025)
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "permuted": lambda x: x.permute(3, 1, 0, 2),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "later rows": lambda x: x[1:],
    "an odd offset": lambda x: x.flatten()[3:],
    "a scalar": lambda x: x[0, 0, 0, 0],
}


def samples(dtype: torch.dtype, device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a dtype, each with its description: values, sizes, orders of strides."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(3).to(dtype).to(device)

    for size in SIZES:
        yield "normal values", normal(size)
    wide = torch.randn(1000, generator=generator) * 2.0 ** torch.randint(-20, 9, (1000,), generator=generator)
    yield "values of many sizes", wide.to(dtype).to(device)
    yield "zeros of both signs", torch.tensor([0.0, -0.0] * 100).to(dtype).to(device)
    if dtype.is_floating_point or dtype.is_complex:
        special = torch.randn(400, generator=generator)
        special[::90], special[7], special[200] = float("nan"), float("inf"), -float("inf")
        yield "values with NaN and Inf", special.to(dtype).to(device)
    for name, order in ORDERS.items():
        yield name, order(normal(2, 3, 5, 7))
    yield "a matrix", normal(8, 64)
