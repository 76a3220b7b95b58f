"""What is compressed never changes a decision of PyTorch's own backwards: its operators, at kinks and elsewhere.

The bound: where a gradient under a lossy store differs from plain's, halving the difference of what backward reads, 44
times, leaves no jump of more than 1e-3 of the largest gradient, and no finite gradient comes back infinite (`jumps`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch

from actstore import ActivationStore
from actstore.autograd import deciders
from actstore.codecs.dispatch import SignedCodec
from actstore.codecs.slopes import Levels, Side
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
    "div.no_rounding_mode", "div.trunc_rounding", "exp", "log", "masked.normalize", "matmul", "mul",
    "nn.functional.celu", "nn.functional.elu", "nn.functional.gelu", "nn.functional.layer_norm",
    "nn.functional.normalize", "nn.functional.threshold", "pow", "prod", "sign", "softmax", "sqrt", "tanh",
    "true_divide",
)  # fmt: skip


def sweep(policy, limit, *, only=()):
    """Count each verdict, and list what was found."""
    counts, findings = Counter(), []
    for op in operators(torch.float32):
        if only and op.full_name not in only:
            continue
        store = ActivationStore(policy=policy, min_bytes=0)
        for pair in pairs(op, limit):
            found = verdict(pair, store)
            counts[found or "as exact"] += 1
            if found and not found.startswith("skipped"):
                findings.append(f"{pair.single.name}: {found}")
        store.close()
    return counts, findings


def found_in(findings):
    return {finding.partition(",")[0] for finding in findings}


@pytest.mark.parametrize("policy", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_operators(policy):
    counts, findings = sweep(policy, 1, only=DECIDERS + OTHERS)
    assert findings == []
    assert counts["as exact"] >= 90


def plain(*_, **__):
    return "", ""


def test_without_the_knowledge_of_readers_each_decider_is_found(monkeypatch):
    monkeypatch.setattr(deciders, "_reader", plain)
    monkeypatch.setattr(deciders, "_by_result", lambda *_: "")
    missed = {op.full_name for op in operators(torch.float32)} & set(DECIDERS)
    assert set(DECIDERS) - missed <= {"aminmax"}  # without a derivative before PyTorch 2.12
    for limit in (1, 6):  # a few need more samples
        missed -= found_in(sweep("int4", limit, only=missed)[1])
    assert missed == set()


def moved_bounds(monkeypatch):
    encode = Side.encode
    monkeypatch.setattr(Side, "encode", lambda self, *args: encode(replace(self, low=self.low + 1e-2), *args))


def no_sides_of_levels(monkeypatch):
    values = Levels._values

    def inside(self, device):
        found = values(self, device)
        found[0], found[self.count + 1] = found[1], found[self.count]
        return found

    monkeypatch.setattr(Levels, "_values", inside)


def no_signs(monkeypatch):
    monkeypatch.setattr(SignedCodec, "keeping_signs", property(lambda self: replace(self, signs="round")))


def other_names(monkeypatch):
    monkeypatch.setattr(deciders, "operator_name", lambda _: "mul")


def no_views(monkeypatch):
    monkeypatch.setattr(deciders, "COPY_SLICES", "")


@pytest.mark.parametrize(
    ("plant", "names"),
    [
        (no_views, {"nn.functional.relu"}),
        (moved_bounds, {"nn.functional.hardtanh", "nn.functional.leaky_relu", "nn.functional.threshold"}),
        (no_sides_of_levels, {"nn.functional.hardswish", "nn.functional.selu"}),
        (no_signs, {"abs", "nn.functional.prelu", "nn.functional.relu"}),
        (other_names, {"abs", "clamp", "nn.functional.softshrink"}),
    ],
)
def test_planted_flips_are_found(plant, names, monkeypatch):
    assert sweep("int4", 3, only=names)[1] == []
    plant(monkeypatch)
    assert found_in(sweep("int4", 3, only=names)[1]) == names


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_all_operators(policy):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's own, of samples
        counts, findings = sweep(policy, None)
    assert findings == []
    assert counts["as exact"] >= 14_000
