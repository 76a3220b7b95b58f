"""Tensors that backward can make again, by one cheap operator, of others that it reads anyway.

GELU's backward reads GELU's input. So the output, which the next linear layer saves, need not be held: it is what GELU
makes of that input. Activations, products and normalisations are like that. The same operator runs again on the same
bytes, and so gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actstore.accuracy.readers import Reader
from actstore.errors import ActstoreError, StateError
from actstore.handles import Kept, Small, Stored, check_version
from actstore.ledger import Account, Ledger
from actstore.modules import NO_NORM, SMALL, Norm
from actstore.spec import Site, Spec

MOST_DEEP = 4  # operators that are run one after the other for one tensor

Function = Callable[..., Tensor]

_aten = torch.ops.aten


class Rule(NamedTuple):
    """How to make the output of one autograd node again.

    Attributes
    ----------
    inputs : the saved tensors that it is made of, as the node's attributes
    optional : how many of them, the last ones, may be None
    bind : the function of these tensors, for a node and what is known of the module that ran
    norm : whether that must be known: no node keeps the eps of a normalisation, or the bias of GroupNorm
    """

    inputs: tuple[str, ...]
    optional: int
    bind: Callable[[Any, Norm], Function]
    norm: bool = False

    @classmethod
    def of(cls, inputs: str, bind: Callable[[Any, Norm], Function], *, optional: int = 0, norm: bool = False) -> Rule:
        return cls(tuple(f"_raw_saved_{name}" for name in inputs.split()), optional, bind, norm)


def _unary(function: Function, *options: str) -> Rule:
    """An operator on one tensor with options that its node keeps."""
    names = [f"_saved_{name}" for name in options]

    def bind(node: Any, _norm: Norm) -> Function:
        values = [getattr(node, name) for name in names]
        return (lambda x: function(x, *values)) if values else function

    return Rule.of("self", bind)


def _gelu(node: Any, _norm: Norm) -> Function:
    return partial(_aten.gelu, approximate=node._saved_approximate)


def _layer_norm(node: Any, norm: Norm) -> Function:
    shape, eps = node._saved_normalized_shape, norm.eps

    def run(x: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        made, _, again = torch.native_layer_norm(x, shape, weight, bias, eps)
        return _proved(made, again, rstd, "LayerNorm", eps)

    return run


def _rms_norm(node: Any, norm: Norm) -> Function:
    shape, eps = node._saved_normalized_shape, norm.eps

    def run(x: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
        made, again = _aten._fused_rms_norm(x, shape, weight, eps)
        return _proved(made, again, rstd, "RMSNorm", eps)

    return run


def _group_norm(node: Any, norm: Norm) -> Function:
    options = node._saved_N, node._saved_C, node._saved_HxW, node._saved_group, node._saved_eps
    bias = norm.bias
    version = 0 if bias is None else bias._version

    def run(x: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
        if bias is not None and bias._version != version:
            check_version(bias, version, norm.site)
        made, _, again = torch.native_group_norm(x, weight, bias, *options)
        return _proved(made, again, rstd, "GroupNorm", node_eps)

    node_eps = options[-1]
    return run


def _proved(made: Tensor, again: Tensor, saved: Tensor, name: str, eps: float | None) -> Tensor:
    """`made`, which depends on eps through the reciprocal deviations alone: the same as those saved, or an error."""
    if not torch.equal(again, saved):
        raise StateError(
            f"{name} was run with another eps than the {eps} of its module, or on memory that is aligned in another "
            "way, so that its output cannot be made again bit for bit; write 'keep' or 'raw' in place of 'derive' for "
            "the module that reads it"
        )
    return made


RULES: dict[str, Rule] = {
    "GeluBackward0": Rule.of("self", _gelu),
    "SiluBackward0": _unary(_aten.silu),
    "MishBackward0": _unary(_aten.mish),
    "HardswishBackward0": _unary(_aten.hardswish),
    "HardtanhBackward0": _unary(_aten.hardtanh, "min_val", "max_val"),
    "LeakyReluBackward0": _unary(_aten.leaky_relu, "negative_slope"),
    "EluBackward0": _unary(_aten.elu, "alpha", "scale", "input_scale"),
    "SoftplusBackward0": _unary(_aten.softplus, "beta", "threshold"),
    "GluBackward0": _unary(_aten.glu, "dim"),
    "PowBackward0": _unary(_aten.pow, "exponent"),
    "MulBackward0": Rule.of("self other", lambda node, norm: _aten.mul),
    "NativeLayerNormBackward0": Rule.of("input result2 weight bias", _layer_norm, optional=2, norm=True),
    "FusedRmsNormBackward0": Rule.of("input result1 weight", _rms_norm, optional=1, norm=True),
    "NativeGroupNormBackward0": Rule.of("input result2 weight", _group_norm, optional=1, norm=True),
}


class Recipe(NamedTuple):
    """A function, the handles of its arguments, and how many operators run one after the other to read them all."""

    function: Function
    inputs: list[Any]
    deep: int


def find_recipe(tensor: Tensor, norm: Norm | None, unpack: Any) -> Recipe | None:
    """How to make the output of an operator again of what its node has saved through a store; None where one cannot.

    Parameters
    ----------
    norm : what is known of the module that gave `tensor`, where that is a normalisation
    unpack : the hook of what a store has saved
    """
    node: Any = tensor.grad_fn
    rule = RULES.get(node.name())
    if rule is None or tensor.output_nr or tensor.storage_offset() or (rule.norm and norm is None):
        return None
    inputs = []
    needed = len(rule.inputs) - rule.optional
    for index, name in enumerate(rule.inputs):
        saved = getattr(node, name)
        handle = saved.data
        if handle is None:
            if index < needed:
                return None
        elif saved.unpack_hook is not unpack or not _comes_back_exactly(handle):
            return None
        inputs.append(handle.handle if isinstance(handle, Reader) else handle)
    deep = 1 + max(handle.deep if isinstance(handle, Derived) else 0 for handle in inputs)
    return Recipe(rule.bind(node, norm or NO_NORM), inputs, deep) if deep <= MOST_DEEP else None


def _comes_back_exactly(handle: Any) -> bool:
    """Whether a saved tensor will be there in backward, bit for bit, whenever it is asked for."""
    if isinstance(handle, Reader):
        handle = handle.handle
    if isinstance(handle, Stored):
        return handle.alias is None and not handle.any_version and (handle.owner or handle).codec.lossless
    if type(handle) is tuple:
        return not hasattr(handle[0], "ds_id")  # DeepSpeed's ZeRO-3 gathers a weight for its own module only
    return isinstance(handle, Kept | Derived)


class Derived:
    """A tensor that is made again when backward reads it. It holds the handles of what it is made of."""

    __slots__ = (
        "__weakref__", "account", "deep", "function", "inputs", "ledger", "made", "offset", "shape", "stride",
        "version", "witness",
    )  # fmt: skip

    def __init__(
        self,
        tensor: Tensor,
        root: Tensor,
        account: Account,
        ledger: Ledger,
        empty: Tensor,
        recipe: Recipe,
    ) -> None:
        self.account = account
        self.ledger = ledger
        self.function, self.inputs, self.deep = recipe
        self.made = root.shape, root.stride()
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        self.version = tensor._version
        self.witness = witness = tensor.detach()
        witness.data = empty  # keeps the version counter, dtype and device, and none of the memory
        for handle in self.inputs:
            if isinstance(handle, Stored) and (berth := (handle.owner or handle).berth) is not None:
                berth.readers += 1

    @property
    def spec(self) -> Spec:
        return Spec(tuple(self.shape), self.stride, self.witness.dtype, self.witness.device)

    def get(self) -> Tensor:
        if self.witness._version != self.version:
            check_version(self.witness, self.version, self.account.site, self.spec)
        try:
            inputs = [None if handle is None else read(handle) for handle in self.inputs]
            with ExitStack() as stack:
                if torch.is_grad_enabled():
                    stack.enter_context(torch.no_grad())
                if torch._C._is_any_autocast_enabled():
                    stack.enter_context(torch._C._DisableAutocast())
                made = self.function(*inputs)
        except ActstoreError as error:
            error.add_context(f"while making {self.account.site} ({self.spec}) again")
            raise
        shape, stride = self.made
        if made.shape != shape or made.dtype != self.witness.dtype:
            raise StateError(
                f"{self.account.site} was {self.spec} and is {Spec.of(made)} when it is made again: its operator has "
                "been given other tensors than it saved; write 'keep' in place of 'derive' for this module"
            )
        if made.stride() != stride:
            made = made.new_empty_strided(shape, stride).copy_(made)
        self.ledger.touch_peak(self.account, made.nbytes)
        if self.shape == shape and self.stride == stride:
            return made
        return made.as_strided(self.shape, self.stride, self.offset)


def read(handle: Any) -> Tensor:
    """What a handle of any kind holds."""
    if type(handle) is tuple:
        small: Small = handle
        alias, version, frame = small
        if alias._version != version:
            check_version(alias, version, Site(frame.place.name, SMALL))
        if alias.numel() and not alias.untyped_storage().nbytes():
            raise StateError(
                f"a weight of {frame.place.name or 'the model'} is not there, and a tensor is to be made again with "
                "it: it is shared out over ranks, and gathered for its own module only; write 'keep' or 'raw' in place "
                "of 'derive'"
            )
        return alias
    tensor: Tensor = handle.get()
    return tensor
