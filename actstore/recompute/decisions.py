"""Decisions of a recomputed region: its second run, on inputs that come back with an error, repeats those of its first.

In the first run a dispatch mode keeps what each operator that decides has chosen: bits, indices, counts. In each later
run another mode gives it back in the same order. Values and gradients follow the new inputs; the choices do not.

An operator such as leaky ReLU, whose backward looks at its input, gets its input moved to the side on which the first
run saw it: less far than that input has come back wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _get_dispatch_mode
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _StopRecomputationError

from actstore.base.checkpoints import innermost_pack
from actstore.base.layout import layout_of
from actstore.codecs import Bit1
from actstore.errors import StateError
from actstore.recompute.operators import (
    DISCRETE,
    Kind,
    base_name,
    give_peak,
    index_bound,
    kind_of,
    peak_of,
    points_of,
    unique_elements,
    values_at,
)

if TYPE_CHECKING:
    from actstore.base.ledger import Account, Ledger
    from actstore.base.reaper import Last

_BITS = Bit1()
_PLAIN = {Tensor, Parameter}
_PACKED_NUMEL = 512  # smaller masks wait as they are
_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
_CHECKPOINT = "torch.utils.checkpoint"
_NOTE = "decisions of "
_DETACH = torch.ops.aten.detach.default


class Packed(NamedTuple):
    """Bools at one bit an element."""

    bits: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def read(self) -> Tensor:
        mask = torch.empty_strided(self.shape, self.stride, dtype=torch.bool, device=self.bits.device)
        _BITS.decode(self.bits, mask)
        return mask


class Copy(NamedTuple):
    """Values as they were, in the narrowest dtype that holds them."""

    values: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def read(self) -> Tensor:
        return self.values.clone() if self.values.dtype is self.dtype else self.values.to(self.dtype)


Choice = Packed | Copy


class Decision(NamedTuple):
    """Decision of one call of an operator.

    Attributes
    ----------
    operator : its name
    shape : of its first tensor
    choices : what it has chosen: tensors, or one Python number
    """

    operator: str
    shape: tuple[int, ...]
    choices: tuple[Any, ...]


class Decisions:
    """Decisions of one call of a region, in their order.

    Parameters
    ----------
    region : name of the module and its policy, for messages
    anew : parts of it whose decisions no mode sees; empty for none

    Attributes
    ----------
    kept : in their order
    nbytes : of what is kept
    """

    __slots__ = ("_held", "anew", "kept", "nbytes", "region")

    def __init__(self, region: str, anew: str = "") -> None:
        self.region = region
        self.anew = anew
        self.kept: list[Decision] = []
        self.nbytes = 0
        self._held: Last | None = None

    def recording(self) -> Recording:
        """Return the mode of the first run."""
        return Recording(self)

    def repeating(self, fixed: set[int]) -> Repeating:
        """Return the mode of a later run; storages that are `fixed` are not written to."""
        return Repeating(self, fixed)

    def ended(self, ledger: Ledger, account: Account) -> None:
        """Book what is kept as held, for as long as this lives."""
        self.nbytes = sum(getattr(choice, "nbytes", 0) for decision in self.kept for choice in decision.choices)
        notes = []
        if self.kept:
            self._held = ledger.hold(account, 0, self.nbytes, self.nbytes)
            names = ", ".join(dict.fromkeys(decision.operator for decision in self.kept))
            notes.append(f"{_NOTE}{names} keep {self.nbytes:,} bytes")
        if self.anew:
            notes.append(f"{_NOTE}{self.anew} are made anew")
        if notes:
            earlier = account.note.partition(_NOTE)[0].rstrip("; ")  # the rest is of an earlier call
            account.note = "; ".join([earlier, *notes] if earlier else notes)


class _Mode(TorchDispatchMode):
    """Mode that sees each operator of a run."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled parts compiled."""
        return True

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._decisions = decisions
        self._kept = decisions.kept


class Recording(_Mode):
    """Mode of a first run: keeps what operators decide."""

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(operator)
        if kind is Kind.RESULT:
            result = operator(*args, **kwargs)
            if _is_choice(result) and _takes_floats((*args, *kwargs.values())) and not _is_traced():
                self._keep(operator, args, [_choice_of(result, index_bound(operator, args, kwargs))])
            return result
        if kind is Kind.NEVER or not _has_floats(args) or _is_traced():
            return operator(*args, **kwargs)
        x = args[0]
        if kind is Kind.RELU:
            result = operator(*args, **kwargs)
            if x.requires_grad:
                self._keep(operator, args, [_choice_of(result.bool())])
            return result
        if kind is Kind.SIDE:
            points = points_of(operator, args, kwargs)
            if points:
                self._keep(operator, args, [_choice_of(point.is_below(x)) for point in points])
            return operator(*args, **kwargs)
        result = operator(*args, **kwargs)
        if kind is Kind.PEAK:
            if x.requires_grad:
                self._keep(operator, args, [_choice_of(x == peak_of(operator, args, result))])
        elif kind is Kind.INDEX:
            self._keep(operator, args, [_choice_of(result[1], index_bound(operator, args, kwargs))])
        elif kind is Kind.DRAW:
            self._keep(operator, args, [_choice_of(result != 0)])
        else:
            bound = index_bound(operator, args, kwargs)
            results = result if isinstance(result, tuple) else (result,)
            self._keep(operator, args, [_choice_of(part, bound) for part in results])
        return result

    def _keep(self, operator: Any, args: Sequence[Any], choices: Iterable[Any]) -> None:
        if getattr(innermost_pack(), "__module__", "") == _CHECKPOINT:
            self._decisions.anew = "checkpoints of the model's own"
        self._kept.append(Decision(base_name(operator), _shape_of(args), tuple(choices)))


class Repeating(_Mode):
    """Mode of a later run: gives back what the first one has decided.

    Attributes
    ----------
    has_all : whether all is saved that backward reads: the run ends at its next operator, once its input is moved
    saved : what autograd has saved since the last operator
    """

    def __init__(self, decisions: Decisions, fixed: set[int]) -> None:
        super().__init__(decisions)
        self._region = decisions.region
        self._fixed = fixed
        self._next = 0
        self.has_all = False
        self.saved: list[Tensor] = []

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operator is _DETACH:  # by hooks
            return operator(*args, **kwargs)
        kind = kind_of(operator)
        try:
            if kind is Kind.NEVER or not (kind is Kind.RESULT or _has_floats(args)) or _is_traced():
                self._end()
                return operator(*args, **kwargs)
            return self._repeat(kind, operator, args, kwargs)
        finally:
            self.saved.clear()

    def _end(self) -> None:
        """End the run here if it needs no more."""
        if self.has_all:
            raise _StopRecomputationError

    def _repeat(self, kind: Kind, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if kind is Kind.RELU or kind is Kind.SIDE:
            return self._on_side(kind, operator, args, kwargs)
        x: Any = args[0] if args else None
        if kind is Kind.PEAK:
            if not x.requires_grad:
                self._end()
                return operator(*args, **kwargs)
            (is_peak,) = self._take(operator, args)
            moved = give_peak(operator, x, is_peak, peak_of(operator, args, operator(*args, **kwargs)))
            self._write(x, moved)
            self._end()
            return operator(moved, *args[1:], **kwargs)
        self._end()
        if kind is Kind.RESULT:
            result = operator(*args, **kwargs)
            if not (_is_choice(result) and _takes_floats((*args, *kwargs.values()))):
                return result
            return _give(operator, result, self._take(operator, args)[0])
        if kind is Kind.INDEX:
            (indices,) = self._take(operator, args)
            values = values_at(operator, args, kwargs, indices)
            if not operator._schema.is_mutable:
                return values, indices
            return tuple(
                _give(operator, *pair) for pair in zip(operator(*args, **kwargs), (values, indices), strict=True)
            )
        choices = self._take(operator, args)
        if kind is Kind.DRAW:
            result = operator(*args, **kwargs)  # also for the draws that follow
            return _give(operator, result, choices[0].to(result.dtype))
        if kind is Kind.WHOLE and torch.Tag.nondeterministic_seeded in operator.tags:
            operator(*args, **kwargs)
        return choices[0] if len(choices) == 1 else tuple(choices)

    def _on_side(self, kind: Kind, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        in_place = operator._schema.name.endswith("_")
        if kind is Kind.RELU:
            if not x.requires_grad:
                self._end()
                return operator(*args, **kwargs)
            (passes,) = self._take(operator, args)
            tiny = torch.finfo(x.dtype).tiny
            self._end()
            result = x.clamp_min_(tiny) if in_place else x.clamp_min(tiny)
            return result.mul_(passes.view(torch.int8) if type(passes) is Tensor else passes)
        points = points_of(operator, args, kwargs)
        if not points:
            self._end()
            return operator(*args, **kwargs)
        moved = x
        for point, below in zip(points, self._take(operator, args), strict=True):
            moved = point.move(moved, below)
        self._write(x, moved)
        if in_place:
            x.copy_(moved)
            for tensor in self.saved:  # the copy of what it is to overwrite
                if tensor.shape == x.shape and tensor.dtype is x.dtype:
                    self._write(tensor, moved)
            moved = x
        self._end()
        return operator(moved, *args[1:], **kwargs)

    def _write(self, x: Tensor, moved: Tensor) -> None:
        """Move what autograd has saved of `x`, too. What came back exactly is where it was."""
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
        name, shape = base_name(operator), _shape_of(args)
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
        return [choice.read() if isinstance(choice, Packed | Copy) else choice for choice in kept.choices]


def _choice_of(result: Any, bound: int | None = None) -> Any:
    """Return what keeps a choice, whose indices do not exceed `bound`. Python numbers keep themselves."""
    if not isinstance(result, Tensor):
        return result
    if result.dtype is torch.bool and type(result) is Tensor and result.numel() > _PACKED_NUMEL and not result.is_meta:
        if not layout_of(tuple(result.shape), result.stride()).dense:
            result = result.contiguous()
        bits = torch.empty((result.numel() + 7) // 8, dtype=torch.uint8, device=result.device)
        _BITS.encode(result.detach(), bits)
        return Packed(bits, tuple(result.shape), result.stride())
    narrow = result.dtype
    if bound is not None and result.dtype in (torch.int32, torch.int64):
        narrow = next((dtype for dtype in _NARROW if bound <= torch.iinfo(dtype).max), narrow)
    return Copy(result.detach().clone() if narrow is result.dtype else result.detach().to(narrow), result.dtype)


_NARROW = (torch.uint8, torch.int16, torch.int32)


def _give(operator: Any, result: Any, choice: Any) -> Any:
    """Return a choice in place of a result, or in its memory where that is the caller's."""
    if operator._schema.is_mutable and isinstance(result, Tensor):
        return result.copy_(choice)
    return choice


def _is_choice(result: Any) -> bool:
    if isinstance(result, Tensor):
        return result.dtype in DISCRETE
    return isinstance(result, bool | int | float)


def _has_floats(args: Sequence[Any]) -> bool:
    """Return whether the first argument is a tensor of real floats."""
    return bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()


def _takes_floats(args: Iterable[Any]) -> bool:
    for value in args:
        if isinstance(value, Tensor):
            if value.is_floating_point() or value.is_complex():
                return True
        elif isinstance(value, list | tuple) and _takes_floats(value):
            return True
    return False


def _shape_of(args: Iterable[Any]) -> tuple[int, ...]:
    return next((tuple(value.shape) for value in args if isinstance(value, Tensor)), ())


def shape_text(shape: tuple[int, ...]) -> str:
    """Write a shape for people."""
    return "x".join(map(str, shape)) or "a scalar"


def _is_traced() -> bool:
    """Return whether a mode of a compiler is active: its tensors have no values."""
    return any(_get_dispatch_mode(mode) is not None for mode in _TRACING)
