"""Tiles: a module or function runs on slices of its tokens, one after the other.

What the code needs while it runs falls with the number of slices, in forward and in backward. That is right only where
no token reads another one, which the first call checks. Code that returns a value for each token is recomputed slice by
slice. Code that returns sums over tokens, such as a loss, has its gradients computed in forward, after each slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from itertools import repeat
from math import ceil, inf
from sys import maxsize
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import (
    _get_sequence_nr,
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from actstore.base.trees import Form, flatten, unflatten
from actstore.errors import ConfigError, StateError
from actstore.recompute.hooks import eager
from actstore.recompute.running import running
from actstore.recompute.token_rules import ADVICE, MEAN, SUM, Dims, MeanMode, follow, named

DIM = -2  # of the tokens
FEW = 8  # tokens of the runs whose values are compared
AUTO = "auto"  # the number of slices that `number_of` chooses
AUTO_TOKENS = 128  # of all samples together: the least of a slice whose number is chosen
ROUNDING = 4, 1e-5  # units of the dtype's precision, and what to add: by what these may differ, relative to the norm

Run = Callable[[list[Any]], Any]
checking = ContextVar("checking", default=False)  # whether code runs for a check, beside the step
has_values = ContextVar("has_values", default=True)  # False where operators compute nothing


class Slices:
    """Arguments of a call, cut along the dimension that holds the tokens.

    Parameters
    ----------
    leaves : of the arguments; tensors without dimensions, and all that are not tensors, are the same for all slices
    number : of slices, at most
    dim : that holds the tokens, of all inputs and outputs; Parameters are then the same for all slices. None: that
        before the last; of a tensor with one value for each token, the last
    least : tokens of a slice, if there are as many

    Attributes
    ----------
    parts : the leaves of each slice

    Raises
    ------
    StateError : no tensor has tokens, two have other numbers of them, or a tensor is of a subclass
    """

    def __init__(
        self, leaves: Sequence[Any], number: int, region: str, dim: int | None = None, least: int = FEW
    ) -> None:
        whole: Any = () if dim is None else Parameter
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() and not isinstance(leaf, whole)]
        each = max((leaf.shape for leaf in tensors), key=len, default=torch.Size())[:-1]  # of one value for each token
        self.leaves, self.region, self.dim = leaves, region, dim
        self.places: list[int | None] = [None] * len(leaves)
        for i, leaf in enumerate(leaves):
            if any(leaf is tensor for tensor in tensors):
                place = dim if dim is not None else -1 if leaf.shape == each else DIM
                self.places[i] = place + leaf.dim() * (place < 0)
        tokens = [(leaf, place) for leaf, place in self.placed(leaves) if place is not None]
        counts = {leaf.shape[place] if 0 <= place < leaf.dim() else 0 for leaf, place in tokens}
        if len(counts) != 1 or 0 in counts or any(type(leaf) is not Tensor for leaf in tensors):
            found = ", ".join(map(named, tensors)) or "no tensor"
            which = "the dimension before the last" if dim is None else f"dimension {dim}"
            raise StateError(
                f"{region} is given {found}: tiles cut {which}, which must be of one size in all inputs. {ADVICE}."
            )
        (count,) = counts
        self.size = max(least, -(-count // number))
        parts = [repeat(leaf) if place is None else leaf.split(self.size, place) for leaf, place in self.placed(leaves)]
        self.parts = [list(part) for part in zip(*parts, strict=False)]  # as many as the tensors have

    def placed(self, leaves: Sequence[Any]) -> Iterator[tuple[Any, int | None]]:
        """Return pairs of a leaf and its dimension that holds tokens."""
        return zip(leaves, self.places, strict=True)

    def join(self, outputs: Sequence[Any]) -> Any:
        """Return the output of the whole, from those of all slices."""
        if len(outputs) == 1:
            return outputs[0]
        _, form = tree_flatten(outputs[0])
        parts = zip(*map(tree_leaves, outputs), strict=True)
        return tree_unflatten([_cat(each, DIM if self.dim is None else self.dim) for each in parts], form)

    def check(self, run: Run, checked: dict[Any, list[Dims]], *state: object) -> list[Dims]:
        """Check that code treats each token by itself, at its first call with each kind of arguments in each state.

        It runs on the first slice of one sample, and on a few tokens of two, whose values must be those of runs on
        fewer. Returns which dimensions of each output hold tokens, or SUM or MEAN.

        Raises
        ------
        StateError : as for `follow`; or the runs differ by more than rounding
        """
        tensors = [leaf for leaf in self.parts[0] if isinstance(leaf, Tensor)]
        cast = torch.is_autocast_enabled(tensors[0].device.type)
        kind = *state, cast, *((leaf.shape, leaf.dtype) for leaf in tensors)
        if kind not in checked:
            with _beside_the_step():
                checked[kind] = self._check(run)
        return checked[kind]

    def growth(self, run: Run) -> float:
        """Return the bytes of the largest tensor that the code makes of the tokens, relative to its largest argument.

        Raises
        ------
        StateError : as for `check`
        """
        sample = self._samples(1)
        given: int = max(leaf.nbytes for leaf, place in self.placed(sample) if place is not None)
        with _beside_the_step():
            return self._follow(run, sample)[1] / max(1, given)

    def _follow(self, run: Run, sample: list[Any]) -> tuple[list[Dims], int]:
        return follow(run, sample, self.places, DIM if self.dim is None else self.dim, self.region)

    def _check(self, run: Run) -> list[Dims]:
        kinds, _ = self._follow(run, self._samples(1))
        if not has_values.get():
            return kinds
        samples = self._samples(2)
        few = [leaf if place is None else leaf.split(FEW, place)[0] for leaf, place in self.placed(samples)]
        halves = Slices(few, 2, self.region, self.dim, least=1).parts
        whole, *parts = (self._counted(run, each)[0] for each in (few, *halves))
        joined = [sum(each) for each in zip(*parts, strict=True)] if is_sum(kinds) else self.join(parts)
        for one, other in zip(whole, joined, strict=True):
            error, norm = float((one.double() - other.double()).norm()), float(one.double().norm())
            share = error / norm if norm else inf
            precision = torch.finfo(one.dtype).eps if one.is_floating_point() else 0
            if not (error <= (ROUNDING[0] * precision + ROUNDING[1]) * norm or torch.equal(one, other)):
                raise StateError(
                    f"{self.region} returns other values for fewer tokens (by {share:.1e} of their norm): a token "
                    f"reads others, or their number. {ADVICE}."
                )
        return kinds

    def _samples(self, number: int) -> list[Any]:
        """Return the first slice of the first samples, along each dimension before that of the tokens."""
        return [leaf if place is None else leaf[(slice(number),) * place] for leaf, place in self.placed(self.parts[0])]

    def _counted(self, run: Run, leaves: list[Any]) -> tuple[list[Any], TreeSpec, int]:
        """Return outputs in which a mean is a sum, then the number of its terms; and how many outputs there are."""
        mode = MeanMode(self.region)
        with mode:
            outputs, form = tree_flatten(run(leaves))
        return [*outputs, *([] if mode.count is None else [mode.count])], form, len(outputs)

    def add(self, run: Run, kinds: list[Dims]) -> Any:
        """Run code that returns sums over tokens on all slices, and add its outputs and gradients.

        These are added in float32, or float64. A mean is divided by the number of its terms in all slices.

        Raises
        ------
        StateError : several outputs, or one of several elements, require a gradient; the code runs a custom
            autograd.Function, or reads a tensor with a graph beside its arguments
        """
        gradients = _Gradients(self) if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() else None
        sums: list[Tensor] = []
        with _casts_anew(), _without_hooks(), running(None):
            for number, part in enumerate(self.parts):
                part = part if gradients is None else gradients.inputs(part)
                found, form, outputs = self._counted(run, part)
                if gradients is not None:
                    gradients.take(part, found[:outputs], number)
                values = [_wide(value.detach()) for value in found]
                sums = [one + other for one, other in zip(sums, values, strict=True)] if sums else values
                dtypes = [value.dtype for value in found]
                del found
        count = sums.pop() if len(sums) > outputs else None
        divisors = [count if kind == MEAN else None for kind in kinds]
        for i, (value, divisor, dtype) in enumerate(zip(sums, divisors, dtypes, strict=False)):
            sums[i] = (value if divisor is None else value / divisor).to(dtype)
        if gradients is not None and gradients.loss is not None:
            sums[gradients.loss] = gradients.attach(sums[gradients.loss], divisors[gradients.loss])
        return tree_unflatten(sums, form)


def runner(
    forward: Callable[..., Any], whole: Sequence[Any], form: Form, copied: Callable[[Tensor], None] | None = None
) -> Run:
    """Return what runs code on the leaves of a slice, which are contiguous where those of the whole are.

    `copied` is called with those that had to be copied for that.
    """
    dense = [isinstance(leaf, Tensor) and leaf.is_contiguous() for leaf in whole]

    def run(leaves: list[Any]) -> Any:
        given = [leaf.contiguous() if is_dense else leaf for leaf, is_dense in zip(leaves, dense, strict=True)]
        for leaf, own in zip(given, leaves, strict=True):
            if copied is not None and leaf is not own:
                copied(leaf)
        args, kwargs = unflatten(given, form)
        return forward(*args, **kwargs)

    return run


def number_of(
    tiles: int | str, leaves: Sequence[Any], run: Run, region: str, dim: int | None, known: dict[Any, int]
) -> int:
    """Return the number of slices. "auto": as many as make no tensor of a slice larger than the largest argument.

    A slice has 128 tokens or more then.

    Parameters
    ----------
    known : the numbers chosen so far, by shapes and dtypes: a later run cuts as the first one
    """
    if isinstance(tiles, int):
        return tiles
    kind = tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))
    if kind not in known:
        smallest = Slices(leaves, maxsize, region, dim)
        tokens = max(leaf.shape[: place + 1].numel() for leaf, place in smallest.placed(leaves) if place is not None)
        most = tokens // AUTO_TOKENS
        known[kind] = 1 if most < 2 else min(ceil(smallest.growth(run)), most)
    return known[kind]


def is_sum(kinds: list[Dims]) -> bool:
    """Return whether code returns sums over tokens, by what its check has found."""
    return any(kind in (SUM, MEAN) for kind in kinds)


class _Gradients:
    """Gradients of a loss that runs on slices: of its arguments slice by slice, of all others added up."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._begin = _get_sequence_nr()
        self._of_inputs = {
            i: torch.zeros_like(leaf)
            for i, (leaf, place) in enumerate(slices.placed(slices.leaves))
            if place is not None and leaf.requires_grad
        }
        self._of_others: dict[int, tuple[Tensor, Tensor]] = {}  # by identity of the tensor, which is beside it
        self.loss: int | None = None  # its index among the outputs

    def inputs(self, part: list[Any]) -> list[Any]:
        """Return the leaves of a slice, with a graph that begins at them."""
        return [leaf.detach().requires_grad_() if i in self._of_inputs else leaf for i, leaf in enumerate(part)]

    def take(self, part: list[Any], outputs: list[Tensor], number: int) -> None:
        """Compute the gradients of a slice."""
        losses = [i for i, output in enumerate(outputs) if output.requires_grad]
        if not losses:
            return
        if len(losses) > 1 or outputs[losses[0]].numel() != 1:
            raise StateError(
                f"{self._slices.region} returns {', '.join(named(outputs[i]) for i in losses)} with gradients: of sums "
                "over tokens, one number may have them. Return the loss alone, and detach all others."
            )
        (self.loss,) = losses
        read = self._read(outputs[self.loss])
        with _without_own_hooks(read):
            found: Any = torch.autograd.grad(outputs[self.loss], read, allow_unused=True)
        own = {id(part[i]): i for i in self._of_inputs}
        for tensor, gradient in zip(read, found, strict=True):
            if gradient is None:
                continue
            if (i := own.get(id(tensor))) is not None:
                self._of_inputs[i].split(self._slices.size, self._slices.places[i] or 0)[number].copy_(gradient)
            elif id(tensor) in self._of_others:
                self._of_others[id(tensor)][1].add_(gradient)
            else:
                self._of_others[id(tensor)] = tensor, _wide(gradient, copy=True)

    def _read(self, loss: Tensor) -> list[Tensor]:
        """Return the tensors at which the graph of a slice ends."""
        found, seen, nodes = dict[int, Tensor](), set[Any](), [loss.grad_fn]
        while nodes:
            node: Any = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [other for other, _ in node.next_functions]
            tensor = getattr(node, "variable", None)
            why = None
            if tensor is not None:
                found[id(tensor)] = tensor
            elif isinstance(node, BackwardCFunction):
                why = f"runs {type(node).__name__}, a custom autograd.Function, whose backward would run in forward"
            elif node._sequence_nr() < self._begin:
                why = f"reads what {node.name()} belongs to: give it a tensor with a graph as an argument"
            if why is not None:
                raise StateError(f"{self._slices.region} {why}. {ADVICE}.")
        return list(found.values())

    def attach(self, value: Tensor, count: Tensor | None) -> Tensor:
        """Return the loss with a graph that has its gradients."""
        inputs = [self._slices.leaves[i] for i in self._of_inputs]
        others = [tensor for tensor, _ in self._of_others.values()]
        gradients = [*self._of_inputs.values(), *(gradient for _, gradient in self._of_others.values())]
        self._of_inputs, self._of_others = {}, {}
        loss: Tensor = _Given.apply(self._slices.region, value, count, gradients, *inputs, *others)  # type: ignore[no-untyped-call]
        return loss


class _Given(torch.autograd.Function):
    """Function whose gradients are known when it is made: one backward scales and returns them."""

    @staticmethod
    def forward(ctx: Any, region: str, value: Tensor, count: Tensor | None, found: list[Tensor], *to: Tensor) -> Tensor:
        ctx.region, ctx.count, ctx.found = region, count, list(zip(found, (tensor.dtype for tensor in to), strict=True))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise StateError(f"{ctx.region} has no second derivatives. Leave tiles out to use create_graph.")
        found, ctx.found = ctx.found, None
        if found is None:
            raise StateError(
                f"Backward runs through {ctx.region} for the second time: the gradients that its forward computed are "
                "gone. Leave tiles out to use retain_graph."
            )
        factor = _wide(gradient).reshape(())
        if ctx.count is not None:
            factor = factor / ctx.count.where(ctx.count != 0, 1)  # all of them are 0 then
        returned: list[Tensor | None] = [None] * 4
        for needed in ctx.needs_input_grad[4:]:
            own, dtype = found.pop(0)
            scale = own.mul if is_legacy_batchedtensor(gradient) else own.mul_  # of several, by is_grads_batched
            returned.append(scale(factor.to(own.device)).to(dtype) if needed else None)
            del own, scale
        return tuple(returned)


def tile(function: Callable[..., Any] | None = None, /, *, tiles: int | str = AUTO, dim: int = 1) -> Any:
    """Run a function on slices of its tokens, one after the other, in forward and in backward.

    For code outside of modules, such as the last linear layer and the loss together, whose logits then never exist
    whole. It needs no store. Also a decorator: ``@actstore.tile``, ``@actstore.tile(tiles=16)``.

    Parameters
    ----------
    function : takes and returns tensors, also in containers. It treats each token by itself, and returns a value for
        each, or sums over tokens, or the mean of one `cross_entropy` or `nll_loss`. Tensors that it reads beside its
        arguments are parameters, or have no graph
    tiles : number of slices, 1 or more; a slice has eight tokens or more. "auto": as many as make the largest tensor of
        a slice no larger than the largest argument, with 128 tokens or more in each
    dim : dimension that holds the tokens, in all tensors that it takes but parameters and those without dimensions

    Returns
    -------
    Callable : takes the same arguments, and returns the same but for rounding

    Raises
    ------
    ConfigError : `tiles` is not a number of slices, or `dim` not a dimension
    StateError : when called: tensors have other numbers of tokens. When first called with arguments of each shape and
        dtype: an operator may mix tokens (its name and line are in the message), draws random numbers, or writes to
        other tensors; a loss runs a custom autograd.Function. In backward: that of a loss runs twice, or with a graph

    Notes
    -----
    Of a function that returns a value for each token, each slice is a checkpoint. The gradients of a loss are computed
    in forward, slice by slice, and wait for backward: those of its arguments in their dtypes, those of parameters as
    sums in float32. No store sees what it computes. So it goes with one backward, neither with `retain_graph` nor with
    second derivatives. Transforms (`vmap`, `torch.func`) and dual numbers run the function whole.
    """
    if function is None:
        return partial(tile, tiles=tiles, dim=dim)
    if (tiles != AUTO and (type(tiles) is not int or tiles < 1)) or type(dim) is not int:
        raise ConfigError(
            f"tile(tiles={tiles!r}, dim={dim!r}): must be ints, tiles 1 or more, or 'auto'. Write tiles=16, dim=1."
        )
    region = f"{getattr(function, '__qualname__', type(function).__name__)} (tiles={tiles})"
    checked: dict[Any, list[Dims]] = {}
    numbers: dict[Any, int] = {}

    @eager
    @wraps(function, updated=())
    def tiled(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
            return function(*args, **kwargs)
        leaves, form = flatten(args, kwargs)
        run = runner(function, leaves, form)
        slices = Slices(leaves, number_of(tiles, leaves, run, region, dim, numbers), region, dim)
        if len(slices.parts) == 1:
            return run(leaves)
        kinds = slices.check(run, checked)
        if is_sum(kinds):
            return slices.add(run, kinds)
        again = partial(checkpoint, lambda *part: run(list(part)), use_reentrant=False, preserve_rng_state=False)
        return slices.join([again(*part) if torch.is_grad_enabled() else run(part) for part in slices.parts])

    return tiled


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return tensors as one, with its dimensions in the order in which those of the first lie in memory."""
    first, strides = parts[0], parts[0].stride()
    order = sorted(range(first.dim()), key=lambda each: -strides[each])
    joined = torch.cat([part.permute(order) for part in parts], order.index(dim % first.dim()))
    return joined.permute([order.index(each) for each in range(first.dim())])


def _wide(tensor: Tensor, copy: bool = False) -> Tensor:
    """Return a tensor in float32 in place of a narrower dtype."""
    return tensor.to(torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype, copy=copy)


@contextmanager
def _beside_the_step() -> Iterator[None]:
    """Run code for a check: no part of the step, without gradients."""
    token = checking.set(True)
    try:
        with torch.no_grad(), _casts_anew():
            yield
    finally:
        checking.reset(token)


@contextmanager
def _casts_anew() -> Iterator[None]:
    """Make autocast keep no casts: those made without gradients, or of another slice, would be reused later."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _without_own_hooks(tensors: list[Any]) -> Iterator[None]:
    """Take the hooks of tensors away for a while: they run for the gradient of the whole, in backward."""
    hooks = [(tensor._backward_hooks, dict(tensor._backward_hooks)) for tensor in tensors if tensor._backward_hooks]
    for own, _ in hooks:
        own.clear()
    try:
        yield
    finally:
        for own, kept in hooks:
            own.update(kept)


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Take all saved-tensor hooks away for a while, a store's among them: what is saved is read at once."""
    hooks: list[Any] = []
    top: Any = _top_saved_tensors_default_hooks
    while pair := top(True):
        hooks.append(pair)
        _pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            _push_saved_tensors_default_hooks(*pair)
