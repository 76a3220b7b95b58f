"""Derivatives of a call: forward in a store's context, or in none; what follows outside of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import forward_ad, grad

from tests.operators.calls import Call

Context = AbstractContextManager[Any]
Results = Sequence[Tensor | None]


def gradients(call: Call, context: Context) -> Results:
    """The gradients of all inputs, taken twice; none where nothing can be differentiated."""
    with context:
        outputs = call.outputs(call.inputs)
    if not call.inputs or not outputs:
        return ()
    ones = [torch.ones_like(t) for t in outputs]
    first = grad(outputs, call.inputs, ones, retain_graph=True, allow_unused=True)
    return *first, *grad(outputs, call.inputs, ones, allow_unused=True)


def second_order(call: Call, context: Context) -> Results:
    """The gradients, which the store's context sees computed, and the gradients of these."""
    with context:
        outputs = call.outputs(call.inputs)
        if not call.inputs or not outputs:
            return ()
        cotangents = [torch.ones_like(t, requires_grad=True) for t in outputs]
        first = grad(outputs, call.inputs, cotangents, create_graph=True, allow_unused=True)
    again = [t for t in first if t is not None and t.requires_grad]
    if not again:
        return first
    inputs = [*call.inputs, *cotangents]
    return *first, *grad(again, inputs, [torch.full_like(t, 0.5) for t in again], allow_unused=True)


def forward_over_reverse(call: Call, context: Context) -> Results:
    """The gradients and their directional derivatives, by dual numbers that go through forward and backward."""
    generator = torch.Generator().manual_seed(1)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, torch.randn(t.shape, dtype=t.dtype, generator=generator)) for t in call.inputs]
        with context:
            outputs = call.outputs(duals)
        if not duals or not outputs:
            return ()
        ones = [torch.ones_like(t) for t in outputs]
        found = grad(outputs, call.inputs, ones, allow_unused=True)
        pairs = [forward_ad.unpack_dual(t) if t is not None else (None, None) for t in found]
        return [t for pair in pairs for t in pair]


def changed_inputs(call: Call, context: Context) -> Results:
    """The gradients, where the inputs were changed in place before backward, or autograd's verdict on that."""
    copies = [t.clone() for t in call.inputs]
    with context:
        outputs = call.outputs(copies)
    return _after_change(copies, outputs, call.inputs)


def changed_outputs(call: Call, context: Context) -> Results:
    """The same of the outputs."""
    with context:
        outputs = call.outputs(call.inputs)
    return _after_change(outputs, outputs, call.inputs)


def unchanged(call: Call, context: Context) -> Results:
    """What the two above should be."""
    with context:
        outputs = call.outputs(call.inputs)
    return _after_change((), outputs, call.inputs)


def _after_change(changed: Sequence[Tensor], outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Results:
    if not inputs or not outputs:
        return ()
    ones = [torch.ones_like(t) for t in outputs]
    for tensor in changed:
        tensor.detach().add_(1)
    return grad(outputs, inputs, ones, allow_unused=True)


class Sentinel:
    """What dies with the node of a graph that it was given to."""


def survivors(call: Call, context: Context) -> list[str]:
    """Nodes of the graph that outlive the outputs, where backward never runs and where it runs and might run again."""
    alive = []
    for backward in (False, True):
        with context:
            outputs = call.outputs(call.inputs)
        watched = []
        for node in {t.grad_fn for t in outputs} - {None}:
            sentinel = node.metadata[Sentinel] = Sentinel()
            watched.append((node.name(), ref(sentinel)))
        node = sentinel = None
        if backward and call.inputs and outputs:
            grad(outputs, call.inputs, [torch.ones_like(t) for t in outputs], retain_graph=True, allow_unused=True)
        del outputs
        alive += [name for name, weak in watched if weak() is not None]
    return alive
