"""Times and working memory of the operators of a graph, each measured once on its device.

A compiler runs elementwise operators in loops, whose time is that of the bytes that they write, and on a CPU also that
of functions such as erf. An operator that writes nothing takes the latter alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from actstore.codecs import Codec
from actstore.compiled.formats.codecs import GraphCodec, graph_codec
from actstore.compiled.formats.sizes import hint, hinted_nbytes
from actstore.devices.cpu_memory import most_during

RUNS = 3  # the fastest counts
LIMIT_S = 10.0  # for all measurements of a region; later operators get a time by their bytes
RATE_NBYTES = 1 << 24
CODE_COPIES, CODE_FLOAT_NBYTES = 5, 4  # copies in float32 that a codec makes at most, operator by operator
REDUCED_PASSES = 0.7  # of a loop that reads numbers and returns few, such as their sum, as below
WELFORD_PASSES = 2.0  # of one on a CPU that returns variances
MASK_PASSES = 0.7  # of a loop on a CPU that writes the bits of a mask and one that reads them, as below
CODE_PASSES = 1.5  # of loops that encode and decode, each in times of a loop that writes as many numbers in float32
CHUNK = 1 << 14  # elements, which stay in the caches of a core


class Cost(NamedTuple):
    """Time of an operator in ms, and the bytes that it needs while it runs, beside its results."""

    ms: float
    workspace: int = 0


_known: dict[Any, Cost] = {}  # of this process


class Costs:
    """Costs of operators. Those of equal arguments are measured once."""

    def __init__(self) -> None:
        self._end = perf_counter() + LIMIT_S

    def by_bytes(self, node: Node) -> Cost:
        """Return the time in which the device writes the node's results."""
        values = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
        return Cost(sum(hinted_nbytes(value) / bytes_per_ms(value.device) for value in values))

    def computed(self, node: Node) -> Cost:
        """Return the time in which a loop computes the node's elements, without memory to write.

        No cost has what an elementwise operator reads: several operators of a loop read it at once.
        """
        target, value = node.target, node.meta.get("val")
        if isinstance(target, OpOverload) and torch.Tag.reduction in target.tags:
            return _reduced(node, target)
        if not isinstance(value, Tensor) or value.device.type != "cpu" or not isinstance(target, OpOverload):
            return Cost(0.0)
        if torch.Tag.pointwise not in target.tags:
            return Cost(0.0)
        leaves = tree_leaves((node.args, node.kwargs))
        key = (target, *(leaf.meta["val"].dtype if isinstance(leaf, Node) else str(leaf) for leaf in leaves))
        if key not in _known:
            _known[key] = Cost(_of_chunk(target, node)) if perf_counter() < self._end else Cost(0.0)
        return Cost(_known[key].ms * hint(value.numel()) / CHUNK)

    def measured(self, node: Node, turned: Sequence[Any] = ()) -> Cost:
        """Return the cost of the node's operator alone, on tensors of its sizes.

        turned : arguments whose channels are last in memory, as the compiler lays them out
        """
        target = node.target
        leaves = tree_leaves((node.args, node.kwargs, node.meta.get("val")))
        values = [leaf.meta.get("val") if isinstance(leaf, Node) else leaf for leaf in leaves]
        tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
        if not isinstance(target, OpOverload) or not tensors:
            return self.by_bytes(node)
        key = (target, *(leaf in turned for leaf in leaves if isinstance(leaf, Node)), *map(_key, values))
        if key not in _known:
            found = self._run(target, node, turned) if perf_counter() < self._end else None
            _known[key] = self.by_bytes(node) if found is None else found
        return _known[key]

    def of_codec(self, codec: Codec, value: Tensor, *, fused: bool) -> Cost:
        """Return the cost to encode a tensor, or to decode its payload: of both the larger one.

        fused : whether a compiler makes loops of it, whose time is that of the bytes
        """
        if fused:
            return Cost(CODE_PASSES * _float_nbytes(value) / bytes_per_ms(value.device))
        key = (codec, _key(value))
        if key not in _known:
            form, reason = graph_codec(codec, value)
            assert form is not None, reason
            _known[key] = _of_form(form, value) if perf_counter() < self._end else _unmeasured(value)
        return _known[key]

    def of_masks(self, numel: int, device: torch.device) -> float:
        """Return half of the ms in which loops write and read the bits of masks."""
        return MASK_PASSES * numel * CODE_FLOAT_NBYTES / bytes_per_ms(device) if device.type == "cpu" else 0.0

    def _run(self, target: OpOverload[..., Any], node: Node, turned: Sequence[Any]) -> Cost | None:
        """Return the cost of an operator; None where it does not run on tensors that hold one number everywhere."""

        def made(leaf: Any) -> Any:
            found = _real(leaf)
            is_image = isinstance(leaf, Node) and leaf in turned and found.dim() == 4
            return found.contiguous(memory_format=torch.channels_last) if is_image else found

        with _disable_current_modes(), torch.no_grad():
            args, kwargs = tree_map(made, (node.args, dict(node.kwargs)), is_leaf=lambda leaf: isinstance(leaf, Node))
            device = _device_of(args)
            try:
                ms = _fastest(lambda: target(*args, **kwargs), device)
                return Cost(ms, _workspace(lambda: target(*args, **kwargs), device))
            except (RuntimeError, IndexError, ValueError, TypeError):
                return None


def _reduced(node: Node, target: OpOverload[..., Any]) -> Cost:
    """Return the time in which a loop reads what a node makes few numbers of."""
    values = [source.meta.get("val") for source in node.all_input_nodes]
    read = max((value for value in values if isinstance(value, Tensor)), key=_float_nbytes, default=None)
    if read is None:
        return Cost(0.0)
    passes = WELFORD_PASSES if read.device.type == "cpu" and "var" in target.name() else REDUCED_PASSES
    return Cost(passes * _float_nbytes(read) / bytes_per_ms(read.device))


def _unmeasured(value: Tensor) -> Cost:
    """Return a cost of a codec that has no room, or no time, to be measured."""
    nbytes = _float_nbytes(value)
    return Cost(CODE_COPIES * nbytes / bytes_per_ms(value.device), CODE_COPIES * nbytes)


def _float_nbytes(value: Tensor) -> int:
    """Return the bytes of a tensor's numbers in float32, in which codecs compute."""
    return hint(value.numel()) * CODE_FLOAT_NBYTES


def _of_form(form: GraphCodec, value: Tensor) -> Cost:
    with _disable_current_modes(), torch.no_grad():
        try:
            made = _real(value)
            payload = form.encode(made)
            calls: list[Callable[[], Any]] = [lambda: form.encode(made), lambda: form.decode(payload)]
            costs = [Cost(_fastest(call, made.device), _workspace(call, made.device)) for call in calls]
        except RuntimeError:  # out of memory
            return _unmeasured(value)
    return Cost(max(cost.ms for cost in costs), max(cost.workspace for cost in costs))


def _of_chunk(target: OpOverload[..., Any], node: Node) -> float:
    """Return the ms of an elementwise operator on a chunk, beyond those of an addition."""
    size = hint(node.meta["val"].numel())

    def real(leaf: Any) -> Any:
        value = leaf.meta["val"] if isinstance(leaf, Node) else leaf
        if not isinstance(value, Tensor):
            return hint(value) if isinstance(value, torch.SymInt) else value
        count = CHUNK if hint(value.numel()) == size else 1
        return torch.empty(count, dtype=value.dtype).fill_(0.5 if value.dtype.is_floating_point else 0)

    with _disable_current_modes(), torch.no_grad():
        args, kwargs = tree_map(real, (node.args, dict(node.kwargs)), is_leaf=lambda leaf: isinstance(leaf, Node))
        chunk = torch.ones(CHUNK)
        try:
            ms = _fastest(lambda: target(*args, **kwargs), chunk.device)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return 0.0
        return max(0.0, ms - _fastest(lambda: chunk + 1, chunk.device))


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (*map(hint, value.shape), *map(hint, value.stride()), value.dtype, value.device)
    return str(value)


def _real(leaf: Any) -> Any:
    """Return a tensor with data for a node, and numbers for sizes."""
    value = leaf.meta["val"] if isinstance(leaf, Node) else leaf
    if isinstance(value, Tensor):
        sizes, strides = map(hint, value.shape), map(hint, value.stride())
        made = torch.empty_strided(tuple(sizes), tuple(strides), dtype=value.dtype, device=value.device)
        return made.fill_(0.5 if value.dtype.is_floating_point else 0)
    return hint(value) if isinstance(value, torch.SymInt) else value


def _device_of(values: Iterable[Any]) -> torch.device:
    return next((value.device for value in tree_leaves(values) if isinstance(value, Tensor)), torch.device("cpu"))


def _fastest(call: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(RUNS):
        begin = perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(1e3 * (perf_counter() - begin))
    return min(times)


def _workspace(call: Callable[[], Any], device: torch.device) -> int:
    """Return the peak memory of a call, less what exists after it; 0 while a profiler runs."""
    counted = most_during(call) if device.type == "cpu" else None
    if counted is not None:
        return counted
    legacy: Any = torch.autograd  # the other profiler writes to standard error
    if legacy._profiler_enabled():
        return 0
    kind = legacy.ProfilerState.CPU if device.type == "cpu" else legacy.ProfilerState.CUDA
    legacy._enable_profiler_legacy(legacy.ProfilerConfig(kind, False, True, False, False, False, _ExperimentalConfig()))
    try:
        result = call()
    finally:
        threads = legacy._disable_profiler_legacy()
    del result
    now, most = 0, 0
    for event in (event for events in threads for event in events if event.kind() == "memory_alloc"):
        now += event.cpu_memory_usage() if device.type == "cpu" else event.cuda_memory_usage()
        most = max(most, now)
    return most - now


@cache
def bytes_per_ms(device: torch.device) -> float:
    """Return the rate at which the device makes a tensor from another."""
    with _disable_current_modes(), torch.no_grad():
        source = torch.ones(RATE_NBYTES // 4, device=device)
        return RATE_NBYTES / max(1e-6, _fastest(lambda: source + 1, device))
