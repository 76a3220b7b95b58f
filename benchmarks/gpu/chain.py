"""Step with known compute and transfer: a chain of layers of matrix products, each saving its input.

Times are of the host's clock around a step that begins and ends with an idle device, medians over pairs of steps with
and without a store. Gradients are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

from actstore import ActivationStore
from actstore.trace import Event, Trace

LAYERS, TOKENS, WIDTH = 32, 16384, 2048  # 64 MiB of input a layer in bfloat16: four fill the engine's window
WARMUP = 3  # steps; the first allocates, the second knows the fetch order
REPEATS = 10


class _Layer(torch.autograd.Function):
    """Layer with the same number of products in forward and backward; the gradient depends on every saved byte."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, products: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.products = weight, products
        for _ in range(products):
            x = x @ weight
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,), grad = ctx.saved_tensors, grads[0]
        for _ in range(ctx.products):
            grad = grad @ ctx.weight
        return torch.addcmul(grad, x, x, value=1e-3), None, None


class Chain:
    """Chain of layers; `products`, the number of each layer, may change between steps.

    Attributes
    ----------
    nbytes : bytes that each layer saves
    """

    def __init__(
        self, device: str, layers: int = LAYERS, tokens: int = TOKENS, width: int = WIDTH, products: int = 1
    ) -> None:
        torch.manual_seed(0)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.device, self.layers, self.products = device, layers, products
        self.x = torch.randn(tokens, width, dtype=dtype, device=device, requires_grad=True)
        self.weight = torch.randn(width, width, dtype=dtype, device=device) / width**0.5
        self.nbytes = self.x.nbytes

    def step(self, store: ActivationStore | None = None) -> torch.Tensor:
        """Run forward and backward; return the gradient of the input."""
        self.forward(nullcontext() if store is None else store).backward()  # type: ignore[no-untyped-call]  # torch's
        grad: Any = self.x.grad
        assert isinstance(grad, torch.Tensor)
        return grad

    def forward(self, context: AbstractContextManager[Any]) -> torch.Tensor:
        """Run forward within `context`; return the loss."""
        self.x.grad = None
        with context:
            x = self.x * 1  # only the graph holds what a layer saves
            for _ in range(self.layers):
                x = _Layer.apply(x, self.weight, self.products)  # type: ignore[no-untyped-call]  # torch's
            return x.sum()

    def balance(self, factor: float, transfer_ms: float) -> None:
        """Set `products` so that a layer computes for about `factor` times `transfer_ms`."""
        x, count = self.x.detach(), 20
        times = [elapsed_ms(self.device, lambda: [x @ self.weight for _ in range(count)]) / count for _ in range(3)]
        self.products = max(1, round(factor * transfer_ms / min(times)))


def elapsed_ms(device: str, run: Callable[[], Any]) -> float:
    """Return milliseconds of one call, to the end of the work that it queues on the device."""
    synchronize(device)
    begin = perf_counter_ns()
    run()
    synchronize(device)
    return (perf_counter_ns() - begin) / 1e6


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure(chain: Chain, policy: str, repeats: int = REPEATS, **options: Any) -> dict[str, Any]:
    """Run steps with a store beside plain ones; return times and the figures of the store's report, as medians."""
    store = ActivationStore(policy=policy, min_bytes=0, **options)
    try:
        for _ in range(WARMUP):
            chain.step(store)
            chain.step()
        samples: list[dict[str, float]] = []
        for repeat in range(repeats):
            sample: dict[str, float] = {}
            for name in ("plain_ms", "store_ms")[:: 1 if repeat % 2 else -1]:
                sample[name] = elapsed_ms(chain.device, lambda: chain.step(store if name == "store_ms" else None))  # noqa: B023  # called at once
                if name == "store_ms":
                    sample |= _reported(store)
            sample["ratio"] = sample["store_ms"] / sample["plain_ms"]
            sample["stall_share"] = sample["stall_ms"] / sample["store_ms"]
            samples.append(sample)
        equal = torch.equal(chain.step(store), chain.step())
    finally:
        store.close()
    return {
        "layers": chain.layers,
        "nbytes": chain.nbytes,
        "products": chain.products,
        "equal": equal,
        **{name: median(sample[name] for sample in samples) for name in samples[0]},
        "samples": samples,
    }


def _reported(store: ActivationStore) -> dict[str, float]:
    report = store.report()
    return {name: getattr(report, name) for name in ("offload_ms", "fetch_ms", "stall_ms", "hits", "late", "misses")}


def traced(chain: Chain, policy: str, **options: Any) -> Trace:
    """Return the trace of one step alone."""
    store = ActivationStore(policy=policy, min_bytes=0, observe=[Trace()], **options)
    try:
        for _ in range(WARMUP):
            chain.step(store)
            synchronize(chain.device)
        whole = store.trace
        step = Trace(device=whole.device)
        for event in whole.events(whole.last_step()):
            step.add(*event)
        return step
    finally:
        store.close()


def rate(events: list[Event], *kinds: str) -> dict[str, float] | None:
    """Return the rate of copies of `kinds`, from the start of the first to the end of the last; None without copies."""
    mine = [event for event in events if event.kind in kinds]
    if not mine:
        return None
    nbytes = sum(event.nbytes for event in mine)
    elapsed_ns = max(event.end_ns for event in mine) - min(event.begin_ns for event in mine)
    return {"nbytes": nbytes, "ms": elapsed_ns / 1e6, "gbps": nbytes / max(1, elapsed_ns)}


def theoretical_stall_ms(
    layers: int, ahead: int, fetched: int, compute_ms: float, out_ms: float, back_ms: float
) -> float:
    """Return how long compute must wait in a step, whatever the order of work.

    Forward: the step saves layer i at i * compute_ms, but not before the copy of layer i - ahead has ended; copies run
    one after the other. Backward: the payloads that have left the device come back one after the other, from its start.
    Backward reads the first of them after the compute of the layers on the device, the last after that of all layers
    but one.

    Parameters
    ----------
    layers : of the chain
    ahead : payloads that the window holds
    fetched : payloads that came back from the tier; the remaining ones were still on the device
    compute_ms : of one layer, each way
    out_ms, back_ms : of the copy of one payload
    """
    computed_ms = (layers - 1) * compute_ms
    forward_ms = (layers - ahead) * out_ms - computed_ms
    first_ms = back_ms - (layers - fetched) * compute_ms if fetched else 0.0
    return max(0.0, forward_ms) + max(0.0, first_ms, fetched * back_ms - computed_ms)


def steady(chain: Chain, policy: str, steps: int = 20, **options: Any) -> dict[str, Any]:
    """Return what `steps` equal steps allocate after the first ones."""
    store = ActivationStore(policy=policy, min_bytes=0, **options)
    try:
        for _ in range(2 * WARMUP):
            chain.step(store)
            synchronize(chain.device)  # so that the host runs ahead equally in each step
        before = dict(_counters(store, chain.device))
        for _ in range(steps):
            chain.step(store)
            synchronize(chain.device)
        after = dict(_counters(store, chain.device))
        return {
            "steps": steps,
            "allocated": {name: after[name] - before[name] for name in after},
            "pinned_segments": [nbytes for arena in pinned_segments(store) for nbytes in arena],
        }
    finally:
        store.close()


def _counters(store: ActivationStore, device: str) -> Iterator[tuple[str, int]]:
    yield "engine buffers", sum(place.engine._traffic.buffers.allocated for place in store._store._places.values())
    yield "pinned segments", sum(map(len, pinned_segments(store)))
    if device != "cpu":
        stats = torch.cuda.memory_stats()
        for name in ("num_device_alloc", "num_alloc_retries", "segment.all.allocated"):
            yield name, stats.get(name, 0)


def pinned_segments(store: ActivationStore) -> list[list[int]]:
    """Return the sizes of the pinned segments of each host tier."""
    tiers = [tier for place in store._store._places.values() for tier in place._open.values()]
    arenas = [tier._arena for tier in tiers if hasattr(tier, "_arena")]
    return [[segment.nbytes for segment in arena._segments if segment.pinned] for arena in arenas]
