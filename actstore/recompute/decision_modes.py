"""Dispatch modes that see each operator of a region, so that later runs, on inexact inputs, decide as the first run.

In the first run a mode records the choices of each operator that decides: bits, indices, counts. In each later run
another mode returns them in the same order. Values and gradients follow the new inputs; the choices do not. An operator
such as leaky ReLU, whose backward reads its input, gets its input moved to the side that the first run saw. The move is
shorter than the error of that input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _StopRecomputationError

from actstore.base.checkpoints import innermost_pack
from actstore.base.compiler import is_traced
from actstore.base.layout import layout_of
from actstore.base.redispatch import OperatorMode, redispatch
from actstore.errors import StateError
from actstore.model.snapshot import AS_IT_IS
from actstore.recompute.decisions import (
    Copy,
    Decision,
    Decisions,
    Packed,
    SharedGate,
    choice_of,
    gate_of,
    let_pass,
    shape_text,
)
from actstore.recompute.operators import (
    DISCRETE,
    ROUTES,
    DecisionKind,
    base_name,
    give_peak,
    index_bound,
    kind_of,
    peak_of,
    points_of,
    routes,
    unique_elements,
    values_at,
)

_BITS = {4: 2, 16: 4, 256: 8}  # bits of a code, by the largest number of places
_JOINED = {2: torch.int32, 4: torch.int16, 8: torch.uint8}  # by bits: the codes that one byte holds, each in a byte


class Windows(NamedTuple):
    """Places that the windows of one operator call read.

    Attributes
    ----------
    starts : first places of the windows in each dimension, in elements; negative in padding
    steps : distances from there to all places of a window, in each dimension
    sizes : sizes of the input, in each dimension
    """

    starts: tuple[Tensor, ...]
    steps: tuple[Tensor, ...]
    sizes: tuple[int, ...]

    @property
    def places(self) -> int:
        """Number of places in one window."""
        return prod(map(len, self.steps))

    def first(self) -> Tensor:
        """Return the index of each window's first place, in the shape of the windows."""
        return self._indices(self.starts)

    def beyond(self) -> Tensor:
        """Return the distance of each place of a window from its first, as a difference of indices."""
        return self._indices(self.steps).flatten()

    def _indices(self, places: tuple[Tensor, ...]) -> Tensor:
        result = places[0]
        for size, more in zip(self.sizes[1:], places[1:], strict=True):
            result = result.unsqueeze(-1) * size + more
        return result


class Places(NamedTuple):
    """Indices of the largest elements of windows, as numbers of places in them."""

    codes: Tensor
    bits: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    windows: Windows

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.codes.nbytes

    def read(self) -> Tensor:
        """Return the indices."""
        shifts = torch.arange(0, 8, self.bits)
        beyond = self.windows.beyond()
        known = torch.arange(256).unsqueeze(1) >> shifts & ((1 << self.bits) - 1)  # the places of each byte
        table = beyond[known.clamp_max_(len(beyond) - 1)].to(self.codes.device)
        found = table.index_select(0, self.codes.int()).flatten()
        return found.as_strided(self.shape, self.stride).add_(self.windows.first().to(found.device))


def places_of(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], indices: Tensor) -> Places | None:
    """Return indices of max pooling as places; None where the windows are unknown."""
    windows = None if kwargs or type(indices) is not Tensor else _windows_of(base_name(operator), args, indices)
    if windows is None or not layout_of(tuple(indices.shape), indices.stride()).dense:
        return None
    bits = next((bits for most, bits in _BITS.items() if windows.places <= most), None)
    if bits is None or not indices.numel():
        return None
    beyond = windows.beyond()
    codes = torch.zeros(int(beyond[-1]) + 1, dtype=torch.uint8)
    codes[beyond] = torch.arange(len(beyond), dtype=torch.uint8)
    found = torch.empty_strided(indices.shape, indices.stride(), dtype=torch.int64, device=indices.device)
    torch.sub(indices, windows.first().to(indices.device), out=found)
    flat = codes.to(indices.device).index_select(0, found.as_strided((found.numel(),), (1,)))
    several = torch.nn.functional.pad(flat, (0, -len(flat) % (8 // bits))).view(_JOINED[bits])
    packed = several.clone()
    for i in range(1, 8 // bits):  # the i-th byte's code goes beside the first one's
        packed |= several >> i * (8 - bits)
    packed = packed.to(torch.uint8)
    return Places(packed, bits, tuple(indices.shape), indices.stride(), windows)


def _windows_of(name: str, args: Sequence[Any], indices: Tensor) -> Windows | None:
    dims = 3 if "3d" in name else 2
    sizes, counts = tuple(args[0].shape[-dims:]), indices.shape[-dims:]
    starts, steps = [], []
    if name.startswith("adaptive"):
        for size, count in zip(sizes, counts, strict=True):
            begin = torch.arange(count) * size // count
            end = -(-(torch.arange(count) + 1) * size // count)
            starts.append(begin)
            steps.append(torch.arange(int((end - begin).max())))
    elif name.startswith("max_pool"):
        kernel, stride, padding, dilation = (
            _each(args[i] if len(args) > i else (), default, dims) for i, default in ((1, 1), (2, 0), (3, 0), (4, 1))
        )
        for k, s, p, d, count in zip(kernel, stride, padding, dilation, counts, strict=True):
            starts.append(torch.arange(count) * (s or k) - p)
            steps.append(torch.arange(k) * d)
    else:
        return None  # windows are random
    return Windows(tuple(starts), tuple(steps), sizes)


def _each(values: Sequence[int], default: int, dims: int) -> Sequence[int]:
    """Return one number for each dimension."""
    if not values:
        return (default,) * dims
    return tuple(values) * dims if len(values) == 1 else values


class DecisionMode(OperatorMode):
    """Mode that sees each operator of a run. Under it, compiled parts run uncompiled: kernels would hide operators."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._decisions = decisions
        self._kept = decisions.kept
        self.paused = False  # while a part runs whose decisions are not the region's

    @property
    def count(self) -> int:
        """Number of decisions that have been kept."""
        return len(self._kept)

    @property
    def routing(self) -> bool:
        """True where only functions that route count."""
        return self._decisions.routing

    def passes(self, operator: Any) -> bool:
        """Return whether an operator runs as without the mode."""
        return self.paused or (self.routing and not routes(operator))

    def around(self, *, whole: bool) -> AbstractContextManager[Any]:
        """Return the context in which the mode sees what it is for, or the `whole` region."""
        return Routing(self) if self.routing and not whole else self


class Routing(TorchFunctionMode):
    """Mode that runs functions that route below a mode of decisions, and all others as they are.

    A dispatch mode around a whole region would let PyTorch compose some operators in another way.

    Parameters
    ----------
    mode : the mode of decisions
    """

    def __init__(self, mode: DecisionMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in ROUTES:
            return func(*args, **(kwargs or {}))
        with self.mode:
            return func(*args, **(kwargs or {}))


def modes_paused() -> AbstractContextManager[None]:
    """Return a context to run a region again while regions run: its operators belong to none of these."""
    return _modes_paused() if _len_torch_dispatch_stack() or _len_torch_function_stack() else AS_IT_IS


@contextmanager
def _modes_paused() -> Iterator[None]:
    found = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, DecisionMode)]
    found += [each.mode for each in _get_current_function_mode_stack() if isinstance(each, Routing)]
    paused = [mode for mode in found if not mode.paused]
    for mode in paused:
        mode.paused = True
    try:
        yield
    finally:
        for mode in paused:
            mode.paused = False


def is_choice(result: Any) -> bool:
    """Return whether a result is discrete: a tensor of bools or integers, or a Python number."""
    if isinstance(result, Tensor):
        return result.dtype in DISCRETE
    return isinstance(result, bool | int | float)


def has_floats(args: Sequence[Any]) -> bool:
    """Return whether the first argument is a tensor of real floats."""
    return bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()


def takes_floats(args: Iterable[Any]) -> bool:
    """Return whether an argument, or one in a list, is a tensor of floats."""
    for value in args:
        if isinstance(value, Tensor):
            if value.is_floating_point() or value.is_complex():
                return True
        elif isinstance(value, list | tuple) and takes_floats(value):
            return True
    return False


def shape_of(args: Iterable[Any]) -> tuple[int, ...]:
    """Return the shape of the first tensor, and () without a tensor."""
    return next((tuple(value.shape) for value in args if isinstance(value, Tensor)), ())


_CHECKPOINT = "torch.utils.checkpoint"


class Recording(DecisionMode):
    """Mode of a first run, which records what operators decide."""

    def call(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.passes(operator):
            return redispatch(operator, args, kwargs)
        kind = kind_of(operator)
        if kind is DecisionKind.RESULT:
            result = redispatch(operator, args, kwargs)
            if is_choice(result) and takes_floats((*args, *kwargs.values())) and not is_traced():
                self._keep(operator, args, [choice_of(result, index_bound(operator, args, kwargs))])
            return result
        if kind is DecisionKind.NEVER or not has_floats(args) or is_traced():
            return redispatch(operator, args, kwargs)
        x = args[0]
        if kind is DecisionKind.RELU:
            result = redispatch(operator, args, kwargs)
            if x.requires_grad:
                choice = gate_of(result)
                if isinstance(choice, Packed):  # ReLU in place increments the version after this call has returned
                    version = result._version + operator._schema.is_mutable
                    self._decisions.results.append((len(self._kept), ref(result), version))
                self._keep(operator, args, [choice])
            return result
        if kind is DecisionKind.SIDE:
            points = points_of(operator, args, kwargs)
            if points:
                self._keep(operator, args, [choice_of(point.is_below(x)) for point in points])
            return redispatch(operator, args, kwargs)
        result = redispatch(operator, args, kwargs)
        if kind is DecisionKind.PEAK:
            if x.requires_grad:
                self._keep(operator, args, [choice_of(x == peak_of(operator, args, result))])
        elif kind is DecisionKind.INDEX:
            places = places_of(operator, args, kwargs, result[1]) if "pool" in operator._schema.name else None
            self._keep(operator, args, [places or choice_of(result[1], index_bound(operator, args, kwargs))])
        elif kind is DecisionKind.DRAW:
            self._keep(operator, args, [choice_of(result != 0)])
        else:
            bound = index_bound(operator, args, kwargs)
            results = result if isinstance(result, tuple) else (result,)
            self._keep(operator, args, [choice_of(part, bound) for part in results])
        return result

    def _keep(self, operator: Any, args: Sequence[Any], choices: Iterable[Any]) -> None:
        if getattr(innermost_pack(), "__module__", "") == _CHECKPOINT:
            self._decisions.anew = "checkpoints of the model's own"
        self._kept.append(Decision(base_name(operator), shape_of(args), tuple(choices)))


_PLAIN = {Tensor, Parameter}
_DETACH = torch.ops.aten.detach.default


class Repeating(DecisionMode):
    """Mode of a later run, which repeats the decisions of the first run.

    Attributes
    ----------
    has_all : whether autograd has saved all that backward reads: the run ends at the next operator, its input moved
    saved : tensors that autograd has saved since the last operator
    """

    def __init__(self, decisions: Decisions, fixed: set[int]) -> None:
        super().__init__(decisions)
        self._region = decisions.region
        self._fixed = fixed
        self._next = 0
        self.has_all = False
        self.saved: list[Tensor] = []

    def call(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.passes(operator):
            return redispatch(operator, args, kwargs)
        if operator is _DETACH:  # of saved-tensor hooks
            return redispatch(operator, args, kwargs)
        kind = kind_of(operator)
        if kind is DecisionKind.RESULT:
            self._end()
            self.saved.clear()
            result = redispatch(operator, args, kwargs)
            if is_choice(result) and takes_floats((*args, *kwargs.values())) and not is_traced():
                return _give(operator, result, self._take(operator, args)[0])
            return result
        try:
            if kind is DecisionKind.NEVER or not has_floats(args) or is_traced():
                self._end()
                return redispatch(operator, args, kwargs)
            return self._repeat(kind, operator, args, kwargs)
        finally:
            self.saved.clear()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self.saved.clear()

    def skip(self, decisions: int) -> None:
        """Note that an operator does not run again, which has made some decisions."""
        self._end()
        self.saved.clear()
        self._next += decisions

    def _end(self) -> None:
        """End the run if backward needs nothing more of it."""
        if self.has_all:
            raise _StopRecomputationError

    def _repeat(self, kind: DecisionKind, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if kind is DecisionKind.RELU:
            return self._let_pass(operator, args, kwargs)
        if kind is DecisionKind.SIDE:
            return self._on_side(operator, args, kwargs)
        x = args[0]
        if kind is DecisionKind.PEAK:
            if not x.requires_grad:
                self._end()
                return redispatch(operator, args, kwargs)
            (is_peak,) = self._take(operator, args)
            moved = give_peak(operator, x, is_peak, peak_of(operator, args, redispatch(operator, args, kwargs)))
            self._write(x, moved)
            self._end()
            return redispatch(operator, (moved, *args[1:]), kwargs)
        self._end()
        if kind is DecisionKind.INDEX:
            (indices,) = self._take(operator, args)
            values = values_at(operator, args, kwargs, indices)
            if not operator._schema.is_mutable:
                return values, indices
            return tuple(
                _give(operator, *pair)
                for pair in zip(redispatch(operator, args, kwargs), (values, indices), strict=True)
            )
        choices = self._take(operator, args)
        if kind is DecisionKind.DRAW:
            result = redispatch(operator, args, kwargs)  # advances the generator for later draws
            return _give(operator, result, choices[0].to(result.dtype))
        if kind is DecisionKind.WHOLE and torch.Tag.nondeterministic_seeded in operator.tags:
            redispatch(operator, args, kwargs)
        return choices[0] if len(choices) == 1 else tuple(choices)

    def _let_pass(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if not x.requires_grad:
            self._end()
            return redispatch(operator, args, kwargs)
        (choice,) = self._next_decision(operator, args).choices
        self._end()
        return let_pass(
            x, choice.choice() if isinstance(choice, SharedGate) else choice, in_place=operator._schema.is_mutable
        )

    def _on_side(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        points = points_of(operator, args, kwargs)
        if not points:
            self._end()
            return redispatch(operator, args, kwargs)
        moved = x
        for point, below in zip(points, self._take(operator, args), strict=True):
            moved = point.move(moved, below)
        self._write(x, moved)
        if operator._schema.name.endswith("_"):  # in place
            x.copy_(moved)
            for tensor in self.saved:  # the saved copy of the input, which the operator overwrites
                if tensor.shape == x.shape and tensor.dtype is x.dtype:
                    self._write(tensor, moved)
            moved = x
        self._end()
        return redispatch(operator, (moved, *args[1:]), kwargs)

    def _write(self, x: Tensor, moved: Tensor) -> None:
        """Write the moved values to the saved tensors of `x`, unless `x` came back exactly."""
        if type(x) not in _PLAIN or x.untyped_storage()._cdata in self._fixed:
            return
        there = unique_elements(x)
        if there is None:
            return
        for dim, length in enumerate(there.shape):
            moved = moved.narrow(dim, 0, length)
        there.copy_(moved)

    def _take(self, operator: Any, args: Sequence[Any]) -> list[Any]:
        """Return the choices of the next decision, which must be one of this operator."""
        choices = self._next_decision(operator, args).choices
        return [choice.read() if isinstance(choice, Packed | Copy | Places) else choice for choice in choices]

    def _next_decision(self, operator: Any, args: Sequence[Any]) -> Decision:
        name, shape = base_name(operator), shape_of(args)
        kept = self._kept[self._next] if self._next < len(self._kept) else None
        if kept is None or kept.operator != name or kept.shape != shape:
            expected = "no further decision" if kept is None else f"{kept.operator} of {shape_text(kept.shape)}"
            raise StateError(
                f"The second run of {self._region} goes another way than its first: its decision {self._next + 1} is "
                f"{name} of {shape_text(shape)}, and was {expected}.\n"
                "Its decisions are kept and repeated, so something else has changed since: a Python value, a global "
                "variable, or a generator of random numbers that no module and no argument holds.\n"
                "Give that to the module as an argument, or let it run once: `keep` or a codec in place of recompute.",
                operator=name,
                decision=self._next,
            )
        self._next += 1
        return kept


def _give(operator: Any, result: Any, choice: Any) -> Any:
    """Return a choice in place of a result, written to the result's memory where the caller owns that."""
    if operator._schema.is_mutable and isinstance(result, Tensor):
        return result.copy_(choice)
    return choice
