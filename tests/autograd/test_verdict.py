"""The verdict on a saved tensor, without a store and without a graph."""

import pytest
import torch

from actstore.autograd.verdict import BITS, RAW, Facts, judge, why_unfit, why_unstorable
from actstore.codecs import Int8, Raw

INT8, INT8_KEPT = Int8(), Int8().keeping_signs
X = torch.randn(64)


def verdict(tensor=X, codec=INT8, *, producer="MulBackward0", protected=True, on_device=True, **facts):
    facts = Facts(tensor, producer, **{"whole": True, "read": False} | facts)
    return judge(tensor, codec, facts, set(), protected=protected, on_device=on_device)


def test_an_activation_goes_through_the_codec_of_its_policy():
    assert verdict() == (INT8, "", False)
    assert verdict(codec=Raw()) == (Raw(), "", False)


def test_signs_are_kept_where_backward_decides_by_them():
    assert verdict(producer="ReluBackward0").codec == INT8_KEPT != INT8
    assert verdict(producer="GeluBackward0").codec == INT8


EXACT = {
    "softmax": ({"producer": "SoftmaxBackward0"}, "its error is amplified"),
    "no gradient": ({"producer": ""}, "requires no gradient"),
    "dtype": ({"tensor": X.double()}, "int8 does not take float64"),
    "indices": ({"tensor": torch.arange(64)}, "int8 does not take int64"),
    "module": ({"exact": "a weight"}, "a weight"),
    "another site": ({"excluded": "only a[0] is lossy now"}, "only a[0] is lossy now"),
    "overlap": ({"tensor": torch.randn(8).unfold(0, 4, 1).t()[1:], "whole": False}, "its elements overlap in memory"),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_must_be_exact_is_kept_on_the_device_and_moved_as_it_is(name):
    facts, reason = EXACT[name]
    kept, moved = verdict(**facts), verdict(**facts, on_device=False)
    assert (kept.codec, kept.exact, moved.codec, moved.exact) == (None, True, RAW, True)
    assert reason in kept.reason
    assert kept.reason == moved.reason


def test_masks_take_one_bit():
    assert verdict(X > 0, producer="") == (BITS, "int8 does not take bool", True)


def test_an_unprotected_policy_gives_up_what_protects_values():
    assert verdict(producer="SoftmaxBackward0", protected=False).codec == INT8
    assert verdict(X.double(), protected=False).codec is None


def test_what_a_call_without_a_name_saves_is_kept_unless_the_policy_is_unprotected():
    assert verdict(read=True) == (None, "backward of an unknown operator needs all of its bits", True)
    assert verdict(read=True, protected=False) == (INT8, "", False)


def test_a_lossless_codec_asks_for_nothing():
    assert verdict(codec=Raw(), producer="SoftmaxBackward0", exact="a weight") == (Raw(), "", False)


UNSTORABLE = {
    "meta": (lambda: torch.empty(8, device="meta"), "a meta tensor"),
    "zeros": (lambda: torch._efficientzerotensor(8), "implicit zeros"),
    "a class": (lambda: torch.nn.Parameter(X), "a nested or Parameter tensor"),
    "quantized": (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "quantized"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", UNSTORABLE)
def test_what_no_codec_takes(name):
    make, reason = UNSTORABLE[name]
    assert reason in why_unstorable(make(), in_backward=False)


def test_what_a_differentiated_backward_saves_is_kept():
    assert why_unstorable(X, in_backward=False) == ""
    assert "itself differentiated" in why_unstorable(X, in_backward=True)


def test_a_view_is_kept_where_it_is_small_or_its_storage_has_shrunk():
    assert why_unfit(X[:32], 256, 128) == ""
    assert why_unfit(X[:32], 256, 129) == "small"
    assert why_unfit(X[:32], 4 * 128 + 1, 129) == ""  # a view of much more
    assert "resized" in why_unfit(X[32:], 255, 0)
