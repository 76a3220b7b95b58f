"""Tensors that backward can derive: one cheap operator computes them from other saved tensors.

GELU's backward reads GELU's input. So the store need not hold GELU's output, which the next linear layer saves: GELU
computes it from that input. The same holds for activations, products and normalizations. The same operator on the same
bytes returns the same bytes. On a decoded input it returns a tensor with an error about as large as that input's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _current_graph_task_id
from torch.nn import GroupNorm, LayerNorm, Module, RMSNorm

from actstore.autograd.handles import Kept, Stored, check_version
from actstore.autograd.tracker import SMALL_INDEX, Frame
from actstore.base import cpu_threads
from actstore.base.ledger import Account, Ledger
from actstore.base.spec import Site, Spec
from actstore.codecs import Codec
from actstore.errors import ActstoreError, StateError
from actstore.store.comparison import at_hand
from actstore.store.payload import Payload

MAX_CHAINED_OPERATORS = 4  # that run one after the other for one tensor

Function = Callable[..., Tensor]

_aten = torch.ops.aten


class Norm(NamedTuple):
    """Facts of a normalization that its autograd node does not keep, put into the metadata of that node.

    Attributes
    ----------
    bias : bias of a GroupNorm, with its version then; an alias, because a node must not hold itself
    """

    eps: Any
    bias: Tensor | None
    version: int
    site: Site


NORM = "actstore.norm"  # key in a node's metadata
_NORMS = (LayerNorm.forward, GroupNorm.forward, RMSNorm.forward)


def note_norm(module: Module, output: Tensor, name: str) -> None:
    """Note the options of a normalization that has run in the node of its output, where they are certain."""
    if type(module).forward not in _NORMS or "forward" in module.__dict__ or output.grad_fn is None:
        return
    bias = module._parameters.get("bias") if isinstance(module, GroupNorm) else None
    if isinstance(module, GroupNorm) and "bias" not in module._parameters:  # parametrized: computed in each call
        return
    alias = None if bias is None else bias.detach()
    version = 0 if bias is None else bias._version
    metadata: Any = output.grad_fn.metadata
    metadata[NORM] = Norm(module.__dict__["eps"], alias, version, Site(name, SMALL_INDEX))


class Rule(NamedTuple):
    """Rule to compute the output of one autograd node anew.

    Attributes
    ----------
    inputs : the saved tensors that the output is computed from, as attributes of the node
    optional : how many of them, from the end, may be None
    bind : returns the function of these tensors, for a node
    norm : whether it needs facts of the module: nodes keep neither eps nor the bias of GroupNorm
    """

    inputs: tuple[str, ...]
    optional: int
    bind: Callable[[Any], Function]
    norm: bool = False

    @classmethod
    def of(cls, inputs: str, bind: Callable[[Any], Function], *, optional: int = 0, norm: bool = False) -> Rule:
        return cls(tuple(f"_raw_saved_{name}" for name in inputs.split()), optional, bind, norm)


def _unary(function: Function, *options: str) -> Rule:
    """Return the rule of an operator on one tensor, with options that its node keeps."""
    names = [f"_saved_{name}" for name in options]

    def bind(node: Any) -> Function:
        values = [getattr(node, name) for name in names]
        return (lambda x: function(x, *values)) if values else function

    return Rule.of("self", bind)


def _gelu(node: Any) -> Function:
    return partial(_aten.gelu, approximate=node._saved_approximate)


def _glu(node: Any) -> Function:
    dim: int = node._saved_dim
    return partial(_aten.glu, dim=dim - 2**64 if dim >= 2**63 else dim)  # nodes return -1 as an unsigned number


def _layer_norm(node: Any) -> Function:
    shape, eps = node._saved_normalized_shape, node.metadata[NORM].eps

    def run(x: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        made, _, again = torch.native_layer_norm(x, shape, weight, bias, eps)
        return _proved(made, again, rstd, "LayerNorm", eps)

    return run


def _rms_norm(node: Any) -> Function:
    shape, eps = node._saved_normalized_shape, node.metadata[NORM].eps

    def run(x: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
        made, again = _aten._fused_rms_norm(x, shape, weight, eps)
        return _proved(made, again, rstd, "RMSNorm", eps)

    return run


def _bias_of(node: Any) -> _Pinned | None:
    """Return the bias of a GroupNorm."""
    _, bias, version, site = node.metadata[NORM]
    return None if bias is None else _Pinned.of(bias, version, site)


def _group_norm(node: Any) -> Function:
    eps = node.metadata[NORM].eps
    options = node._saved_N, node._saved_C, node._saved_HxW, node._saved_group, eps
    pinned = _bias_of(node)

    def run(x: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
        made, _, again = torch.native_group_norm(x, weight, pinned and pinned.get(), *options)
        return _proved(made, again, rstd, "GroupNorm", eps)

    return run


def _standardized(x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Normalize `x`, which has an error, by the saved statistics, which have none. Returns float32."""
    made = x.mul(rstd.float()) if mean is None else x.sub(mean.float()).mul_(rstd)  # promoted, without a copy of x
    if weight is not None:
        made.mul_(weight)
    return made if bias is None else made.add_(bias)


def _standardized_groups(node: Any) -> Function:
    groups, pinned = node._saved_group, _bias_of(node)

    def run(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
        ones, bias = [1] * (x.dim() - 2), pinned and pinned.get()
        mean, rstd = (each.view(*each.shape, 1, *ones) for each in (mean, rstd))
        weight, bias = (None if each is None else each.view(1, groups, -1, *ones) for each in (weight, bias))
        return _standardized(x.unflatten(1, (groups, -1)), mean, rstd, weight, bias).flatten(1, 2)

    return run


def _proved(made: Tensor, again: Tensor, saved: Tensor, name: str, eps: float | None) -> Tensor:
    """Return `made` if its reciprocal deviations equal the saved ones, which proves that eps is the same.

    The comparison runs on a CPU only: on an accelerator the host would wait for the device.
    """
    if again.device.type == "cpu" and not torch.equal(_bits(again), _bits(saved)):
        raise StateError(
            f"{name} was run with another eps than the {eps} of its module, so that its output cannot be made again "
            "bit for bit. Write 'keep' or 'raw' in place of 'derive' for the module that reads it."
        )
    return made


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits as integers, so that NaN equals itself."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


_PRODUCT = "MulBackward0"
RULES: dict[str, Rule] = {
    "GeluBackward0": Rule.of("self", _gelu),
    "SiluBackward0": _unary(_aten.silu),
    "MishBackward0": _unary(_aten.mish),
    "HardswishBackward0": _unary(_aten.hardswish),
    "HardtanhBackward0": _unary(_aten.hardtanh, "min_val", "max_val"),
    "LeakyReluBackward0": _unary(_aten.leaky_relu, "negative_slope"),
    "EluBackward0": _unary(_aten.elu, "alpha", "scale", "input_scale"),
    "SoftplusBackward0": _unary(_aten.softplus, "beta", "threshold"),
    "GluBackward0": Rule.of("self", _glu),
    "PowBackward0": _unary(_aten.pow, "exponent"),
    _PRODUCT: Rule.of("self other", lambda node: _aten.mul),
    "NativeLayerNormBackward0": Rule.of("input result2 weight bias", _layer_norm, optional=2, norm=True),
    "FusedRmsNormBackward0": Rule.of("input result1 weight", _rms_norm, optional=1, norm=True),
    "NativeGroupNormBackward0": Rule.of("input result2 weight", _group_norm, optional=1, norm=True),
}


_WITH_ERROR: dict[str, Rule] = {  # in place of those above, where the first input comes back with an error
    "NativeLayerNormBackward0": Rule.of("input result1 result2 weight bias", lambda node: _standardized, optional=2),
    "FusedRmsNormBackward0": Rule.of(
        "input result1 weight",
        lambda node: lambda x, rstd, weight: _standardized(x, None, rstd, weight, None),
        optional=1,
    ),
    "NativeGroupNormBackward0": Rule.of("input result1 result2 weight", _standardized_groups, optional=1, norm=True),
}


class Recipe(NamedTuple):
    """Recipe of a tensor.

    Attributes
    ----------
    inputs : handles of the arguments of `function`
    deep : number of operators in a row that reading all inputs takes
    codec : lossy codec of inputs; None where all of them come back exactly
    """

    function: Function
    inputs: list[Any]
    deep: int
    codec: Codec | None


def is_plain(tensor: Tensor, root: Tensor) -> bool:
    """Return whether `tensor` is `root`, or a view of it that shape, strides and offset alone determine."""
    return (
        type(tensor) is type(root) is Tensor
        and tensor.layout is root.layout is torch.strided
        and tensor.dtype is root.dtype
        and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized or tensor._is_zerotensor())
        and not (tensor.is_conj() or tensor.is_neg() or root.is_conj() or root.is_neg())
        and _current_graph_task_id() == -1
    )


def is_masked(tensor: Tensor) -> bool:
    """Return whether `tensor` is a product with a tensor that requires no gradient, or a view of one."""
    node: Any = (tensor if tensor._base is None else tensor._base).grad_fn
    if node is None or node.name() != _PRODUCT:
        return False
    return node._raw_saved_self.data is None or node._raw_saved_other.data is None


def find_recipe(tensor: Tensor, is_ours: Callable[[Any], bool], codec: Codec | None = None) -> Recipe | None:
    """Return the recipe of an operator's output from what its node saved through a store; None where one is impossible.

    Parameters
    ----------
    is_ours : returns whether an unpack hook is a store's
    codec : a lossy codec: inputs that it encoded will do, where exact ones are not to be had
    """
    node: Any = tensor.grad_fn
    name = node.name()
    rule = RULES.get(name)
    if rule is None or tensor.output_nr or tensor.storage_offset():
        return None
    recipe = _recipe(tensor, node, rule, is_ours, None)
    if recipe is None and codec is not None and not codec.lossless:
        recipe = _recipe(tensor, node, _WITH_ERROR.get(name, rule), is_ours, codec)
    return recipe


def _recipe(
    tensor: Tensor, node: Any, rule: Rule, is_ours: Callable[[Any], bool], codec: Codec | None
) -> Recipe | None:
    if rule.norm:
        norm = node.metadata.get(NORM)
        if norm is None or (norm.bias is not None and norm.bias._version != norm.version):
            return None
    inputs: list[Any] = []
    needed = len(rule.inputs) - rule.optional
    for index, name in enumerate(rule.inputs):
        saved = getattr(node, name)
        handle = saved.data
        if handle is None and index >= needed:
            inputs.append(None)
            continue
        if handle is None:
            saved = _result_saved_by(node, index)
            if saved is None:
                return None
            handle = saved.data
        handle = getattr(handle, "handle", handle)  # of a reader
        if not is_ours(saved.unpack_hook) or not _comes_back(handle, codec):
            return None
        if not (codec or tensor.is_cpu) and rule.norm and isinstance(handle, Stored) and handle.region is not None:
            return None  # it may come back with another alignment, and a GPU's kernel then adds in another order
        inputs.append(handle)
    deep = 1 + max(handle.deep if isinstance(handle, Derived) else 0 for handle in inputs)
    if deep > MAX_CHAINED_OPERATORS:
        return None
    for index, handle in enumerate(inputs):
        if type(handle) is tuple:
            alias, version, frame = handle
            inputs[index] = _Pinned.of(alias, version, Site(frame.place.name, SMALL_INDEX), frame)
    return Recipe(rule.bind(node), inputs, deep, codec)


def _result_saved_by(product: Any, index: int) -> Any:
    """Return operand `index` of a product, as the operator that made it has saved it; None where that has not.

    A product with a tensor without a gradient, such as dropout's mask, does not save its other operand. Softmax and
    ReLU save their results.
    """
    producer, number = product.next_functions[index] if product.name() == _PRODUCT else (None, 0)
    return None if producer is None or number else getattr(producer, "_raw_saved_result", None)


def _comes_back(handle: Any, codec: Codec | None) -> bool:
    """Return whether a saved tensor will be available in backward, as far as is known now.

    codec : lossy codec that may have encoded it; None where it must come back bit for bit
    """
    if isinstance(handle, Stored):
        if handle.alias is not None or handle.any_version:
            return False
        found = (handle.owner or handle).codec
        alike = found.lossless or (codec is not None and found in (codec, codec.keeping_signs))
        return alike and handle.witness._version == handle.version
    if type(handle) is tuple:  # DeepSpeed's ZeRO-3 gathers a weight for its own module only
        return handle[0]._version == handle[1] and not hasattr(handle[0], "ds_id")
    if isinstance(handle, Kept):
        return handle.alias._version == handle.version
    if not isinstance(handle, Derived) or handle.codec not in (None, codec):
        return False
    return handle.witness._version == handle.version


class _Pinned(NamedTuple):
    """A small tensor or a weight, which must have the same memory when it is read, because a weight may get other data.

    Attributes
    ----------
    storage : the identity of its memory
    frame : accounts for a small tensor as long as a handle holds the frame; None for a weight
    """

    alias: Tensor
    version: int
    site: Site
    storage: int
    frame: Frame | None

    @classmethod
    def of(cls, alias: Tensor, version: int, site: Site, frame: Frame | None = None) -> _Pinned:
        return cls(alias, version, site, alias.untyped_storage()._cdata, frame)

    def get(self) -> Tensor:
        if self.alias._version != self.version:
            check_version(self.alias, self.version, self.site)
        storage = self.alias.untyped_storage()
        if storage._cdata != self.storage or (self.alias.numel() and not storage.nbytes()):
            raise StateError(
                f"a weight that {self.site.name or 'the model'} saved has other memory now, or none: it was given new "
                "data, or it is shared out over ranks and gathered for its own module only. A tensor cannot be made "
                "again with it. Write 'keep' or 'raw' in place of 'derive'."
            )
        return self.alias


class Derived:
    """A tensor that an operator computes anew when backward reads it. It holds the handles of the operator's inputs.

    Attributes
    ----------
    codec : lossy codec of payloads that it is computed from; None where it comes back exactly
    """

    __slots__ = (
        "__weakref__", "account", "codec", "deep", "function", "inputs", "ledger", "made", "offset", "shape", "stride",
        "threads", "version", "witness", "working",
    )  # fmt: skip

    def __init__(
        self,
        tensor: Tensor,
        root: Tensor,
        account: Account,
        ledger: Ledger,
        empty: Tensor,
        recipe: Recipe,
        working: Callable[[Account], Callable[[], None]] | None,
    ) -> None:
        self.account = account
        self.ledger = ledger
        self.function, self.inputs, self.deep, self.codec = recipe
        self.working = working  # called when the operator starts; returns a function to call at its end
        self.threads = cpu_threads.number()  # the rounding at the ends of each thread's share depends on it
        self.made = root.shape, root.stride()
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        self.version = tensor._version
        self.witness = witness = tensor.detach()
        witness.data = empty  # keeps the version counter, dtype and device, without the memory
        for handle in self.inputs:
            if isinstance(handle, Stored):
                (handle.owner or handle).add_reader()

    @property
    def spec(self) -> Spec:
        return Spec(tuple(self.shape), self.stride, self.witness.dtype, self.witness.device)

    def get(self) -> Tensor:
        if self.witness._version != self.version:
            check_version(self.witness, self.version, self.account.site, self.spec)
        try:
            inputs = [None if handle is None else handle.get() for handle in self.inputs]
            with ExitStack() as stack:
                if self.working is not None:
                    stack.callback(self.working(self.account))
                if torch.is_grad_enabled():
                    stack.enter_context(torch.no_grad())
                if torch._C._is_any_autocast_enabled():
                    stack.enter_context(torch._C._DisableAutocast())
                if cpu_threads.number() != self.threads:
                    stack.enter_context(cpu_threads.using(self.threads))
                made = self.function(*inputs)
                if self.codec is not None and made.dtype != self.witness.dtype:
                    made = made.to(self.witness.dtype)
        except ActstoreError as error:
            error.add_context(f"while making {self.account.site} ({self.spec}) again")
            raise
        shape, stride = self.made
        if made.shape != shape or made.dtype != self.witness.dtype:
            raise StateError(
                f"{self.account.site} was {self.spec} and is {Spec.of(made)} when it is made again: its operator has "
                "been given other tensors than it saved. Write 'keep' in place of 'derive' for this module."
            )
        if made.stride() != stride:
            made = made.new_empty_strided(shape, stride).copy_(made)
        self.ledger.touch_peak(self.account, made.nbytes, "derivation")
        if self.shape == shape and self.stride == stride:
            return made
        return made.as_strided(self.shape, self.stride, self.offset)

    def peek(self) -> Tensor | None:
        """Return what `get` will return, and move nothing for it; None where a payload has left the device."""
        with ExitStack() as stack:
            here = all(stack.enter_context(at_hand(payload)) for payload in self._payloads())
            return self.get() if here else None

    def _payloads(self) -> Iterator[Payload]:
        for handle in self.inputs:
            if isinstance(handle, Derived):
                yield from handle._payloads()
            elif isinstance(handle, Stored):
                yield handle.owner or handle
