import pytest

from actstore.policy.pattern import Pattern, ancestry, near_modules, shapes


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("*", "a.b"),
        ("*", "a/t"),
        ("a", "a"),
        ("a", "a.b"),
        ("a.*", "a.?.c"),
        ("a.*", "a.*.c"),
        ("*.b", "a.b.c"),
        ("a[bc]", "a[bc]"),
        ("a", "a/t"),
        ("a/*", "a.b/t*"),
        ("a/t", "a.b/t"),
        ("a", "a/@sdpa"),
        ("*", "a/@aten.mm"),
        ("a/@matmul", "a.b/@matmul"),
        ("a/@matmul", "a/@aten.addmm"),
        ("a/@sdpa", "a/@aten._scaled_dot_product_flash_attention"),
        ("a/@sdpa", "a/@aten._scaled_dot_product_f*"),
        ("*/@aten.*", "a/@norm"),
    ],
)
def test_a_pattern_that_plainly_includes_another(wide, narrow):
    assert Pattern.parse(wide).includes(Pattern.parse(narrow))


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("a.b", "a"),
        ("a", "b"),
        ("a", "ab"),
        ("a.?", "a.*"),
        ("*b*", "a[bc]"),
        ("a[bc]", "ab"),  # true, yet not plain
        ("a.0", "a.*"),
        ("a/t", "a"),
        ("a/t", "a/*"),
        ("*/t", "a"),
        ("a/@matmul", "a"),
        ("a/@matmul", "a/matmul"),
        ("a/*", "a/@matmul"),
        ("a/@aten.*", "a/t"),
        ("a/@aten.mm", "a/@matmul"),
        ("a/@conv", "a/@matmul"),
    ],
)
def test_a_pattern_that_may_not_include_another(wide, narrow):
    assert not Pattern.parse(wide).includes(Pattern.parse(narrow))


def test_ancestry_goes_outward():
    assert list(ancestry("a.b.0")) == ["a.b.0", "a.b", "a"]
    assert list(ancestry("")) == []


def test_shapes_name_repeated_modules_once():
    assert shapes(["", "a.0.b", "a", "a.0", "a.1", "a.1.b", "h"]) == ["a", "h", "a.*", "a.*.b"]


@pytest.mark.parametrize(
    ("meant", "near"),
    [
        ("layers.*.self_attn", ["model.layers.*.self_attn"]),
        ("model.layers.0.self_att", ["model.layers.*.self_attn"]),
        ("model.layers.9", ["model.layers.0", "model.layers.1"]),
        ("*.self_atn", ["model.layers.*.self_attn"]),
        ("decoder", []),
    ],
)
def test_what_may_have_been_meant(meant, near):
    names = ["model", "model.layers", "model.layers.0", "model.layers.0.self_attn", "model.layers.1", "model.embed"]
    assert near_modules(meant, names) == near
