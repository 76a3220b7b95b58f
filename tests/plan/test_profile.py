"""Texts of decisions on a unit and its parts."""

import pytest

from actstore.plan.build import rules_of
from actstore.plan.profile import by_part, except_from_recompute, excepted_part, recomputes


def test_a_decision_names_parts_of_a_unit():
    assert list(by_part("attn : int8 @ host; mlp : recompute")) == [("attn", "int8 @ host"), ("mlp", "recompute")]
    assert list(by_part("int8")) == [("", "int8")]
    assert rules_of("h.0", "attn : int8; mlp : keep") == ["h.0.attn : int8", "h.0.mlp : keep"]
    assert rules_of("h.0", "attn : keep; recompute") == ["h.0.attn : keep", "h.0 : recompute"]
    assert rules_of("h.0", "@sdpa : raw @ disk; recompute") == ["h.0/@sdpa : raw @ disk", "h.0 : recompute"]
    assert rules_of("h.0", "recompute(first=2)") == ["h.0 : recompute(first=2)"]


@pytest.mark.parametrize(
    "decision", ["recompute", "recompute(raw @ host)", "attn : recompute", "a : int8; b : recompute"]
)
def test_a_decision_that_recomputes(decision):
    assert recomputes(decision)


@pytest.mark.parametrize("decision", ["keep", "int8", "recompute_head : int8", "a.recompute : derive; b : int4"])
def test_the_name_of_a_part_recomputes_nothing(decision):
    assert not recomputes(decision)


@pytest.mark.parametrize("part", ["attn", "layers.0", "@matmul"])
def test_a_decision_that_excepts_a_part(part):
    assert excepted_part(except_from_recompute(part, "raw @ disk")) == part
    assert recomputes(except_from_recompute(part, "keep"))


@pytest.mark.parametrize("decision", ["keep", "recompute", "attn : recompute", "attn : int8; mlp : recompute", "int8"])
def test_other_decisions_except_nothing(decision):
    assert excepted_part(decision) == ""
