"""Operators in patterns: one by its name, ``@aten.gelu``, or a class of them, ``@sdpa``."""

from __future__ import annotations

from functools import lru_cache

import torch

from actstore.base.operators import PASSING, aten_names
from actstore.errors import PolicyError
from actstore.policy.globs import includes, matcher
from actstore.policy.options import did_you_mean

COLLECTIVE = "collective"
CLASSES: dict[str, tuple[str, ...]] = {
    "activation": (
        "_prelu_kernel", "celu", "elu", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
        "leaky_relu", "log_sigmoid_forward", "mish", "relu", "rrelu_with_noise", "sigmoid", "silu", "softplus",
        "softshrink", "tanh", "threshold",
    ),
    "conv": (
        "_conv_depthwise2d", "_slow_conv2d_forward", "conv_depthwise3d", "conv_tbc", "convolution",
        "convolution_overrideable", "cudnn_convolution*", "miopen_convolution*", "miopen_depthwise_convolution",
        "mkldnn_convolution", "slow_conv*",
    ),
    "matmul": (
        "_addmm_activation", "_grouped_mm", "_scaled_grouped_mm", "_scaled_mm", "addbmm", "addmm", "addmv", "baddbmm",
        "bmm", "dot", "linear", "mkldnn_linear", "mm", "mv", "vdot",
    ),
    "norm": (
        "_batch_norm_no_update", "_batch_norm_with_update*", "_fused_rms_norm", "_native_batch_norm_legit*",
        "cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm", "native_group_norm", "native_layer_norm",
    ),
    "sdpa": ("_cudnn_attention_forward", "_efficient_attention_forward", "_flash_attention_forward",
             "_scaled_dot_product_*"),
    COLLECTIVE: (
        "_c10d_functional.all_gather_into_tensor*", "_c10d_functional.all_reduce*",
        "_c10d_functional.all_to_all_single", "_c10d_functional.broadcast",
        "_c10d_functional.reduce_scatter_tensor*", "_dtensor.shard_dim_alltoall",
        "c10d._allgather_base_", "c10d._reduce_scatter_base_", "c10d.allgather_*", "c10d.allreduce_*",
        "c10d.alltoall_*", "c10d.barrier", "c10d.broadcast_", "c10d.gather_*", "c10d.monitored_barrier_",
        "c10d.recv_*", "c10d.reduce_", "c10d.reduce_scatter_*", "c10d.scatter_", "c10d.send",
    ),
}  # fmt: skip
NAMESPACE = "aten."


def check_operator(word: str, text: str) -> str:
    """Return the word of a pattern that names an operator, without its ``@``.

    Raises
    ------
    PolicyError : an unknown class or operator, or one that makes no tensors of its own
    """
    name = word.removeprefix(NAMESPACE)
    if name == word:
        if word in CLASSES:
            return word
        if "." in word:
            return _of_library(word, text)
        raise _wrong(text, f"'@{word}' is an unknown class of operators{did_you_mean(word, CLASSES)} {_known()}.")
    if set("*?[") & set(name):
        return word
    composite = aten_names().get(name)
    if composite is None:
        raise _wrong(text, f"'@{word}' is an unknown operator{did_you_mean(name, aten_names())} {_known()}.")
    if composite:
        raise _wrong(text, f"'@{word}' is made of other operators, which make its result: name these. {_known()}.")
    if name in PASSING:
        raise _wrong(text, f"'@{word}' passes the values of another operator on: name that one. {_known()}.")
    return word


def _of_library(word: str, text: str) -> str:
    """Return a word that names an operator which another library has registered, or a glob over such names."""
    if set("*?[") & set(word):
        return word
    registered = {full.partition(".")[0].replace("::", ".") for full in torch._C._dispatch_get_all_op_names()}
    if word in registered:
        return word
    space = word.partition(".")[0]
    known = sorted(name for name in registered if name.startswith(f"{space}."))
    if not known:
        raise _wrong(text, f"'@{word}': no library has registered operators as torch.ops.{space}. Import it first.")
    raise _wrong(text, f"'@{word}' is an unknown operator{did_you_mean(word, known)} {_known()}.")


def covers(word: str, operator: str) -> bool:
    """Return whether a word of a pattern covers an operator, such as ``aten.gelu``."""
    return bool(operator) and any(matcher(glob)(operator) for glob in _globs(word))


def includes_all(word: str, other: str) -> bool:
    """Return whether one word provably covers all operators that another one covers."""
    return all(any(includes(glob, inner) for glob in _globs(word)) for inner in _globs(other))


@lru_cache(maxsize=4096)
def _globs(word: str) -> tuple[str, ...]:
    return tuple(name if "." in name else NAMESPACE + name for name in CLASSES.get(word, ())) or (word,)


def _known() -> str:
    classes = ", ".join(f"@{name}" for name in CLASSES)
    return f"The classes are {classes}; one operator goes by its name, such as '@aten.gelu'"


def _wrong(text: str, message: str) -> PolicyError:
    return PolicyError(message, pattern=text)
