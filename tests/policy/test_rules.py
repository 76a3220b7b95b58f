import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.spec import Site, Spec
from actstore.codecs import Int8, Raw
from actstore.errors import PolicyError
from actstore.policy import Encode, Keep, Offload, Recompute, Rules, parse
from actstore.policy.pattern import Pattern
from tests.policy.codecs import these_codecs
from tests.policy.strategies import names, rules

RAW, INT8, HOST = Encode(Raw()), Encode(Int8()), Offload(Int8(), "host")
MODEL = [
    "",
    "embed",
    "blocks",
    *(
        f"blocks.{i}{part}"
        for i in range(12)
        for part in ("", ".norm", ".attn", ".attn.qkv", ".attn.proj", ".mlp", ".mlp.up", ".mlp.down")
    ),
    "head",
]


def test_the_first_rule_that_covers_the_site_wins():
    policy = Rules([("blocks.0", RAW), ("blocks.*.attn", HOST), ("blocks.*", INT8)])
    assert policy.decide("blocks.0.attn") == RAW
    assert policy.decide("blocks.3.attn") == HOST
    assert policy.decide("blocks.3.mlp") == INT8
    assert policy.decide("head") == Keep()


def test_a_policy_is_called_with_a_site_and_a_spec():
    policy = Rules([("head/logits", RAW), ("head", HOST)], default=INT8)
    spec = Spec.of(torch.zeros(2))
    assert policy(Site("head", 0), spec) == HOST
    assert policy(Site("head", 1, "logits"), spec) == RAW
    assert policy(Site("", 0), spec) == INT8
    assert policy(Site("", 0), spec) is policy(Site("", 7), spec)


@pytest.mark.parametrize(
    ("pattern", "covered", "free"),
    [
        ("head", ["head", "head.proj", "head.proj.0"], ["", "heads", "a.head"]),
        ("blocks.*.attn", ["blocks.0.attn", "blocks.0.attn.proj", "blocks.0.a.attn"], ["blocks.0.attention", "blocks"]),
        ("blocks.*", ["blocks.0", "blocks.0.mlp.up"], ["blocks", "blockss.0"]),
        ("*.attn", ["a.attn", "a.b.attn.c"], ["attn", "a.attn2"]),
        ("blocks.[01]", ["blocks.0", "blocks.1.mlp"], ["blocks.2", "blocks.10"]),
        ("blocks.?", ["blocks.0"], ["blocks.10", "blocks"]),
        ("Head", ["Head"], ["head"]),
        ("*", ["", "head", "a.b"], []),
    ],
)
def test_a_pattern_covers_what_it_matches_and_all_inside(pattern, covered, free):
    policy = Rules([(pattern, RAW)], default=None if pattern == "*" else Keep())
    assert {name for name in covered + free if policy.decide(name) == RAW} == set(covered)


def test_a_tag_restricts_a_rule_to_tensors_so_named():
    policy = Rules([("blocks.*/q*", RAW), ("*/loss", HOST), ("blocks.*", INT8)])
    assert policy.decide("blocks.0.attn", "qkv") == RAW
    assert policy.decide("blocks.0.attn", "v") == INT8
    assert policy.decide("blocks.0.attn") == INT8
    assert policy.decide("head", "qkv") == Keep()
    assert policy.decide("head", "loss") == HOST
    assert policy.decide("", "loss") == HOST
    assert policy.decide("") == Keep()


def test_a_last_rule_for_everything_is_the_default():
    policy = Rules([("head", RAW), ("*", INT8)])
    assert policy == Rules([("head", RAW)], default=INT8) == Rules([("head", RAW), ("**", INT8)])
    assert policy.rules == (("head", RAW),)
    assert policy.default == INT8
    assert Rules() == parse("keep") == Rules(default=Keep())


def test_rules_are_a_value():
    policy, other = Rules([("a", RAW)]), Rules([("a", RAW)])
    policy.decide("a.b")
    assert policy == other
    assert hash(policy) == hash(other)
    assert repr(policy) == repr(other) == f"Rules(rules=(('a', {RAW!r}),), default=Keep())"
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert policy != Rules([("a", RAW)], default=RAW)
    assert Rules([("a", RAW), ("b", INT8)]) != Rules([("b", INT8), ("a", RAW)])
    assert str(policy) == "a : raw\n* : keep"
    with pytest.raises(AttributeError):
        policy.default = RAW


@given(rules())
def test_text_parses_back_to_equal_rules(policy):
    with these_codecs():
        assert Rules.parse(str(policy)) == policy
        assert parse(str(policy).replace("\n", " ; ")) == policy


@given(rules(), names(), st.sampled_from(["", "qkv", "q", "k"]))
def test_deciding_agrees_with_a_look_at_every_rule(policy, name, tag):
    def covers(pattern):
        pattern = Pattern.parse(pattern)
        parts = name.split(".")
        inside = any(pattern.matches(".".join(parts[:n])) for n in range(1, len(parts) + 1))
        everywhere = set(pattern.module) == {"*"}
        tagged = Pattern(pattern.tag).matches(tag) if pattern.tag else True
        return (everywhere or bool(name and inside)) and (tagged and (tag != "" or not pattern.tag))

    expected = [decision for pattern, decision in policy.rules if covers(pattern)] + [policy.default]
    assert policy.decide(name, tag) == expected[0]
    assert policy.decide(name, tag) == expected[0], "the cached answer"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Rules([("*", INT8), ("head", RAW)]),
            "rule 'head : raw' can never apply: rule 1 is '* : int8', which covers all that this one does. The first "
            "match wins: put 'head' before it.",
        ),
        (
            lambda: Rules([("blocks.*", INT8), ("head", RAW), ("blocks.0.attn", RAW)]),
            "rule 'blocks.0.attn : raw' can never apply: rule 1 is 'blocks.* : int8', which covers all that this one "
            "does. The first match wins: put 'blocks.0.attn' before it.",
        ),
        (
            lambda: Rules([("blocks", INT8), ("blocks/qkv", RAW)]),
            "rule 'blocks/qkv : raw' can never apply: rule 1 is 'blocks : int8', which covers all that this one does. "
            "The first match wins: put 'blocks/qkv' before it.",
        ),
        (
            lambda: Rules([("a", INT8), ("b", RAW), ("a", RAW)]),
            "rule 'a : raw' can never apply: rule 1 is 'a : int8', the same pattern. Leave one of them out.",
        ),
        (
            lambda: Rules([("*", INT8)], default=RAW),
            "rule '* : raw' can never apply: rule 1 is '* : int8', the same pattern. Leave one of them out.",
        ),
        (
            lambda: Rules([("a/b", Recompute())]),
            "rule 'a/b : recompute' recomputes a tag, but a tag names tensors and recompute wraps modules. Write "
            "'a : recompute'.",
        ),
        (
            lambda: Rules("a : int8"),
            "Rules takes pairs of a pattern and a decision. Write Rules.parse('a : int8') for text.",
        ),
        (
            lambda: Rules({"a": INT8}),
            f"Rules takes a list of pairs (pattern, decision), whose order counts, not {{'a': {INT8!r}}}.",
        ),
        (
            lambda: Rules(["int8"]),
            "rule 1 is 'int8'. Give a pair of a pattern and a decision: ('blocks.*.attn', Encode(Int8())).",
        ),
        (
            lambda: Rules([("a", RAW), ("b", "int8")]),
            "the decision of rule 2, 'b', is 'int8'. Give Keep(), Derive(), Encode(codec), Offload(codec, tiers) or "
            "Recompute(inputs), or write the whole policy as text for Rules.parse.",
        ),
        (
            lambda: Rules(default="int8"),
            "the default is 'int8'. Give Keep(), Derive(), Encode(codec), Offload(codec, tiers) or Recompute(inputs), "
            "or write the whole policy as text for Rules.parse.",
        ),
        (
            lambda: Rules([("a b", RAW)]),
            "'a b' is not a pattern. Write a module name, in which * stands for anything, such as 'blocks.*.attn'. "
            "After a slash stands the name of a tagged tensor, such as 'blocks.*/qkv', or operators, such as "
            "'blocks.*/@sdpa'.",
        ),
    ],
)
def test_rules_that_cannot_work_cannot_be_built(build, message):
    with pytest.raises(PolicyError) as caught:
        build()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "order",
    [
        ["blocks.0.attn", "blocks.*", "*"],
        ["blocks.*.attn", "blocks.0"],
        ["blocks.?", "blocks.*"],
        ["blocks.?", "blocks.??"],
        ["*/a", "head"],
        ["head/a", "head/*", "head"],
        ["*.attn", "attn"],
    ],
)
def test_rules_of_which_each_can_apply_are_allowed(order):
    text = "\n".join(f"{pattern} : int8" for pattern in order)
    assert str(Rules([(pattern, INT8) for pattern in order])).startswith(text)


@given(rules(), names(), st.sampled_from(["", "qkv", "q"]))
def test_a_rule_is_called_unreachable_only_if_it_is(policy, name, tag):
    patterns = [Pattern.parse(pattern) for pattern, _ in policy.rules]
    for wide in patterns:
        for narrow in patterns:
            if wide.includes(narrow) and narrow.covers(name, tag):
                assert wide.covers(name, tag)


LISTED = (
    "The model has embed, blocks, head, blocks.*, blocks.*.norm, blocks.*.attn, blocks.*.mlp, blocks.*.attn.qkv "
    "and 3 more."
)


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("block.*.attn", ". Did you mean 'blocks.*.attn'?"),
        ("block.0.attn", ". Did you mean 'blocks.*.attn'?"),
        ("blocks.*.attention", ". Did you mean 'blocks.*.attn'?"),
        ("blocks.12.attn", ". Did you mean 'blocks.0.attn' or 'blocks.11.attn'?"),
        ("attn", ". Did you mean 'blocks.*.attn'?"),
        ("attn.proj", ". Did you mean 'blocks.*.attn.proj'?"),
        ("*.atn", ". Did you mean 'blocks.*.attn'?"),
        ("heads", ". Did you mean 'head'?"),
        ("Head", ". Did you mean 'head'?"),
        ("block.*.attn/qkv", ". Did you mean 'blocks.*.attn/qkv'?"),
        ("zzz", ""),
    ],
)
def test_a_pattern_that_matches_no_module_is_named_with_near_ones(pattern, meant):
    with pytest.raises(PolicyError) as caught:
        Rules([("embed", RAW), (pattern, RAW)], default=INT8).check(MODEL)
    first, last = str(caught.value).split("\n")
    assert first.startswith(f"pattern '{pattern}' matches no module of the model")
    assert meant.rstrip("?") in first
    assert bool(meant) == ("Did you mean" in first)
    assert last == LISTED
    assert caught.value.patterns == (pattern,)


def test_every_idle_pattern_is_named():
    with pytest.raises(PolicyError) as caught:
        Rules([("heads", RAW), ("embed", RAW), ("mlp", RAW)]).check(["", "embed", "head"])
    assert str(caught.value) == (
        "pattern 'heads' matches no module of the model. Did you mean 'head'?\n"
        "pattern 'mlp' matches no module of the model.\n"
        "The model has embed, head."
    )


def test_a_model_without_modules_inside():
    with pytest.raises(PolicyError, match=r"'head' matches no module of the model.\nThe model has no modules inside"):
        Rules([("head", RAW)]).check([""])


def test_patterns_that_match_pass_the_check():
    Rules([("blocks.*/qkv", RAW), ("*/loss", RAW), ("blocks.3", RAW), ("h*", RAW)], default=INT8).check(MODEL)
    Rules(default=INT8).check([])


def test_rules_are_added():
    first, second = Rules.parse("a.b : int8"), Rules.parse("a : keep; * : derive")
    assert first + second == Rules.parse("a.b : int8; a : keep; * : derive")
    assert first + Rules() == first
    assert Rules() + second == second
    with pytest.raises(PolicyError, match=r"rule 'a : keep' can never apply: .*'a : int8', the same pattern"):
        _ = Rules.parse("a : int8") + second
    with pytest.raises(PolicyError, match=r"'a.b : int8' can never apply: rule 1 is '\* : derive', which covers"):
        _ = Rules.parse("* : derive") + first
    with pytest.raises(TypeError):
        _ = first + "a : int8"
