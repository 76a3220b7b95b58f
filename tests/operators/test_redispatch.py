"""PyTorch's own operators and modules below a mode that calls them by `redispatch`: bits are those without a mode."""

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actstore.base.redispatch import OperatorMode, redispatch
from tests.autograd.checks import same_bits
from tests.operators.calls import module_calls, operators, samples

AUTOCAST = {"off": nullcontext, "on": lambda: torch.autocast("cpu", torch.bfloat16)}
UNSTABLE = ("linalg.lstsq",)  # differs from run to run
ANOTHER_WAY = "LinearCrossEntropyLoss"  # smoothed with weights: PyTorch sums in another order below any mode
QUICK = ("linalg.pinv", "pinverse", "nn.functional.bilinear", "matrix_exp", "cdist", "einsum")


class Seeing(OperatorMode):
    """It sees operators that compositions call, too."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, operator, args, kwargs):
        self.seen.append(operator)
        return redispatch(operator, args, kwargs)


class Below(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return redispatch(operator, args, kwargs or {})


def outcome(call, context, mode):
    """Outputs and gradients, or the error."""
    torch.manual_seed(0)
    try:
        with context(), mode:
            found = [leaf for leaf in tree_leaves(call.run(call.inputs)) if isinstance(leaf, Tensor)]
        outputs = [each for each in found if each.requires_grad]
        grads = torch.autograd.grad([each.abs().sum() for each in outputs], call.inputs, allow_unused=True)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error)
    return [*found, *grads]


def same(found, wanted):
    if isinstance(found, str) or isinstance(wanted, str):
        return found == wanted
    return len(found) == len(wanted) and all(map(same_bits, found, wanted))


def check(calls, context, *, least):
    """All of so many `calls` that are the same in two runs without a mode are the same below one."""
    count, findings = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls:
            wanted = outcome(call, context, nullcontext())
            if not same(outcome(call, context, nullcontext()), wanted):
                continue
            count += 1
            if not same(outcome(call, context, Below()), wanted):
                findings.append(call.name)
    assert findings == []
    assert count >= least


def calls_of(dtype, context, limit, **which):
    for op in operators(dtype, **which):
        if op.name not in UNSTABLE:
            yield from samples(op, dtype, limit)


@pytest.mark.parametrize("context", AUTOCAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_operators_that_call_others(dtype, context):
    check(calls_of(dtype, context, 4, only=QUICK), AUTOCAST[context], least=8)


@pytest.mark.parametrize("mode", [Below, Seeing])
@pytest.mark.parametrize("name", ["silu_backward", "mish_backward"])
def test_a_backend_with_a_kernel_runs_that(name, mode):
    """Other backends have compositions for these, whose bits are different; on CUDA, `_fused_rms_norm` is one."""
    operator, grad, x = getattr(torch.ops.aten, name).default, torch.randn(1000), torch.randn(1000)
    with mode() as seen:
        found = operator(grad, x)
    assert same_bits(found, operator(grad, x))
    assert getattr(seen, "seen", [operator]) == [operator]


def check_inference(calls, context, *, least):
    """In inference mode PyTorch shows a mode whole compositions; below it all outputs are the same."""
    count, findings = 0, []
    for call in calls:

        def run(call=call):
            torch.manual_seed(0)
            with torch.inference_mode(), context():
                return [leaf for leaf in tree_leaves(call.run(call.inputs)) if isinstance(leaf, Tensor)]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                wanted = run()
            except (RuntimeError, ValueError, NotImplementedError):
                continue
            if not same(run(), wanted):
                continue
            count += 1
            for mode in (Below(), Seeing()):
                with mode:
                    found = run()
                if not same(found, wanted):
                    findings.append(f"{type(mode).__name__}: {call.name}")
    assert findings == []
    assert count >= least


RECURRENT = "LSTM", "GRU", "MultiheadAttention", "TransformerEncoderLayer"


@pytest.mark.parametrize("context", AUTOCAST)
def test_modules_in_inference_mode(context):
    calls = (each.call for name in RECURRENT for each in module_calls(torch.float32, 6, only=[name]))
    check_inference(calls, AUTOCAST[context], least=12)


@pytest.mark.parametrize("context", AUTOCAST)
@pytest.mark.parametrize(
    "make",
    [
        partial(nn.LSTM, 8, 8, 2, dropout=0.5),
        partial(nn.GRU, 8, 8, 2, dropout=0.5),
        partial(nn.TransformerEncoderLayer, 8, 2, 16),
    ],
    ids=lambda make: make.func.__name__,
)
def test_dropout_in_inference_mode(context, make):
    layer, x, found = make(), torch.randn(4, 2, 8), []
    for mode in (nullcontext(), Below(), Seeing()):
        torch.manual_seed(0)
        try:
            with torch.inference_mode(), AUTOCAST[context](), mode:
                found.append(tree_leaves(layer(x)))
        except RuntimeError as error:
            if found:
                raise
            pytest.skip(f"plain PyTorch: {error}")  # a bfloat16 LSTM needs AVX-512
    assert same(found[1], found[0])
    assert same(found[2], found[0])
    assert torch.ops.aten.bernoulli_.float in mode.seen


@pytest.mark.slow
@pytest.mark.parametrize("context", AUTOCAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_all_operators_in_inference_mode(dtype, context):
    check_inference(calls_of(dtype, context, None), AUTOCAST[context], least=1000)


@pytest.mark.slow
@pytest.mark.parametrize("context", AUTOCAST)
def test_all_modules_in_inference_mode(context):
    calls = (each.call for each in module_calls(torch.float32, None) if ANOTHER_WAY not in each.call.name)
    check_inference(calls, AUTOCAST[context], least=200)


@pytest.mark.parametrize(("needs_grad", "enabled"), [(False, True), (True, True), (True, False)])
def test_layouts_of_pooled_tensors(needs_grad, enabled):
    """Without a gradient PyTorch has another kernel for one dimension, but not below a mode."""
    x = torch.randn(2, 4, 8, requires_grad=needs_grad).transpose(1, 2)
    pools = (
        lambda: F.max_pool1d(x, 3),
        lambda: F.max_pool1d(x, 3, return_indices=True),
        lambda: F.max_pool2d(x.unsqueeze(-2), (1, 3)),
    )
    for pool in pools:
        with torch.set_grad_enabled(enabled):
            with Below():
                found = tree_leaves(pool())
            plain = tree_leaves(pool())
        for each, wanted in zip(found, plain, strict=True):
            assert torch.equal(each, wanted)
            assert each.stride() == wanted.stride()


@pytest.mark.slow
@pytest.mark.parametrize("context", AUTOCAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_all_operators(dtype, context):
    check(calls_of(dtype, context, None), AUTOCAST[context], least=1000)


@pytest.mark.slow
@pytest.mark.parametrize("context", AUTOCAST)
def test_all_modules(context):
    calls = (each.call for each in module_calls(torch.float32, None) if ANOTHER_WAY not in each.call.name)
    check(calls, AUTOCAST[context], least=200)
