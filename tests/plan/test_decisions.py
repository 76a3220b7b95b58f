"""Decisions on a unit and its parts."""

import pytest

from actstore.plan.decisions import (
    by_part,
    except_from_recompute,
    excepted_part,
    offloads,
    recomputed_calls,
    recomputes,
    recomputes_all,
    rules_of,
)
from actstore.plan.profile import UnitFigures, medians
from actstore.policy import Recompute, Rules, parse_decision


@pytest.mark.parametrize(
    ("decision", "rules"),
    [
        ("attn : int8 @ host; mlp : recompute", {"attn": "int8 @ host", "mlp": "recompute"}),
        ("int8", {"": "int8"}),
        ("attn : keep; recompute", {"attn": "keep", "": "recompute"}),
        ("@sdpa : raw @ disk; recompute", {"@sdpa": "raw @ disk", "": "recompute"}),
        ("recompute(first=2)", {"": "recompute(first=2)"}),
    ],
)
def test_a_decision_names_parts_of_a_unit(decision, rules):
    assert by_part(decision) == {part: parse_decision(text) for part, text in rules.items()}
    patterns = {"": "h.0", "attn": "h.0.attn", "mlp": "h.0.mlp", "@sdpa": "h.0/@sdpa"}
    wanted = "\n".join([*(f"{patterns[part]} : {text}" for part, text in rules.items()), "* : keep"])
    assert str(rules_of({"": "keep", "h.0": decision, "h.1": "keep"})) == wanted
    assert rules_of({"h.0": decision}) == Rules.parse(wanted)


def test_what_a_decision_recomputes_and_offloads():
    assert recomputed_calls("recompute(first=2)") == 2
    assert recomputed_calls("recompute") is recomputed_calls("int8") is recomputed_calls("attn : recompute") is None
    assert recomputes_all("recompute(raw @ host)")
    assert not recomputes_all("attn : recompute")
    assert not recomputes_all("attn : keep; recompute")
    assert offloads("attn : int8; mlp : raw @ disk")
    assert offloads("recompute(raw @ host)")
    assert not offloads("recompute(int8)")
    assert by_part("recompute")[""] == Recompute()


@pytest.mark.parametrize(
    "decision", ["recompute", "recompute(raw @ host)", "attn : recompute", "a : int8; b : recompute"]
)
def test_a_decision_that_recomputes(decision):
    assert recomputes(decision)


def test_what_is_derived_counts_with_the_error_of_its_codec():
    """A unit may derive all that it saves from payloads of another unit, and then encodes nothing."""
    errors = {"int8": 2e-4, "derive(int8)": 0.0, "derive(int8 @ disk)": 0.0, "derive": 0.0, "derive(raw @ disk)": 0.0}
    found = medians(UnitFigures(decision, 1.0, 1.0, {}, 0, error) for decision, error in errors.items())
    assert found["derive(int8)"].error == found["int8"].error
    assert found["derive(int8 @ disk)"].error == 1.0  # unknown: "int8 @ disk" was not measured
    assert found["derive"].error == found["derive(raw @ disk)"].error == 0.0


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
