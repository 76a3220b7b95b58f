"""PyTorch's own numerical checks of gradients inside a store's context: they write to inputs through `.data`, between
forwards and backwards of which some graphs are still alive."""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import islice

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from actstore import ActivationStore
from tests.operators.calls import module_calls, operators, samples

POLICIES = ("keep", "derive", "raw", "raw @ host", "raw @ disk", "expack")
SOME = (
    "addcmul", "atan2", "cdist", "cumprod", "linalg.inv", "logcumsumexp", "matmul", "mul", "nn.functional.bilinear",
    "nn.functional.binary_cross_entropy", "nn.functional.conv2d", "nn.functional.gelu", "nn.functional.layer_norm",
    "nn.functional.linear", "nn.functional.mse_loss", "pow", "prod", "softmax", "square", "tanh", "var",
)  # fmt: skip
FEW = SOME[::4]  # for the checks that are seldom used
SOME_MODULES = "GELU", "GroupNorm", "Linear", "RMSNorm"

CHECKS = {
    "gradcheck": gradcheck,
    "gradgradcheck": partial(gradgradcheck, gen_non_contig_grad_outputs=True),
    "batched": partial(gradcheck, check_batched_grad=True, check_undefined_grad=False),
    "batched_twice": partial(gradgradcheck, check_batched_grad=True, check_undefined_grad=False),
    "forward_over_reverse": partial(
        gradgradcheck, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False
    ),
}
SECOND = ("gradgradcheck", "batched_twice")
PARTS = 4  # of each sweep over a whole database: every fourth call, from another one on


def able(check, op):
    """Whether the database says that an operator or a module can be checked so."""
    if check == "forward_over_reverse":
        return op.supports_fwgrad_bwgrad
    if check in SECOND and not op.supports_gradgrad:
        return False
    wanted = {"batched": "check_batched_grad", "batched_twice": "check_batched_gradgrad"}.get(check)
    return wanted is None or getattr(op, wanted, True)  # modules say nothing of batches


def passes(check, op, call, context):
    """Whether a numerical check passes; what it says where it does not."""

    def run(*inputs):
        return tuple(call.outputs(inputs))

    torch.manual_seed(1)
    before = [t.detach().clone() for t in call.inputs]
    try:
        with context:
            CHECKS[check](run, tuple(call.inputs), fast_mode=True, nondet_tol=op.gradcheck_nondet_tol)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        for tensor, values in zip(call.inputs, before, strict=True):
            tensor.data.copy_(values)
    return ""


class Stores:
    """A store of each policy for all operators, or for each module."""

    def __init__(self):
        self._shared = {policy: ActivationStore(policy=policy, min_bytes=0) for policy in POLICIES}
        self._own = {}

    def of(self, module):
        if module is None:
            return self._shared
        self._close(self._own)
        self._own = {policy: ActivationStore(module, policy, min_bytes=0) for policy in POLICIES}
        return self._own

    def close(self):
        self._close(self._own)
        self._close(self._shared)

    def _close(self, stores):
        for store in stores.values():
            store.close()


def sweep(check, calls):
    """How many calls pass in each store, and which of those that pass without one do not."""
    stores, counts, findings = Stores(), Counter(), []
    for op, module, call in calls:
        if not call.inputs or passes(check, op, call, nullcontext()):
            counts["not without a store"] += 1
            continue
        for policy, store in stores.of(module).items():
            why = passes(check, op, call, store)
            counts[policy] += not why
            if why:
                findings.append(f"{policy}: {call.name}: {why}")
    stores.close()
    return counts, findings


def calls_of(check, limit, dtype=torch.float64, **which):
    for op in operators(dtype, **which):
        if able(check, op):
            yield from ((op, None, call) for call in samples(op, dtype, limit))


def calls_of_modules(check, limit, only=()):
    for each in module_calls(torch.float64, limit, only=only):
        if able(check, each.info):
            yield each.info, each.module, each.call


@pytest.mark.parametrize("check", CHECKS)
def test_some_operators(check):
    some = SOME if check in ("gradcheck", "gradgradcheck") else FEW
    counts, findings = sweep(check, calls_of(check, 1, only=some))
    assert findings == []
    assert min(counts[policy] for policy in POLICIES) >= len(some) - 2


@pytest.mark.parametrize("check", ["gradcheck", "gradgradcheck"])
def test_some_modules(check):
    counts, findings = sweep(check, calls_of_modules(check, 1, SOME_MODULES))
    assert findings == []
    assert min(counts[policy] for policy in POLICIES) >= len(SOME_MODULES)


def sweep_part(check, calls, part, record_property):
    """The counts of a part of the calls, none of which may fail in a store only."""
    counts, findings = sweep(check, islice(calls, part, None, PARTS))
    record_property("counts", dict(counts))
    assert findings == []
    return min(counts[policy] for policy in POLICIES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("check", CHECKS)
def test_all_operators(check, part, record_property):
    limit = None if check in ("gradcheck", "gradgradcheck") else 3
    least = 5_000 if limit is None else 1_000
    assert sweep_part(check, calls_of(check, limit), part, record_property) >= least / PARTS


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("check", ["gradcheck", "gradgradcheck"])
def test_all_complex_operators(check, part, record_property):
    assert sweep_part(check, calls_of(check, 2, torch.complex128), part, record_property) >= 500 / PARTS


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("check", ["gradcheck", "gradgradcheck", "batched"])
def test_all_modules(check, part, record_property):
    assert sweep_part(check, calls_of_modules(check, None), part, record_property) >= 300 / PARTS
