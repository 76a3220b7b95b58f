"""Compiled norms that a model writes itself have gradients as exact as the fused ones."""

from __future__ import annotations

import pytest

from tests.autograd.denominators import FORMS, fused_error, gradient_error

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself
POLICIES = "int8", "int4", "int8 @ host", "recompute(int8)"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_as_exact_as_those_of_fused_norms(name: str, policy: str) -> None:
    assert gradient_error(FORMS[name], policy, compiled=True) <= 2.5 * fused_error(policy, compiled=True) + 0.005
