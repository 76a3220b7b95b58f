"""PyTorch's own operators and modules under a lossless store: every gradient as without one, bit for bit, and twice."""

import pytest
import torch

from actstore import ActivationStore
from tests.operators.calls import module_calls, operators, samples
from tests.operators.derivatives import gradients
from tests.operators.sweep import LENT, POLICIES, Subject, compare, sweep

EVERY = 8  # of the operators that are not always among the quick ones
SAMPLES = 5  # of each, in the quick run

VARIANTS = ("in place", "not contiguous", "lazy")


def calls_of(dtype, *, every=1, limit=None, variant=""):
    for op in operators(dtype, every=every):
        yield from samples(op, dtype, limit, variant)


@pytest.mark.more
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.float32], ids=str)
def test_operators(dtype, check):
    check(sweep(calls_of(dtype, every=EVERY, limit=SAMPLES), gradients, POLICIES), calls=350)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128], ids=str)
def test_operators_of_other_types(dtype, check):
    check(sweep(calls_of(dtype, every=2 * EVERY, limit=3), gradients, [LENT]), calls=80)


@pytest.mark.parametrize("variant", VARIANTS[:1])
def test_variants(variant, check):
    check(sweep(calls_of(torch.float64, every=EVERY, limit=2, variant=variant), gradients, [LENT]), calls=30)


def test_modules(check):
    check(sweep((each.call for each in module_calls(torch.float32, 1)), gradients, [LENT]), calls=200)


def test_modules_that_the_store_knows():
    """Each module has a store of its own, which finds its parameters and its buffers."""
    subjects = []
    for module, call, _ in module_calls(torch.float64, 1):
        subject = Subject("raw", ActivationStore(module, "raw", min_bytes=0))
        assert compare([call], gradients, [subject]) == []
        subject.close()
        subjects.append(subject)
    assert sum(subject.counts["equal"] for subject in subjects) >= 200


# -- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_all_operators(dtype, check):
    check(sweep(calls_of(dtype), gradients, POLICIES), calls=13_000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_complex_operators(check):
    check(sweep(calls_of(torch.complex128), gradients, [LENT]), calls=4_000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_variants(variant, check):
    check(sweep(calls_of(torch.float64, variant=variant), gradients, [LENT]), calls=500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("dtype", "contiguous", "policies"),
    [(torch.float64, True, POLICIES), (torch.float32, True, [LENT]), (torch.float64, False, [LENT])],
    ids=["float64", "float32", "not_contiguous"],
)
def test_all_modules(dtype, contiguous, policies, check):
    check(
        sweep((each.call for each in module_calls(dtype, None, contiguous=contiguous)), gradients, policies),
        calls=1_000,
    )
