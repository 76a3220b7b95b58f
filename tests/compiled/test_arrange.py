"""Copies of operators for each loop that reads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from actstore.compiled.arrange import copy_for_readers
from actstore.compiled.graph import name_of

ELEMENTWISE = frozenset({"sigmoid", "mul", "rsub", "exp", "neg"})


def gate(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A SiLU whose exponential three results read, one of them through another operator."""
    s = torch.sigmoid(x)
    z = (x * s).view(-1)
    return z * y, z * 2.0, (1.0 - s).view(-1) * y


def edited(function: object, nbytes: int) -> tuple[GraphModule, list[Tensor]]:
    values = [torch.randn(8, 8), torch.randn(64)]
    module = make_fx(function, tracing_mode="fake")(*values)
    copy_for_readers(module, lambda node: name_of(node) in ELEMENTWISE, nbytes)
    module.graph.lint()
    return module, values


def count(module: GraphModule, name: str) -> int:
    return sum(name_of(node) == name for node in module.graph.nodes)


@pytest.mark.parametrize(("nbytes", "copies"), [(256, 3), (257, 1)])
def test_each_reader_of_a_large_result_has_its_own(nbytes: int, copies: int) -> None:
    module, values = edited(gate, nbytes)
    assert count(module, "sigmoid") == copies
    for found, wanted in zip(module(*values), gate(*values), strict=True):
        assert found.equal(wanted)


def test_no_copies_of_what_is_written_anyway() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.exp(x)
        return z @ z, -z

    assert count(edited(function, 0)[0], "exp") == 1
