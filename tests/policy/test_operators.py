"""Operators in patterns."""

import pytest
import torch

from actstore import ActivationStore
from actstore.base.operators import PASSING, aten_names, operator_of_node
from actstore.errors import PolicyError
from actstore.policy import Keep, Rules, parse
from actstore.policy.globs import matcher
from actstore.policy.operators import CLASSES, covers
from actstore.policy.pattern import Pattern


@pytest.mark.parametrize("word", [*CLASSES, "aten.gelu", "aten._scaled_dot_*", "aten.[ab]dd?m"])
def test_text_of_a_pattern_parses_back(word):
    text = f"blocks.*/@{word}"
    pattern = Pattern.parse(text)
    assert pattern == ("blocks.*", "", word)
    assert str(pattern) == text
    policy = parse(f"{text} : raw; * : keep")
    assert parse(str(policy)) == policy == Rules(policy.rules)


@pytest.mark.parametrize(
    ("word", "operators"),
    [
        ("sdpa", ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
                  "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
                  "_flash_attention_forward"]),
        ("matmul", ["mm", "addmm", "bmm", "baddbmm"]),
        ("conv", ["convolution", "cudnn_convolution", "mkldnn_convolution"]),
        ("norm", ["native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm"]),
        ("activation", ["gelu", "relu", "silu", "tanh"]),
        ("aten.gelu", ["gelu"]),
        ("aten.*mm", ["mm", "addmm", "bmm"]),
    ],
)  # fmt: skip
def test_what_a_word_covers(word, operators):
    assert all(covers(word, f"aten.{operator}") for operator in operators)
    assert not covers(word, "aten.cumsum")
    assert not covers(word, "")


def test_what_the_class_of_collectives_covers():
    assert covers("collective", "_c10d_functional.all_reduce")
    assert covers("collective", "c10d.allreduce_")
    assert not covers("collective", "aten.mm")
    assert not covers("aten.*", "c10d.allreduce_")


def test_operators_of_other_libraries_have_their_names():
    assert Pattern.parse("*/@actstore_test_policy.*").operator == "actstore_test_policy.*"
    with pytest.raises(PolicyError, match=r"no library has registered operators as torch\.ops\.nolib. Import it first"):
        Pattern.parse("*/@nolib.attention")
    with pytest.raises(PolicyError, match=r"unknown operator. Did you mean 'prims\.sin'"):
        Pattern.parse("*/@prims.sinn")
    assert covers("prims.sin", "prims.sin")
    assert not covers("prims.*", "aten.sin")


def test_every_operator_of_a_class_exists_and_makes_its_result_itself():
    for kind, names in CLASSES.items():
        for name in names:
            found = [known for known in operators(name) if covers(kind, known)]
            assert found, name
            assert not {f"aten.{passing}" for passing in PASSING}.intersection(found)


def operators(name):
    """The operators of PyTorch that a name of a class covers, with their namespaces."""
    if "." not in name:
        return [f"aten.{known}" for known in aten_names() if covers(f"aten.{name}", f"aten.{known}")]
    if name.startswith("_dtensor."):
        pytest.importorskip("torch.distributed.tensor")
    known = {full.replace("::", ".").partition("(")[0] for full in torch._C._dispatch_get_all_op_names()}
    return [each for each in known if matcher(name)(each)]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_the_collectives_of_pytorch_are_those_of_the_class():
    """What it leaves out: messages of compiled graphs, and what does not communicate."""
    left_out = {
        "_c10d_functional._wrap_tensor_autograd", "_c10d_functional.batch_p2p_ops", "_c10d_functional.irecv",
        "_c10d_functional.isend", "_c10d_functional.wait_tensor", "c10d.check_for_nan",
    }  # fmt: skip
    names = {schema.name.replace("::", ".") for schema in torch._C._jit_get_all_schemas()}
    found = {name for name in names if name.startswith(("_c10d_functional.", "c10d."))}
    uncovered = {name for name in found if not (covers("collective", name) or covers("collective", name[:-1]))}
    assert uncovered == left_out & found


@pytest.mark.parametrize("text", ["*/@collective : keep", "0/@collective : keep; 1 : recompute; * : raw"])
def test_rules_for_collectives_are_for_recomputed_modules(text):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(PolicyError, match=r"holds no such module. Add a rule such as '.* : recompute'") as caught:
        ActivationStore(model, text)
    assert caught.value.pattern == text.partition(" ")[0]
    ActivationStore(model, "*/@collective : keep; 1 : recompute").close()


def test_rules_for_collectives_need_a_model():
    with pytest.raises(PolicyError, match="holds no such module"):
        ActivationStore(policy="*/@collective : keep")


def test_an_operator_restricts_a_rule_to_tensors_that_it_made():
    policy = parse("blocks.*/@sdpa : raw; blocks.*/qkv : int8; blocks.* : expack; */@aten.gelu : derive")
    flash = "aten._scaled_dot_product_flash_attention"
    assert str(policy.decide("blocks.0.attn", "", flash)) == "raw"
    assert str(policy.decide("blocks.0.attn", "qkv", flash)) == "raw"
    assert str(policy.decide("blocks.0.attn", "qkv", "aten.mm")) == "int8"
    assert str(policy.decide("blocks.0.attn", "", "aten.gelu")) == "expack"
    assert str(policy.decide("head", "", "aten.gelu")) == "derive"
    assert policy.decide("head") == policy.decide("head", "", "aten.mm") == Keep()
    assert policy.pattern_of("blocks.0", "", flash) == "blocks.*/@sdpa"
    assert policy.names_operators
    assert not parse("a/b : raw").names_operators


def test_rules_that_may_decide_for_single_tensors():
    policy = parse(
        "blocks.0 : raw; blocks.*/@sdpa : raw; blocks.*/qkv : raw; blocks.* : int8; */@matmul : keep; * : expack"
    )

    def found(name):
        return [str(pattern) for pattern, _ in policy.tensor_rules(name)]

    assert found("blocks.0.attn") == []
    assert found("blocks.1.attn") == ["blocks.*/@sdpa", "blocks.*/qkv"]
    assert found("head") == found("") == ["*/@matmul"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("*/@sdpaa : keep", ["'@sdpaa' is an unknown class of operators. Did you mean 'sdpa'?", "@activation, @conv"]),
        ("*/@ : keep", ["'@' is an unknown class of operators"]),
        ("*/@aten.gelo : keep", ["unknown operator. Did you mean 'gelu'", "@matmul"]),
        ("*/@mine.gelu : keep", ["no library has registered operators as torch.ops.mine"]),
        ("*/@aten.linear : keep", ["made of other operators", "@matmul"]),
        ("*/@aten.scaled_dot_product_attention : keep", ["made of other operators", "@sdpa"]),
        ("*/@aten.view : keep", ["passes the values of another operator on"]),
        ("*/@sdpa : recompute", ["recomputes an operator", "Write '* : recompute'"]),
        ("* : keep; */@sdpa : raw", ["can never apply"]),
        ("a/@matmul : keep; a/@aten.mm : raw", ["can never apply", "put 'a/@aten.mm' before it"]),
        ("a/b/@sdpa : keep", ["is not a pattern", "'blocks.*/@sdpa'"]),
    ],
)
def test_errors_say_what_is_known(text, words):
    with pytest.raises(PolicyError) as caught:
        parse(text)
    for word in words:
        assert word in str(caught.value)
    assert "line 1" in str(caught.value)


@pytest.mark.parametrize(
    ("node", "operator"),
    [
        ("GeluBackward0", "gelu"),
        ("AddmmBackward0", "addmm"),
        ("MulBackward1", "mul"),
        ("SoftmaxBackward0", "_softmax"),
        ("LogSoftmaxBackward0", "_log_softmax"),
        ("MaxPool2DWithIndicesBackward0", "max_pool2d_with_indices"),
        ("ScaledDotProductFlashAttentionForCpuBackward0", "_scaled_dot_product_flash_attention_for_cpu"),
        ("NativeLayerNormBackward0", "native_layer_norm"),
        ("LogSigmoidBackward0", "log_sigmoid_forward"),
        ("LeakyReluBackward1", "leaky_relu"),
        ("UnsafeViewBackward0", "_unsafe_view"),
        ("TBackward0", "t"),
        ("SiluBackwardBackward0", "silu_backward"),
        ("torch::autograd::CopySlices", ""),
        ("torch::autograd::AccumulateGrad", ""),
        ("CubedBackward", ""),
    ],
)
def test_the_operator_of_a_node(node, operator):
    assert operator_of_node(node) == operator
