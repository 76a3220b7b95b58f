"""Norms that a model writes itself have gradients as exact as the fused ones, whatever values their statistics have."""

from __future__ import annotations

import pytest

from tests.autograd.denominators import FORMS, fused_error, gradient_error

POLICIES = "int8", "int4", "fp8", "int8 @ host", "recompute(int8)"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_as_exact_as_those_of_fused_norms(name: str, policy: str) -> None:
    assert gradient_error(FORMS[name], policy, compiled=False) <= 2.5 * fused_error(policy, compiled=False) + 0.005
