"""Gradients that jump on the way from what a call has saved to what a store gives back in its place.

Let v be the floats that a call saves, and v' what a store gives for them. Where backward only computes, its gradients
at v + t (v' - v) change without a break while t goes from 0 to 1: between two values of t they differ by no more than
the operator's own sensitivity times their distance, and half of the distance halves the difference. A backward that
compares what it reads takes another branch somewhere, and there the difference stays, however close the two are. So a
difference is followed through `HALVINGS` of its distance, to 2**-47 of the way. What an operator of finite sensitivity
leaves of it is that fraction; what is above `BOUND` of the largest gradient on the way is a decision that the store has
changed.

At a pole of backward (1 / x at 0) the difference grows instead: that is sensitivity without bound, no decision. It
counts where it makes a finite gradient infinite. All of this is computed in float64: no rounding is taken for a jump.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from operator import attrgetter
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from actstore import ActivationStore
from actstore.session import entries
from tests.operators.calls import Call, sampled

POINTS = 8  # of the way that are looked at first
HALVINGS = 44  # of the distance of two of them
WIDEST = 2  # differences that are followed, and the first one: elements that lie on a kink leave it at once
BOUND = 1e-3  # of the largest gradient on the way
POLE = 8.0  # growth of a difference while its distance was halved
ROUNDING = 1e-12  # a gradient of numbers of the order of 1 that is smaller has cancelled to rounding errors
REFUSALS = RuntimeError, ValueError, NotImplementedError, IndexError, AssertionError, TypeError


class Pair(NamedTuple):
    """The same call in two types of numbers: as a store sees it, and as its gradients are computed."""

    single: Call
    double: Call


def pairs(op: Any, limit: int | None) -> Iterator[Pair]:
    """Yield the first `limit` calls of an operator as a model writes them, of given numbers and at kinks."""
    for number, sample in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=True)):
        if number == limit:
            break
        for form, function in written(op).items():
            if form != "function" and not isinstance(sample.input, Tensor):
                continue
            name = f"{op.full_name}, {form}, sample {number}"
            calls = (sampled(name, function, each, in_place=False) for each in (sample, _double(sample)))
            pair = Pair(*map(_of_results, calls))
            yield pair
            numbers = [n for n in tree_leaves((sample.args, sample.kwargs)) if type(n) in (int, float) and abs(n) < 100]
            kinked = Pair(*(_at_kinks(call, numbers) for call in pair))
            if kinked.single is not pair.single:
                yield kinked


def written(op: Any) -> dict[str, Callable[..., Any]]:
    """Write an operator's calls as a model does, with its name: ``torch.abs(x)``, ``x.abs()``."""
    found: dict[str, Callable[..., Any]] = {"function": op.op}
    with suppress(AttributeError):
        if attrgetter(op.name)(torch) is op.op:
            found["function"] = eval(f"lambda *args, **kwargs: torch.{op.name}(*args, **kwargs)")
    method = getattr(op.method_variant, "__name__", "")
    if method.isidentifier() and getattr(Tensor, method, None) is op.method_variant:
        found["method"] = eval(f"lambda x, *args, **kwargs: x.{method}(*args, **kwargs)")
    in_place = _in_place(op)
    if in_place is not None:
        found["in place"] = in_place
        found["in place on a view"] = lambda x, *args, **kwargs: in_place(x.view_as(x), *args, **kwargs)
    return found


def _in_place(op: Any) -> Callable[..., Any] | None:
    """Return what writes an operator's result over its input, if there is such a thing."""
    name = getattr(op.inplace_variant, "__name__", "")
    if not op.supports_inplace_autograd:
        return None
    if name.isidentifier() and getattr(Tensor, name, None) is op.inplace_variant:
        return cast("Callable[..., Any]", eval(f"lambda x, *args, **kwargs: x.{name}(*args, **kwargs)"))
    if op.inplace_variant is not None:
        return cast("Callable[..., Any]", op.inplace_variant)
    with suppress(ValueError):  # of a built-in function
        if "inplace" in signature(op.op).parameters:
            return partial(op.op, inplace=True)
    return None


def _double(sample: Any) -> Any:
    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype is torch.float32:
            return value.detach().double().requires_grad_(value.requires_grad)
        return torch.float64 if value is torch.float32 else value

    return sample.transform(cast)


def _of_results(call: Call) -> Call:
    """The same of results of an operator: of a leaf a store does not know whether a decision made it."""
    return call._replace(run=lambda inputs: call.run([t * 1 for t in inputs]))


KINKS = (0.0, 1.0, 3.0, -1.0, -3.0, 6.0, 0.5, -0.5)
BESIDE = (1e-3, -1e-3, 0.0, 2e-2, -2e-2)


def _at_kinks(call: Call, numbers: Sequence[float]) -> Call:
    """Put a call's inputs at kinks and beside them: first at the numbers that it is given, such as bounds."""
    ends = torch.tensor([kink + off for kink in dict.fromkeys((*numbers, *KINKS)) for off in BESIDE])
    inputs = []
    for number, tensor in enumerate(call.inputs):
        if tensor.layout is not torch.strided or not tensor.is_floating_point():
            return call
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
        some = values.view(-1) if values.numel() < 2 * len(ends) else values.view(-1)[number % 2 :: 2]
        some.copy_(ends[(torch.arange(some.numel()) + 3 * number) % len(ends)])
        inputs.append(values.requires_grad_())
    return call._replace(name=f"{call.name}, at kinks", inputs=inputs)


class Refused(Exception):
    """A call that plain PyTorch refuses."""


class Way:
    """The gradients of a call for what it saved, moved by a part of the way to what was given in its place."""

    def __init__(self, call: Call) -> None:
        self.part = 0.0
        self.read: list[Tensor] = []
        self.moved: dict[int, Tensor] = {}  # by how much, of the tensors that are
        self._number = 0
        self._inputs = call.inputs
        self._outputs: list[Tensor] = []
        try:
            with saved_tensors_hooks(Tensor.detach, self._unpack):
                self._outputs = call.outputs(call.inputs)
            self.exact = self._gradients()
        except REFUSALS as error:
            self._outputs.clear()
            raise Refused from error

    def __enter__(self) -> Way:
        return self

    def __exit__(self, *_: object) -> None:
        self._outputs.clear()  # their graph holds this, which no collector sees

    def _unpack(self, tensor: Tensor) -> Tensor:
        number = self._number
        self._number += 1
        if not self.moved:
            self.read.append(tensor)
        return tensor + self.part * self.moved[number] if self.part and number in self.moved else tensor

    def _gradients(self) -> Tensor:
        self._number = 0
        return flat(grad(self._outputs, self._inputs, ones(self._outputs), retain_graph=True, allow_unused=True))

    def at(self, part: float) -> Tensor:
        self.part = part
        return self._gradients()

    def move(self, given: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        """Go to `given` from `read`. A payload that alone changes nothing stays: of one side any number may stand for
        another, and between the two may lie a kink."""
        moves = {
            number: (to - off).double()
            for number, (to, off) in enumerate(zip(given, read, strict=True))
            if off.is_floating_point() and not torch.equal(to, off)
        }
        for number, move in moves.items():
            self.moved = {number: move}
            if torch.equal(self.at(1).nan_to_num(7), self.exact.nan_to_num(7)):
                moves[number] = torch.zeros_like(move)
        self.moved = moves


def flat(gradients: Sequence[Tensor | None]) -> Tensor:
    found = [g.detach().reshape(-1).double() for g in gradients if g is not None and g.layout is torch.strided]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.float64)


def ones(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Not quite: gradients of softmax and its like vanish for equal ones."""
    generator = torch.Generator().manual_seed(2)
    return [torch.rand(t.shape, generator=generator).to(t.dtype) + 0.5 for t in outputs]


def through(store: ActivationStore, call: Call) -> tuple[Tensor, list[Tensor]]:
    """The gradients under a store, and what they have read."""
    given: list[Tensor] = []
    unpack: Any = entries.unpack

    def noting(handle: Any) -> Tensor:
        tensor: Tensor = unpack(handle)
        given.append(tensor.detach().clone())
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "unpack", noting)
        with store:
            outputs = call.outputs(call.inputs)
        return flat(grad(outputs, call.inputs, ones(outputs), allow_unused=True)), given


def verdict(pair: Pair, store: ActivationStore) -> str:
    """Tell what `store` changes of backward's decisions: nothing, or "skipped: " and why that cannot be told."""
    try:
        with Way(pair.single) as single, Way(pair.double) as double:
            return _compare(single, double, pair.single, store)
    except Refused:
        return "skipped: plain refuses it"


def _compare(single: Way, double: Way, call: Call, store: ActivationStore) -> str:
    floats = [t for t in single.read if t.is_floating_point()]
    if any(t.layout is not torch.strided for t in floats):
        return "skipped: sparse"
    if not all(bool(t.isfinite().all()) for t in floats):
        return "skipped: reads what is not finite"
    if not double.exact.numel():
        return "skipped: no gradient"
    found, given = through(store, call)
    shapes = [[t.shape for t in tensors] for tensors in (given, single.read, double.read)]
    if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
        return "skipped: reads something else in float64"
    if bool((single.exact.isfinite() & ~found.isfinite()).any()):
        return "a finite gradient comes back infinite"
    double.move(given, single.read)
    left = _jump(double)
    return f"jumps by {left:.2g} of the largest gradient" if left else ""


def _largest(values: Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _jump(way: Way) -> float:
    """The largest difference that halving its distance does not close, over the largest gradient; 0 for none."""
    if not any(bool(move.any()) for move in way.moved.values()):
        return 0.0
    values = [way.at(number / POINTS) for number in range(POINTS + 1)]
    scale = max(map(_largest, values))
    if scale < ROUNDING:
        return 0.0
    gaps = [(_largest(values[i + 1] - values[i]) / scale, i) for i in range(POINTS)]
    followed = {*sorted(gaps)[-WIDEST:], gaps[0]}
    return max(_followed(way, i / POINTS, values[i], values[i + 1], gap, scale) for gap, i in followed)


def _followed(way: Way, low: float, below: Tensor, above: Tensor, gap: float, scale: float) -> float:
    distance, left = 1 / POINTS, gap
    for _ in range(HALVINGS):
        if left <= BOUND:
            return 0.0
        distance /= 2
        middle = way.at(low + distance)
        first, second = _largest(middle - below) / scale, _largest(above - middle) / scale
        if first >= second:
            above, left = middle, first
        else:
            low, below, left = low + distance, middle, second
    return left if BOUND < left <= POLE * gap else 0.0
