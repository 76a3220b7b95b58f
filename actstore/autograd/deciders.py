"""Operators whose backward decides by a saved float, and the part of that float that the decision needs.

A store finds the reader of a tensor in two ways. An operator that saves its own result is the producer of that tensor.
The reader of an input is known where a function of `torch.nn.functional`, or the forward of a module of `torch.nn`,
calls the operator: the hook's caller is then its frame. A direct call in a model (``x.clamp(0)``) is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from sys import _getframe
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.nn import functional

from actstore.autograd.protect import TRANSPARENT
from actstore.codecs import Codec
from actstore.codecs.side import Side

# Nodes that save their result, and pass a gradient where it is above 0.
_BY_RESULT = frozenset(
    {
        "ReluBackward0", "LeakyReluBackward1", "EluBackward1", "CeluBackward1", "RreluWithNoiseBackward1",
        "ThresholdBackward1",
    }
)  # fmt: skip
_MAX_VIEWS = 8  # of one tensor that `_by_result` follows
_UNKNOWN = "an unknown operator"
_PACKAGE = __name__.partition(".")[0] + "."

SIGN = "sign"  # backward needs the sign: zero, positive or negative
EXACT = "exact"  # backward needs all bits

Need = str | Side


def _function(name: str) -> CodeType:
    code: CodeType = getattr(functional, name).__code__
    return code


def _forward(module: Any) -> CodeType:
    code: CodeType = module.forward.__code__
    return code


def _local(name: str) -> Callable[[FrameType], float]:
    return lambda frame: float(frame.f_locals[name])


def _shrink(frame: FrameType) -> Need:
    width = float(frame.f_locals["self"].lambd)
    return Side(-width, width, nan=False, closed=True) if width >= 0 else EXACT


# Keyed by the code that calls the operator. A Side is all that backward reads; its bounds may be in the caller's frame.
READERS: dict[CodeType, Callable[[FrameType], Need]] = {
    _function("hardtanh"): lambda frame: Side(_local("min_val")(frame), _local("max_val")(frame)),
    _function("relu6"): lambda frame: Side(0.0, 6.0),
    _function("leaky_relu"): lambda frame: Side(0.0, inf, nan=False),
    _function("hardsigmoid"): lambda frame: Side(-3.0, 3.0, nan=False),
    _function("threshold"): lambda frame: Side(_local("threshold")(frame), inf),
    _forward(nn.Hardshrink): _shrink,
    _forward(nn.Softshrink): _shrink,
    _function("elu"): lambda frame: SIGN if _local("alpha")(frame) != 1 else "",  # no kink at 0
    **dict.fromkeys(map(_function, ("selu", "l1_loss")), lambda frame: SIGN),
    _forward(nn.PReLU): lambda frame: SIGN,
    **dict.fromkeys(
        map(
            _function,
            (
                "rrelu", "smooth_l1_loss", "huber_loss", "hinge_embedding_loss", "margin_ranking_loss",
                "multi_margin_loss", "multilabel_margin_loss", "soft_margin_loss", "cosine_embedding_loss",
                "triplet_margin_loss", "gaussian_nll_loss", "poisson_nll_loss",
            ),
        ),
        lambda frame: EXACT,
    ),
}  # fmt: skip


def caller() -> FrameType | None:
    """Find the innermost frame outside of this package."""
    frame: FrameType | None = _getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return frame


def keep_decisions(codec: Codec, tensor: Tensor, producer: str) -> tuple[Codec | None, str]:
    """Choose the codec of a lossy payload of `tensor`, the output of `producer`, so that backward decides as in plain.

    Returns
    -------
    Codec : `codec`, one that keeps signs, or a `Side`; None where the tensor must stay exact
    str : the reason; empty where the tensor goes through `codec`
    """
    kept = codec.keeping_signs
    if kept is codec:  # lossless, or its options say it
        return codec, ""
    reader, need = _reader(tensor)
    if isinstance(need, Side):
        return codec.replaced_by(need), f"1 bit an element, all that backward of {reader} reads"
    if need == EXACT:
        return None, f"backward of {reader} compares it"
    decider = reader if need == SIGN else _by_result(tensor, producer)
    if not decider:
        return codec, ""
    return kept, f"{decider} decides by its sign" + ("" if kept else f", which {codec.name} loses")


def _reader(tensor: Tensor) -> tuple[str, Need]:
    """Find the operator that saves `tensor` now, and its need; empty if it is unknown, or if `tensor` is its result."""
    frame = caller()
    find = None if frame is None else READERS.get(frame.f_code)
    if find is None or frame is None or _is_result(tensor):
        return "", ""
    name = frame.f_code.co_name
    return type(frame.f_locals["self"]).__name__ if name == "forward" else name, find(frame)


def _is_result(tensor: Tensor) -> bool:
    """Return whether `tensor` is the result of the operator that saves it; later operators share the payload."""
    node: Any = tensor.grad_fn
    return node is not None and node._sequence_nr() == _get_sequence_nr() - 1


def _by_result(tensor: Tensor, producer: str) -> str:
    """Find the node that decides by the sign of its result, `tensor`; empty where no node does.

    A tensor without a known producer may be the result of any node, and counts as one that a node decides by.
    """
    node: Any = tensor.grad_fn
    for _ in range(_MAX_VIEWS):
        if producer in _BY_RESULT:
            return producer
        if producer not in TRANSPARENT:
            break
        node = node.next_functions[0][0]
        if node is None:
            break
        producer = node.name()
    return _UNKNOWN if producer in ("", "CopySlices") else ""
