"""Remedies that lower the peak of a step: policies with a predicted peak and time, and those that no store has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod
from time import perf_counter_ns

import torch
from torch.nn import functional

from actstore.autograd.sensitive import EXACT_PRODUCERS
from actstore.base.units import format_nbytes
from actstore.display.naming import layer_pattern
from actstore.display.text import percent
from actstore.inspection.saved import InspectedTensor
from actstore.inspection.timeline import Timeline, layer_of
from actstore.plan.solver.chain import LayerOption, needed
from actstore.policy.encoded import encode
from actstore.session.activation_store import MIN_NBYTES

MAX_SUGGESTIONS = 3
MIN_SHARE = 0.10  # of the plain peak: a policy that frees less is left out
MIN_LOSS_SHARE = 0.25  # of the plain peak, of a loss over logits
MIN_SERIES = 2  # layers that are called equal
_LOSSES = ("cross_entropy", "cross_entropy_loss", "log_softmax", "nll_loss")
_ATTENTION = "scaled_dot_product_attention"
_PROBE_SIZE = 2**20  # elements


@dataclass(frozen=True)
class Suggestion:
    """One remedy.

    Attributes
    ----------
    policy : for ``ActivationStore(model, policy)``; empty where the remedy is not a store's
    text : the remedy in words
    peak_bytes : predicted peak of activations on the compute device
    added_ms : predicted time that it adds to a step; None where that is not known
    tried_peak_bytes, tried_added_ms : the same as measured; None for one that was not tried
    error : of the step with this policy; empty without one
    """

    policy: str
    text: str
    peak_bytes: int
    added_ms: float | None = None
    tried_peak_bytes: int | None = None
    tried_added_ms: float | None = None
    error: str = ""

    def __str__(self) -> str:
        """Return the remedy, what is predicted, and what was measured."""
        added = "" if self.added_ms is None else f", {self.added_ms:+.0f} ms a step"
        found = [f"at most {format_nbytes(self.peak_bytes)}{added} (predicted)"]
        if self.tried_peak_bytes is not None:
            found.append(f"{format_nbytes(self.tried_peak_bytes)}, {self.tried_added_ms:+.0f} ms (measured)")
        if self.error:
            found.append(f"it cannot run: {self.error}")
        return f"{self.text}: {'; '.join(found)}"


def suggest(
    tensors: Sequence[InspectedTensor], plain: Timeline, optimizer_bytes: int, device: torch.device
) -> tuple[Suggestion, ...]:
    """Return at most three remedies: those that no store has first, then policies, the lowest peak first."""
    peak = plain.peak
    step = _PlainStep([t for t in tensors if t.saved_ms <= peak.ms and (t.freed_ms is None or t.freed_ms > peak.ms)])
    least = (1 - MIN_SHARE) * peak.held_bytes
    policies = sorted(
        (found for found in _policies(step, device, plain.backward_ms) if found.peak_bytes <= least),
        key=lambda found: found.peak_bytes,
    )
    return (*_not_of_a_store(step, peak.held_bytes, optimizer_bytes), *policies)[:MAX_SUGGESTIONS]


class _PlainStep:
    """The tensors that plain autograd holds at its peak, in the order of forward, by layer."""

    def __init__(self, tensors: Sequence[InspectedTensor]) -> None:
        self.tensors = tensors
        layers = Counter[str]()
        for tensor in tensors:
            layers[layer_of(tensor.module)] += tensor.saved_bytes
        series: dict[str, list[str]] = {}
        for layer in layers:
            series.setdefault(layer_pattern(layer), []).append(layer)
        equal = {pattern: names for pattern, names in series.items() if len(names) >= MIN_SERIES and "#" in pattern}
        self.pattern = max(equal, key=lambda pattern: sum(layers[name] for name in equal[pattern]), default="")
        self.layers = equal.get(self.pattern, [])

    def peak(self, stored: Callable[[InspectedTensor], float], again: Mapping[str, float] | None = None) -> float:
        """Return the predicted peak of a step in bytes.

        Parameters
        ----------
        stored : bytes of a tensor from forward until backward; a smaller one than it is decoded
        again : bytes that layers hold which are recomputed
        """
        again, options = dict(again or {}), []
        recomputed = frozenset(again)
        for layer, group in groupby(self.tensors, key=lambda tensor: layer_of(tensor.module)):
            tensors = list(group)
            held = again.pop(layer, 0.0) if layer in recomputed else sum(map(stored, tensors))
            if layer in recomputed:
                beside = sum(tensor.saved_bytes for tensor in tensors)
            else:
                beside = max((t.saved_bytes for t in tensors if stored(t) < t.saved_bytes), default=0)
            options.append(LayerOption("", held, backward_peak=held + beside))
        return max(needed(options), default=0.0)

    @property
    def inside(self) -> list[InspectedTensor]:
        """The tensors of the equal layers."""
        names = set(self.layers)
        return [tensor for tensor in self.tensors if layer_of(tensor.module) in names]

    def inputs(self) -> dict[str, InspectedTensor]:
        """Return the first tensor that each of the equal layers saves, weights aside: its input, as a rule."""
        found: dict[str, InspectedTensor] = {}
        for tensor in (tensor for tensor in self.inside if tensor.producer):
            found.setdefault(layer_of(tensor.module), tensor)
        return found

    def forward_ms(self, backward_ms: float, *, attention: bool) -> float:
        """Forward's time in the equal layers, with or without their attention: from each saved tensor to the next."""
        names, total = set(self.layers), 0.0
        for tensor, following in pairwise(self.tensors):
            counts = layer_of(tensor.module) in names and (attention or following.operator != _ATTENTION)
            total += counts * (min(following.saved_ms, backward_ms) - tensor.saved_ms)
        return total


def _policies(step: _PlainStep, device: torch.device, backward_ms: float) -> Iterator[Suggestion]:
    lossy = [tensor for tensor in step.tensors if _is_encoded(tensor)]
    encoded_nbytes, codec_ms = _int8(device) if lossy else (0.0, 0.0)

    def encoded(tensor: InspectedTensor) -> float:
        numel = tensor.saved_bytes // _dtype(tensor).itemsize
        return encoded_nbytes * numel if _is_encoded(tensor) else tensor.saved_bytes

    def whole(tensor: InspectedTensor) -> float:
        return tensor.saved_bytes

    if lossy:
        numel = sum(tensor.saved_bytes // _dtype(tensor).itemsize for tensor in lossy)
        yield _policy("int8", step.peak(encoded), codec_ms * numel)
    if not step.layers:
        return
    rule = f"{step.pattern.replace('#', '*')} : recompute"
    inputs = step.inputs()
    held = {layer: float(_nbytes(inputs[layer])) if layer in inputs else 0.0 for layer in step.layers}
    all_ms, part_ms = (step.forward_ms(backward_ms, attention=each) for each in (True, False))
    attention = Counter[str]()
    for tensor in step.inside:
        if tensor.operator == _ATTENTION:
            attention[layer_of(tensor.module)] += _nbytes(tensor) // 4  # of q, k, v and result
    if attention:
        kept = {layer: nbytes + attention[layer] for layer, nbytes in held.items()}
        yield _policy(f"{step.pattern.replace('#', '*')}/@sdpa : keep; {rule}", step.peak(whole, kept), part_ms)
    else:
        yield _policy(rule, step.peak(whole, held), all_ms)
    if lossy:
        small = {layer: encoded_nbytes * _numel(tensor) for layer, tensor in inputs.items()}
        numel = sum(map(_numel, inputs.values()))
        yield _policy(
            f"{rule}(int8)", step.peak(whole, dict.fromkeys(step.layers, 0.0) | small), all_ms + codec_ms * numel
        )


def _policy(policy: str, peak_bytes: float, added_ms: float) -> Suggestion:
    return Suggestion(policy, f'ActivationStore(model, "{policy}")', int(peak_bytes), added_ms)


def _not_of_a_store(step: _PlainStep, peak_bytes: int, optimizer_bytes: int) -> Iterator[Suggestion]:
    of_loss = sum(tensor.saved_bytes for tensor in step.tensors if tensor.operator in _LOSSES)
    if of_loss >= MIN_LOSS_SHARE * peak_bytes:
        remedy = (
            "torch.nn.functional.linear_cross_entropy takes them in chunks"
            if hasattr(functional, "linear_cross_entropy")
            else "compute the loss of some tokens at a time, each under torch.utils.checkpoint"
        )
        text = f"the loss saves {format_nbytes(of_loss)} ({percent(of_loss / peak_bytes, '.0f')}) of logits; {remedy}"
        yield Suggestion("", text, peak_bytes - of_loss)
    if optimizer_bytes > peak_bytes:
        text = (
            f"the optimizer holds {format_nbytes(optimizer_bytes)}, more than all activations, and no store frees it; "
            "an optimizer with 8-bit states (bitsandbytes) holds a quarter of float32 ones"
        )
        yield Suggestion("", text, peak_bytes)


def _numel(tensor: InspectedTensor) -> int:
    return prod(tensor.shape)


def _nbytes(tensor: InspectedTensor) -> int:
    """Return the bytes of the tensor's elements, also where its storage was saved before."""
    return _numel(tensor) * _dtype(tensor).itemsize


def _is_encoded(tensor: InspectedTensor) -> bool:
    exact = tensor.operator in _LOSSES or tensor.producer in EXACT_PRODUCERS
    return tensor.saved_bytes >= MIN_NBYTES and _dtype(tensor).is_floating_point and not exact


def _dtype(tensor: InspectedTensor) -> torch.dtype:
    found = getattr(torch, tensor.dtype)
    assert isinstance(found, torch.dtype)
    return found


def _int8(device: torch.device) -> tuple[float, float]:
    """Return the bytes of int8 for each element, and the time to encode and decode it, in ms."""
    probe = torch.ones(_PROBE_SIZE, device=device)
    encoded = encode(probe, "int8")
    encoded.decode()  # compiled, and memory found
    times = []
    for _ in range(3):
        begin = perf_counter_ns()
        encode(probe, "int8").decode()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter_ns() - begin)
    return encoded.nbytes / _PROBE_SIZE, min(times) / 1e6 / _PROBE_SIZE
