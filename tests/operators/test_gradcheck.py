"""PyTorch's own numerical checks of gradients inside a store's context: they write to inputs through `.data`, between
forwards and backwards of which some graphs are still alive."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from actstore import ActivationStore
from tests.operators.calls import operators, samples

POLICIES = ("keep", "derive", "raw", "raw @ host", "raw @ disk", "expack")
SOME = (
    "addcmul", "atan2", "cdist", "cumprod", "linalg.inv", "logcumsumexp", "matmul", "mul", "nn.functional.bilinear",
    "nn.functional.binary_cross_entropy", "nn.functional.conv2d", "nn.functional.gelu", "nn.functional.layer_norm",
    "nn.functional.linear", "nn.functional.mse_loss", "pow", "prod", "softmax", "square", "tanh", "var",
)  # fmt: skip


def passes(check, op, call, context):
    """Whether a numerical check passes; what it says where it does not."""

    def run(*inputs):
        return tuple(call.outputs(inputs))

    options = {"fast_mode": True, "nondet_tol": op.gradcheck_nondet_tol}
    if check is gradgradcheck:
        options["gen_non_contig_grad_outputs"] = True
    torch.manual_seed(1)
    before = [t.detach().clone() for t in call.inputs]
    try:
        with context:
            check(run, tuple(call.inputs), **options)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        for tensor, values in zip(call.inputs, before, strict=True):
            tensor.data.copy_(values)
    return ""


def sweep(check, calls):
    """How many calls pass in each store, and which of those that pass without one do not."""
    stores = {policy: ActivationStore(policy=policy, min_bytes=0) for policy in POLICIES}
    counts, findings = Counter(), []
    for op, call in calls:
        if not call.inputs or passes(check, op, call, nullcontext()):
            counts["not without a store"] += 1
            continue
        for policy, store in stores.items():
            why = passes(check, op, call, store)
            counts[policy] += not why
            if why:
                findings.append(f"{policy}: {call.name}: {why}")
    for store in stores.values():
        store.close()
    return counts, findings


def calls_of(check, limit, **which):
    for op in operators(torch.float64, **which):
        if check is gradcheck or op.supports_gradgrad:
            yield from ((op, call) for call in samples(op, torch.float64, limit))


CHECKS = pytest.mark.parametrize("check", [gradcheck, gradgradcheck], ids=["gradcheck", "gradgradcheck"])


@CHECKS
def test_some_operators(check):
    counts, findings = sweep(check, calls_of(check, 1, only=SOME))
    assert findings == []
    assert min(counts[policy] for policy in POLICIES) >= len(SOME) - 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@CHECKS
def test_all_operators(check, record_property):
    counts, findings = sweep(check, calls_of(check, 3))
    record_property("counts", dict(counts))
    assert findings == []
    assert min(counts[policy] for policy in POLICIES) >= 1_000
