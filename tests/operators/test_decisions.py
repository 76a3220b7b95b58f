"""What is compressed never changes a decision of PyTorch's own backwards: its operators, at kinks and elsewhere."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch

from actstore import ActivationStore
from actstore.autograd import deciders
from tests.operators.calls import operators
from tests.operators.jumps import pairs, verdict

DECIDERS = (  # each compares a float that it saves, or what it is made of, in its backward
    "abs", "amax", "aminmax", "clamp", "clamp_max", "clamp_min", "fmod", "max.reduction_no_dim", "maximum",
    "median", "nn.functional.grid_sample", "nn.functional.hardshrink", "nn.functional.hardsigmoid",
    "nn.functional.hardswish", "nn.functional.hardtanh", "nn.functional.leaky_relu",
    "nn.functional.prelu", "nn.functional.relu", "nn.functional.relu6", "nn.functional.selu",
    "nn.functional.softshrink", "norm.inf",
    "scatter_reduce.amax",
)  # fmt: skip
OTHERS = (
    "div", "exp", "matmul", "mul", "nn.functional.elu", "nn.functional.gelu", "nn.functional.layer_norm",
    "nn.functional.normalize", "nn.functional.threshold", "pow", "prod", "softmax", "sqrt", "tanh",
)  # fmt: skip


def sweep(policy, limit, *, only=()):
    """How often which verdict came, and what was found."""
    counts, findings = Counter(), []
    for op in operators(torch.float32):
        if only and op.full_name not in only:
            continue
        store = ActivationStore(policy=policy, min_bytes=0)
        for pair in pairs(op, limit):
            found = verdict(pair, store)
            counts[found or "as exact"] += 1
            if found not in ("", "skipped"):
                findings.append(f"{pair.single.name}: {found}")
        store.close()
    return counts, findings


@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_operators(policy):
    counts, findings = sweep(policy, 1, only=DECIDERS + OTHERS)
    assert findings == []
    assert counts["as exact"] >= 50


def plain(*_):
    return "", ""


def test_without_the_knowledge_of_readers_each_decider_is_found(monkeypatch):
    monkeypatch.setattr(deciders, "_reader", plain)
    monkeypatch.setattr(deciders, "_by_result", lambda *_: "")
    _, findings = sweep("int4", 6, only=DECIDERS)
    found = {finding.partition(",")[0] for finding in findings}
    assert found == set(DECIDERS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_all_operators(policy):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's own, of samples
        counts, findings = sweep(policy, 40)
    assert findings == []
    assert counts["as exact"] >= 6_000
