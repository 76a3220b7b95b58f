"""Published figures beside those of the planner and the simulator for the same job.

A row is `fitted` where an input was chosen so that the figure comes out: the model can give it, and does not
predict it. A paper without the needed times or bytes has no row; see `MISSING`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from actstore.plan.hardware import A100_SXM, H100_SXM, Hardware
from actstore.plan.solver.chain import Layer, LayerChain, Limits, Links
from actstore.plan.solver.solve import Solution, solve
from benchmarks.simulator.simulate import Simulated, simulate
from benchmarks.simulator.workload import Block, Coder, chosen, equal, options

KORTHIKANTI = "Korthikanti et al. 2022"
ACCELERATE = "accelerate, pull request 4175"
MEMO = "MEMO 2024"
PROTOTYPE = "the planner's prototype"


@dataclass(frozen=True, slots=True)
class Row:
    """A published figure and the simulated one, in the same unit; `assumed` names the assumptions."""

    source: str
    what: str
    unit: str
    published: float
    ours: float
    assumed: str
    fitted: bool = False


MISSING = {
    "DTR (Titan V: Inception-v4, Transformer, DenseNet-121)": "needs the time and the bytes of each operator, which "
    "the paper does not give; the curves depend on how they differ",
    "MONeT (ResNet-50, batch 184)": "needs the time and the bytes of each layer and of its ways to be "
    "computed, which the paper does not give",
    "torchtitan, pull request 4636 (+5.6 % over full recomputation at equal memory)": "needs the tokens of a step and "
    "the times of the operators, which the report does not give. +5.6 % is 21 % of a forward no longer repeated, if "
    "backward takes twice as long as forward",
    "accelerate, pull request 4175: +0.48 s for offloaded inputs": "1.54 GB each way in 0.48 s are 6.4 GB/s: no "
    "link of such a machine is so slow, and how the copies were made is not in the report",
}


def rows() -> list[Row]:
    """Return all figures that can be compared."""
    return [*_transformer_bytes(), *_transformer_times(), *_offloaded_inputs(), *_long_context(), *_prototype()]


def _transformer_bytes() -> list[Row]:
    found = []
    for size, published, hidden, heads, batch in (("175B", 5.0, 12288, 96, 1), ("530B", 5.0, 20480, 128, 1)):
        block = Block(hidden, heads, 2048, batch, 8)
        both = replace(block, sequence_parallel=True).nbytes(core=False)
        what = f"{size}: activations without, over with, sequence parallelism and selective recomputation"
        found.append(Row(KORTHIKANTI, what, "times less", published, block.nbytes() / both, "shapes alone"))
    return found


def _transformer_times() -> list[Row]:
    """Compare 22B: 48 layers of hidden 6144, 64 heads, 2048 tokens, batch 4, on 8 A100; ms of one layer."""
    block = Block(6144, 64, 2048, 4, 8)
    core = block.core_ms(A100_SXM, 0.5)
    rule = (
        f"published times without recomputation; the core of attention takes {core:.2f} ms by its operations and bytes"
    )
    repeats = "published times without recomputation; forward is repeated"

    def layer_ms(forward: float, backward: float, again: float) -> float:
        way = options(block.nbytes(), block.boundary, again, host=False)
        chain = equal(48, forward, backward, way, A100_SXM)
        return simulate(chain, chosen(chain, ["recompute"] * 48)).ms / 48

    return [
        Row(KORTHIKANTI, "22B: full recomputation", "ms a layer", 27.2, layer_ms(7.7, 11.9, 7.7), repeats),
        Row(KORTHIKANTI, "22B: selective recomputation", "ms a layer", 20.9, layer_ms(7.7, 11.9, core), rule),
        Row(
            KORTHIKANTI,
            "22B: selective recomputation and sequence parallelism",
            "ms a layer",
            20.3,
            layer_ms(7.2, 11.8, core),
            rule,
        ),
    ]


INPUT_NBYTES = 32768 * 1024 * 2.0  # bytes of a layer's input: 24 of them are the 1.61 GB of the report
SAVED_NBYTES = (79.03e9 - 13.71e9) / 24 + INPUT_NBYTES  # bytes of a layer, from the report's bytes after forward
BASE_NBYTES = 13.71e9 - 24 * INPUT_NBYTES  # all else after forward
PEAK_NBYTES = 24.73e9


@cache
def short_context(decision: str) -> Simulated:
    """Simulate 24 layers of 32,768 tokens; at the peak the first layer is recomputed, and no other input waits."""
    forward = 1080 / 24 / 3
    chain = equal(24, forward, 2 * forward, options(SAVED_NBYTES, INPUT_NBYTES, forward), H100_SXM)
    first, *others = chain.layers
    spike = tuple(
        replace(option, backward_peak=PEAK_NBYTES - BASE_NBYTES) if "recompute" in option.decision else option
        for option in first.options
    )
    chain = LayerChain((replace(first, options=spike), *others), chain.links)
    last = "keep" if decision == "keep" else "recompute"  # backward reads its input first
    return simulate(chain, chosen(chain, [decision] * 23 + [last]), H100_SXM, window=2 * INPUT_NBYTES)


def _offloaded_inputs() -> list[Row]:
    recompute, offloaded = short_context("recompute"), short_context("recompute(raw @ host)")
    bytes_of = "bytes of a layer from the report's first two rows"
    spike = "the report says that the peak is in the recomputation; put into that of the first layer"
    return [
        Row(
            ACCELERATE, "checkpointing, time of a step", "s", 1.38, recompute.ms / 1e3,
            "all of the step is layers, backward twice as long as forward",
        ),
        Row(
            ACCELERATE, "inputs offloaded, after forward", "GB", 12.17, (BASE_NBYTES + INPUT_NBYTES) / 1e9,
            f"{bytes_of}; the last input stays",
        ),
        Row(ACCELERATE, "checkpointing, peak", "GB", 24.73, (BASE_NBYTES + recompute.device) / 1e9, spike, fitted=True),
        Row(
            ACCELERATE, "inputs offloaded, peak", "GB", 24.73, (BASE_NBYTES + offloaded.device) / 1e9,
            "as in the row above; that nothing is gained follows",
        ),
    ]  # fmt: skip


@cache
def long_context(decision: str) -> Simulated:
    """Simulate 28 layers of hidden 1024 and 131,072 tokens on each of 8 devices that attend over 1,048,576."""
    tokens, hidden = 131072, 1024
    forward = tokens * (24 * hidden**2 + 2 * 2**20 * hidden) / (H100_SXM.flops * 0.4)
    boundary = 2.0 * tokens * hidden
    ways = options(17 * boundary, boundary, forward)
    chain = equal(28, forward, 2 * forward, ways, H100_SXM)
    return simulate(chain, chosen(chain, [decision] * 27 + ["recompute"]), H100_SXM, window=boundary)


def _long_context() -> list[Row]:
    saved = (long_context("recompute").device - long_context("recompute(raw @ host)").device) / 1e9
    what = "inputs offloaded, peak at 1,048,576 tokens"
    assumed = "the peak without, 27.9 GB, is published; one input on its way"
    return [Row(ACCELERATE, what, "GB", 20.8, 27.9 - saved, assumed), _hidden()]


def _crossing(link: float) -> int:
    """Simulate MEMO: 7B on 8 A800 (A100 with less NVLink), `link` GB/s each; a layer sends 16 s b h 2-byte elements.

    Returns
    -------
    int : Ki tokens from which on no forward waits for copies
    """
    flops = A100_SXM.flops * 0.523

    def late(tokens: int) -> bool:
        block = Block(4096, 32, tokens, 1, 8)
        copied = 32.0 * tokens * 4096 / 8
        layers = tuple(
            Layer(f"layers.{i}", block.flops(causal=True) / flops, 0.0, options(copied, 0, 0)) for i in range(8)
        )
        chain = LayerChain(layers, Links(link * 1e6, link * 1e6))
        choice = chosen(chain, ["raw @ host"] * 7 + ["keep"])
        return simulate(chain, choice, limits=Limits(2.01 * copied), chunks=256).stages[0].stalls.get("memory", 0) > 0

    low, high = 16, 1024  # Ki tokens
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if late(middle * 1024) else (low, middle)
    return high


def _hidden() -> Row:
    link = 10.6
    assumed = (
        f"causal attention, the published 52.3 % MFU; {link} GB/s a device was fitted (two that share 25 have 12.5: "
        f"{_crossing(12.5)} Ki)"
    )
    return Row(MEMO, "7B: offload is hidden from here on", "Ki tokens", 192, _crossing(link), assumed, fitted=True)


@cache
def prototype(rate: float) -> tuple[LayerChain, Solution]:
    """Solve 32 equal layers, 900 MB and 14 ms each; `rate` of codecs in MB/ms of bytes read plus written, 0 without."""
    ratios = {"int8": 8.125 / 16, "int4": 5 / 16} if rate else {}
    coders = [Coder(name, ratio, rate / (1 + ratio)) for name, ratio in ratios.items()]
    chain = equal(32, 14, 28, options(900, 33, 14, coders), Hardware(Links(25, 25)))
    return chain, solve(chain, Limits(9000), gap=0.002, time_limit=10)


def _prototype() -> list[Row]:
    found = []
    for what, published, rate in (("no codec", 11.46, 0.0), ("1.25 TB/s", 2.14, 1250.0), ("0.6 TB/s", 4.35, 600.0)):
        chain, plan = prototype(rate)
        step = simulate(chain, plan.choice, limits=Limits(9000))
        assumed = (
            "int8 of 8.125 bits and int4 of 5; their speed counts bytes read and written"
            if rate
            else "all inputs given"
        )
        found.append(
            Row(PROTOTYPE, f"overhead, {what}", "% of a step", published, 100 * (step.ms / chain.plain - 1), assumed)
        )
    return found
