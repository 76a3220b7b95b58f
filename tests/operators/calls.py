"""Calls from PyTorch's own databases of operators and modules: functions of tensors that can be differentiated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

ALWAYS = (
    "nn.functional.rrelu",  # writes into what it has already saved
    "nn.functional.batch_norm", "nn.functional.conv2d", "nn.functional.dropout", "nn.functional.embedding",
    "nn.functional.gelu", "nn.functional.layer_norm", "nn.functional.max_pool2d",
    "nn.functional.multi_head_attention_forward",
    "nn.functional.scaled_dot_product_attention", "nn.functional.unfold", "as_strided", "cumprod", "einsum", "expand",
    "index_put", "linalg.lu_factor", "linalg.svd", "log_softmax", "masked_scatter", "matmul", "norm", "prod", "unfold",
)  # fmt: skip

# Each run gives other values, also without a store.
UNSTABLE = {"empty_like", "new_empty", "new_empty_strided", "empty", "empty_permuted", "empty_strided"}


class Call(NamedTuple):
    """Something to differentiate.

    Attributes
    ----------
    name : the operator or module, and the number of the sample
    inputs : the tensors that require a gradient
    run : the outputs for `inputs`, or for tensors in place of them
    """

    name: str
    inputs: list[Tensor]
    run: Callable[[Sequence[Tensor]], Any]

    def outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that can be differentiated, with the same random numbers each time."""
        torch.manual_seed(0)
        return [t for t in tree_leaves(self.run(inputs)) if isinstance(t, Tensor) and t.requires_grad]


def operators(dtype: torch.dtype, *, every: int = 1, only: Sequence[str] = ()) -> Iterator[Any]:
    """Operators that can be differentiated: those named `only`, or the fixed list and one of `every` others."""
    from torch.testing._internal.common_methods_invocations import op_db

    able = sorted((op for op in op_db if op.supports_autograd and op.name not in UNSTABLE), key=lambda op: op.full_name)
    for i, op in enumerate(able):
        if dtype not in op.supported_backward_dtypes("cpu"):
            continue
        if op.name in only if only else (i % every == 0 or op.name in ALWAYS):
            yield op


def samples(op: Any, dtype: torch.dtype, limit: int | None, variant: str = "") -> Iterator[Call]:
    """The first `limit` calls of an operator; `variant` is "in place", "not contiguous", "lazy" or none."""
    function = op
    if variant == "in place":
        function = op.inplace_variant
        if function is None or not op.supports_inplace_autograd:
            return
    for i, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=True)):
        if i == limit:
            break
        if variant == "in place" and (sample.broadcasts_input or not isinstance(sample.input, Tensor)):
            continue
        if variant == "not contiguous":
            leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
            if any(isinstance(leaf, Tensor) and leaf.layout is not torch.strided for leaf in leaves):
                continue
            sample = sample.noncontiguous()
        call = sampled(f"{op.full_name}, sample {i}", function, sample, in_place=variant == "in place")
        yield _lazily(call) if variant == "lazy" else call


def sampled(name: str, function: Callable[..., Any], sample: Any, *, in_place: bool) -> Call:
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def run(inputs: Sequence[Tensor]) -> Any:
        replaced = list(leaves)
        for place, tensor in zip(places, inputs, strict=True):
            replaced[place] = tensor
        first, args, kwargs = tree_unflatten(replaced, spec)
        if in_place:
            first = first.clone()
        return sample.output_process_fn_grad(function(first, *args, **kwargs))

    return Call(name, [leaves[i] for i in places], run)


def _lazily(call: Call) -> Call:
    """The same of inputs whose negation, and conjugation where they are complex, is a bit of theirs."""

    def lazy(tensor: Tensor) -> Tensor:
        tensor = torch._neg_view(tensor.neg())
        return torch.conj_physical(tensor).conj() if tensor.is_complex() else tensor

    return call._replace(run=lambda inputs: call.run([lazy(t) for t in inputs]))


class ModuleCall(NamedTuple):
    """A module, a call of it, which leaves its buffers as they were before, and what the database knows of it."""

    module: nn.Module
    call: Call
    info: Any


def module_calls(
    dtype: torch.dtype, limit: int | None, *, contiguous: bool = True, only: Sequence[str] = ()
) -> Iterator[ModuleCall]:
    """The first `limit` calls of each module of the database, or of those named `only`, in training and evaluation."""
    from torch.testing._internal.common_modules import module_db

    for info in sorted(module_db, key=lambda info: info.name):
        if dtype not in info.supported_dtypes("cpu") or (only and info.name.rpartition(".")[2] not in only):
            continue
        for training in (True, False):
            torch.manual_seed(0)
            made = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
            for i, sample in enumerate(made):
                if i == limit:
                    break
                if sample.forward_input is None:
                    continue
                torch.manual_seed(0)
                build = sample.constructor_input
                module = info.module_cls(*build.args, **build.kwargs).to(dtype).train(training)
                args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
                if info.is_lazy:
                    module(*args, **kwargs)
                if not contiguous:
                    args, kwargs = tree_map(_spread, (args, kwargs))
                mode = "training" if training else "evaluation"
                yield ModuleCall(module, _called(f"{info.name}, sample {i}, {mode}", module, args, kwargs), info)


def _called(name: str, module: nn.Module, args: Any, kwargs: Any) -> Call:
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def run(_: Sequence[Tensor]) -> Any:
        with torch.no_grad():
            for key, buffer in module.named_buffers():
                buffer.copy_(buffers[key])
        return module(*args, **kwargs)

    return Call(name, [*leaves, *(p for p in module.parameters() if p.requires_grad)], run)


def _spread(leaf: Any) -> Any:
    """The same values, with every other element of the memory between them. CTCLoss takes contiguous integers only."""
    if not isinstance(leaf, Tensor) or leaf.dim() == 0 or not leaf.is_floating_point():
        return leaf
    wide = torch.empty(*leaf.shape, 2, dtype=leaf.dtype)
    spread = wide[..., 1].copy_(leaf.detach())
    return spread.requires_grad_(leaf.requires_grad)
