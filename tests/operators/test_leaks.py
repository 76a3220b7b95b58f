"""What is left of a call of PyTorch's own operators once its outputs are gone, without a collector: nothing."""

from itertools import chain

import pytest
import torch

from tests.operators.calls import module_calls, operators, samples
from tests.operators.sweep import KEPT, LENT, leaks
from tests.operators.test_gradients import EVERY

POLICIES = ("keep", KEPT, "raw", LENT)


def calls_of(*, every=1, limit=None):
    for op in operators(torch.float64, every=every):
        yield from samples(op, torch.float64, limit)


def check(found, *, calls):
    counts, findings = found
    assert findings == []
    assert min(counts[policy] for policy in POLICIES) >= calls


def test_operators_leave_nothing():
    check(leaks(calls_of(every=2 * EVERY, limit=2), POLICIES), calls=80)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_operators_and_modules_leave_nothing(record_property):
    modules = (each.call for each in module_calls(torch.float32, None))
    found = leaks(chain(calls_of(), modules), POLICIES)
    record_property("counts", dict(found[0]))
    check(found, calls=12_000)
