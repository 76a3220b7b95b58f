"""PyTorch's own operator database under a lossless store: every gradient as without one, bit for bit, and twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from actstore import ActivationStore
from tests.autograd.checks import check_drained, same_bits

pytest.importorskip("expecttest", reason="torch.testing needs it")

ALWAYS = (
    "nn.functional.rrelu",  # writes into what it has already saved
    "nn.functional.batch_norm", "nn.functional.conv2d", "nn.functional.dropout", "nn.functional.embedding",
    "nn.functional.gelu", "nn.functional.layer_norm", "nn.functional.max_pool2d",
    "nn.functional.multi_head_attention_forward",
    "nn.functional.scaled_dot_product_attention", "nn.functional.unfold", "as_strided", "cumprod", "einsum", "expand",
    "index_put", "linalg.lu_factor", "linalg.svd", "log_softmax", "masked_scatter", "matmul", "norm", "prod", "unfold",
)  # fmt: skip
EVERY = 4  # of the others, in the order of their names
SAMPLES = 6  # of each, in the quick run

# Each run gives other values, also without a store.
UNSTABLE = {"empty_like", "new_empty", "new_empty_strided", "empty", "empty_permuted", "empty_strided"}


def operators(*, every: int) -> Iterator[Any]:
    """Operators of the database that can be differentiated: the fixed list, and one of `every` others."""
    from torch.testing._internal.common_methods_invocations import op_db

    able = sorted((op for op in op_db if op.supports_autograd and op.name not in UNSTABLE), key=lambda op: op.full_name)
    for i, op in enumerate(able):
        if i % every == 0 or op.name in ALWAYS:
            yield op


def differentiable(outputs: Any) -> list[Tensor]:
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]


def gradients(op: Any, sample: Any, store: ActivationStore | None) -> list[Tensor | None] | None:
    """Gradients of one sample, taken twice; None where nothing can be differentiated."""
    inputs = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, Tensor)]
    inputs = [t for t in inputs if t.requires_grad]
    torch.manual_seed(0)
    if store is None:
        outputs = op(sample.input, *sample.args, **sample.kwargs)
    else:
        with store:
            outputs = op(sample.input, *sample.args, **sample.kwargs)
    outputs = differentiable(sample.output_process_fn_grad(outputs))
    if not inputs or not outputs:
        return None
    cotangents = [torch.ones_like(t) for t in outputs]
    first = torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    return [*first, *second]


def compare(op: Any, sample: Any, store: ActivationStore) -> str:
    """ "equal", "differs: ..." or why the sample says nothing."""
    try:
        wanted = gradients(op, sample, None)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError):
        return "refused by plain autograd"
    if wanted is None:
        return "nothing to differentiate"
    try:
        found = gradients(op, sample, store)
    except Exception as error:  # any error is a finding
        return f"differs: {type(error).__name__}: {error}"
    if all(map(same_bits, found, wanted)):
        return "equal"
    again = gradients(op, sample, None)
    return "differs: other bits" if all(map(same_bits, again, wanted)) else "differs from run to run"


def sweep(dtype: torch.dtype, policy: str, *, every: int, samples: int | None) -> tuple[Counter[str], list[str]]:
    """One store over all samples: counts of verdicts, and what differs."""
    store = ActivationStore(policy=policy, min_bytes=0)
    counts: Counter[str] = Counter()
    findings = []
    for op in operators(every=every):
        if dtype not in op.supported_backward_dtypes("cpu"):
            continue
        counts["operators"] += 1
        for i, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=True)):
            if i == samples:
                break
            verdict = compare(op, sample, store)
            if verdict.startswith("differs: "):
                findings.append(f"{op.full_name}, sample {i}: {verdict}")
            counts[verdict.partition(":")[0]] += 1
    check_drained(store)
    store.close()
    return counts, findings


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", ["raw", "raw @ disk"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_operators(dtype, policy):
    counts, findings = sweep(dtype, policy, every=EVERY, samples=SAMPLES)
    assert findings == []
    assert counts["operators"] >= 150
    assert counts["equal"] >= 700
    assert counts["differs from run to run"] <= 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", ["raw", "raw @ disk"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_all_operators(dtype, policy, record_property):
    counts, findings = sweep(dtype, policy, every=1, samples=None)
    record_property("counts", dict(counts))
    assert findings == []
    assert counts["equal"] >= 12_000
