"""Weights that exist only while their module runs, as ZeRO-3 gathers and frees them."""

import torch
from torch import nn

from actstore import ActivationStore

WIDTH, DEPTH = 64, 16


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.gathered.t(), x.t() @ grad


class Gathered(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        self.weight.gathered = torch.randn(WIDTH, WIDTH) / WIDTH**0.5

    def forward(self, x):
        self.weight.data = self.weight.gathered.clone()
        y = Product.apply(x, self.weight)
        self.weight.data = torch.empty(0)
        return y


def test_no_activation_is_taken_for_a_weight_that_was_freed():
    """The storages of weights die before the forward ends, and activations get their addresses."""
    model = nn.Sequential(*(Gathered() for _ in range(DEPTH)))
    store = ActivationStore(model, "raw", min_bytes=0)
    x = torch.randn(32, WIDTH, requires_grad=True)
    for _ in range(3):
        with store:
            y = model(x)
        report = store.report()
        assert report.saved_bytes == DEPTH * x.nbytes
        assert report.stored_bytes == report.saved_bytes
        del y
