"""What is changed in place before backward gets autograd's own verdict: an error, or gradients if it was not saved."""

import pytest
import torch

from tests.operators.derivatives import changed_inputs, changed_outputs
from tests.operators.sweep import KEPT, LENT, sweep
from tests.operators.test_gradients import EVERY, calls_of

CHANGED = {"inputs": changed_inputs, "outputs": changed_outputs}
POLICIES = ("keep", KEPT, LENT)


@pytest.mark.parametrize("changed", CHANGED)
def test_operators(changed, check):
    found = sweep(calls_of(torch.float64, every=EVERY, limit=2), CHANGED[changed], POLICIES)
    check(found, calls=80, refused=40, lent=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("changed", CHANGED)
def test_all_operators(changed, check):
    check(sweep(calls_of(torch.float64), CHANGED[changed], POLICIES), calls=5_000, refused=2_000, lent=False)
