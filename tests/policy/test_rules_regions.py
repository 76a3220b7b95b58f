# ruff: noqa: E501 - a case stands on one line
import pytest

from actstore.errors import PolicyError
from actstore.policy import Recompute, parse

BLOCKS = [f"blocks.{i}" for i in range(3)]
NAMES = [
    "",
    "embed",
    "blocks",
    *(name for block in BLOCKS for name in (block, f"{block}.attn", f"{block}.attn.proj", f"{block}.mlp")),
    "head",
]


def roots(text):
    return parse(text).regions(NAMES, BLOCKS).roots


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int8", []),
        ("recompute", BLOCKS),
        ("head : int8; * : recompute", BLOCKS),
        ("blocks.1 : int8; * : recompute", ["blocks.0", "blocks.2"]),
        ("blocks.* : keep; * : recompute", []),
        ("blocks.* : recompute", BLOCKS),
        ("blocks : recompute", ["blocks"]),
        ("blocks.*.mlp : recompute", [f"{block}.mlp" for block in BLOCKS]),
        ("blocks.*.attn : recompute; blocks.*.mlp : recompute(raw @ host); * : int8",
         [f"{block}.{part}" for block in BLOCKS for part in ("attn", "mlp")]),
        ("blocks.0 : recompute; * : recompute", BLOCKS),
        ("blocks.1.mlp : int8; blocks.*.mlp : recompute", ["blocks.0.mlp", "blocks.2.mlp"]),
        ("*.proj : int8; *.mlp : recompute", [f"{block}.mlp" for block in BLOCKS]),
        ("blocks.*/qkv : int8; blocks.*.mlp : recompute", [f"{block}.mlp" for block in BLOCKS]),
        ("*/qkv : int8; * : recompute", BLOCKS),
    ],
)  # fmt: skip
def test_the_outermost_modules_that_a_recompute_rule_matches(text, expected):
    assert list(roots(text)) == expected


def test_each_root_has_its_own_decision():
    found = roots("blocks.0 : recompute(int8); * : recompute(raw @ disk)")
    assert {name: str(decision) for name, decision in found.items()} == {
        "blocks.0": "recompute(int8)",
        "blocks.1": "recompute(raw @ disk)",
        "blocks.2": "recompute(raw @ disk)",
    }
    assert all(isinstance(decision, Recompute) for decision in found.values())


def test_blocks_inside_blocks_are_recomputed_with_them():
    names = ["stages", "stages.0", "stages.0.0", "stages.0.1"]
    assert list(parse("recompute").regions(names, names[1:]).roots) == ["stages.0"]


@pytest.mark.parametrize(
    ("text", "found", "parts"),
    [
        ("blocks.*.attn : int8; blocks.* : recompute", BLOCKS, [f"{block}.attn" for block in BLOCKS]),
        ("blocks.*.attn : int8; * : recompute", BLOCKS, [f"{block}.attn" for block in BLOCKS]),
        ("blocks.2.attn.proj : keep; blocks.* : recompute(raw @ host)", BLOCKS, ["blocks.2.attn.proj"]),
        ("blocks.*.attn.proj : int8; blocks.*.attn : keep; blocks.1 : recompute", ["blocks.1"], ["blocks.1.attn"]),
        ("*.proj : recompute; blocks.0.attn : keep; blocks.0 : recompute", ["blocks.0", *(f"{b}.attn.proj" for b in BLOCKS)],
         ["blocks.0.attn"]),
        ("blocks.*.attn : int8; blocks.*.mlp : recompute", [f"{block}.mlp" for block in BLOCKS], []),
        ("blocks.*.mlp/h : int8; *.mlp : keep; blocks.* : recompute", BLOCKS, [f"{block}.mlp" for block in BLOCKS]),
        ("blocks.*.mlp/h : int8; blocks.*/@sdpa : keep; blocks.* : recompute", BLOCKS, []),
    ],
)  # fmt: skip
def test_the_outermost_modules_inside_that_another_rule_decides(text, found, parts):
    regions = parse(text).regions(NAMES, BLOCKS)
    assert list(regions.roots) == found
    assert regions.parts == parts


@pytest.mark.parametrize(
    ("text", "inner", "outer", "where", "why"),
    [
        ("*.mlp : recompute; blocks : recompute", "*.mlp : recompute", "blocks : recompute", "blocks holds blocks.0.mlp",
         "the region runs again as a whole. Leave that rule out, or write patterns for the other parts instead of the "
         "whole"),
        ("blocks.*.attn.proj : recompute(int8); blocks.*.mlp : keep; blocks.* : recompute",
         "blocks.*.attn.proj : recompute(int8)", "blocks.* : recompute", "blocks.0 holds blocks.0.attn.proj",
         "the region runs again as a whole. Leave that rule out, or write patterns for the other parts instead of the "
         "whole"),
    ],
)  # fmt: skip
def test_a_rule_inside_a_recomputed_region_is_refused(text, inner, outer, where, why):
    with pytest.raises(PolicyError) as caught:
        roots(text)
    assert str(caught.value) == (
        f"rule '{inner}' lies inside the recomputed region of rule '{outer}' ({where}): {why}."
    )


def test_recompute_without_blocks_asks_for_names():
    with pytest.raises(PolicyError) as caught:
        parse("recompute(raw @ host)").regions(["", "encoder"], [])
    assert str(caught.value) == (
        "'* : recompute(raw @ host)' recomputes the repeated blocks of the model, and it has none. Name the modules to "
        "recompute instead, such as 'encoder : recompute(raw @ host)'."
    )
