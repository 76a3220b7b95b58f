"""Derivatives of derivatives of PyTorch's own operators: double backward, and forward mode over backward."""

import pytest
import torch

from tests.operators.calls import module_calls, operators, samples
from tests.operators.derivatives import forward_over_reverse, second_order
from tests.operators.sweep import LENT, sweep
from tests.operators.test_gradients import EVERY

KINDS = {"double_backward": second_order, "forward_over_reverse": forward_over_reverse}


def calls_of(kind, *, every=1, limit=None):
    for op in operators(torch.float64, every=every):
        if op.supports_gradgrad if kind == "double_backward" else op.supports_fwgrad_bwgrad:
            yield from samples(op, torch.float64, limit)


@pytest.mark.parametrize("kind", ["double_backward", pytest.param("forward_over_reverse", marks=pytest.mark.slow)])
def test_operators(kind, check):
    """Forward mode over backward is among the ways of `test_gradcheck` and of random models, too."""
    check(sweep(calls_of(kind, every=EVERY, limit=2), KINDS[kind], [LENT]), calls=130, lent=False)


def test_an_operator_that_saves_zeros_without_memory(check):
    """Forward mode makes them; the store must not look for their bytes."""
    op = next(operators(torch.float64, only=["_softmax_backward_data"]))
    check(sweep(samples(op, torch.float64, 3), forward_over_reverse, ["raw"]), calls=3, lent=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_all_operators(kind, check):
    check(sweep(calls_of(kind), KINDS[kind], [LENT]), calls=10_000, lent=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_modules(check):
    check(
        sweep((each.call for each in module_calls(torch.float64, None)), second_order, [LENT]), calls=1_000, lent=False
    )
