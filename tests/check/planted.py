"""Faults to plant: a codec that flips a bit, a function whose backward is off, a module whose forward is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actstore.codecs import Raw
from actstore.codecs.base import Bound
from actstore.session.entries import is_active


@dataclass(frozen=True)
class Flip(Raw):
    """Gives every tensor back with one bit changed."""

    name = "flip"
    kernel_name = "raw"

    def bind(self, src: Tensor) -> Bound:
        bound = super().bind(src)

        def decode(buf: Tensor, out: Tensor, key: int) -> None:
            bound.decode(buf, out, key)
            out.as_strided((1,), (1,)).view(torch.int32).bitwise_xor_(1)

        return Bound(bound.nbytes, bound.exact, bound.encode, decode)


class OffByOne(torch.autograd.Function):
    """The identity, whose gradient is the next float where a store is active."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.nextafter(torch.tensor(torch.inf)) if is_active() else grad


class Odd(nn.Module):
    """Wrong under a store: in `forward`, or else in backward."""

    def __init__(self, forward: bool = False) -> None:
        super().__init__()
        self.in_forward = forward

    def forward(self, x: Tensor) -> Tensor:
        if self.in_forward:
            return x * (1.5 if is_active() else 1)
        return OffByOne.apply(x)


class Chatty(nn.Module):
    """Changes everything that a module can change in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.register_buffer("steps", torch.zeros(()))
        self.calls, self.seen, self.cache = 0, [], {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.cache[self.calls] = x
        self.steps = self.steps + 1
        return self.layers(x)
