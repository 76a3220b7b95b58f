"""Hooks between compiled regions may compile CPU kernels: torch.compile must leave numba alone then."""

from importlib import import_module

import pytest
import torch
from torch import nn

from actstore import ActivationStore


@pytest.mark.parametrize("module", ["numba.core.dispatcher", "llvmlite.ir.types"])
def test_the_compiler_leaves_the_kernel_compiler_alone(module: str) -> None:
    pytest.importorskip("numba")
    rules = import_module("torch._dynamo.trace_rules")
    with ActivationStore(model := nn.Linear(4, 4), "int8"):
        model(torch.ones(1, 4))
    assert rules.check_file(import_module(module).__file__).skipped
