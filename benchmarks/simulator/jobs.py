"""Whole jobs: what a group of ranks stores once, and the same plan on 8, 64 and 1,024 ranks.

Ranks of tensor parallelism have equal inputs of each block. With `recompute(raw @ group)` each of t ranks keeps 1/t of
an input, and reads the rest from the other ranks in backward; nothing leaves a device in forward. A rank serves
while it reads: links are full duplex.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from statistics import NormalDist
from typing import Any

from actstore.plan.hardware import A100_SXM, GBPS, Hardware
from actstore.plan.solver.chain import LayerChain, LayerOption, Limits, Links
from actstore.plan.solver.solve import solve
from benchmarks.simulator.simulate import Simulated, simulate
from benchmarks.simulator.workload import Block, chosen, transformer

MFU = 0.5
WINDOW = 256 * 2**20
NODE_RANKS = 8
GROUP = "recompute(raw @ group)"

# Rates of one direction, of one device. NVLink: A100 data sheet, 600 GB/s both ways. Other links: nine tenths of
# their name, and one adapter for each device.
GROUP_LINKS = {
    "NVLink 3": 270 * GBPS,
    "InfiniBand, 200 Gb/s": 22.5 * GBPS,
    "Ethernet, 100 Gb/s": 11.25 * GBPS,
    "Ethernet, 25 Gb/s": 2.8 * GBPS,
    "Ethernet, 10 Gb/s": 1.1 * GBPS,
    "Ethernet, 1 Gb/s": 0.11 * GBPS,
}


def with_group(chain: LayerChain, block: Block) -> LayerChain:
    """Add the group tier to the options of each layer, for blocks without sequence parallelism."""
    own = block.boundary / block.tensor_parallel

    def added(ways: tuple[LayerOption, ...]) -> tuple[LayerOption, ...]:
        again = next(way for way in ways if way.decision == "recompute")
        return (*ways, replace(again, decision=GROUP, held=own, link=block.boundary - own))

    return replace(chain, layers=tuple(replace(layer, options=added(layer.options)) for layer in chain.layers))


def over(rate: float) -> Hardware:
    """Return a machine whose link brings slices back at this rate; none leave."""
    return Hardware(Links(inf, rate), latency=A100_SXM.latency)


def rows_of_groups() -> list[dict[str, Any]]:
    """Compare what a rank holds, and the time, with inputs whole, in slices, and in host memory."""
    found = []
    for ranks in (2, 4, 8):
        block = Block(hidden=8192, heads=64, sequence=4096, tensor_parallel=ranks)
        chain = with_group(transformer(block, 32, A100_SXM, MFU), block)

        def step(decision: str, hardware: Hardware, devices: int = 1, chain: LayerChain = chain) -> Simulated:
            # the last layer is read at once
            choice = chosen(chain, [decision] * (len(chain.layers) - 1) + ["recompute"])
            return simulate(chain, choice, hardware, window=WINDOW, ranks=devices)

        whole = step("recompute", A100_SXM)
        runs = [(name, step(GROUP, over(rate))) for name, rate in GROUP_LINKS.items()]
        runs.append(("host memory, PCIe 4.0", step("recompute(raw @ host)", A100_SXM, ranks)))
        for name, run in runs:
            found.append(
                {
                    "ranks": ranks, "link": name, "whole": whole.device, "device": run.device, "host": run.host,
                    "times": run.ms / whole.ms, "stalled_ms": run.stalled,
                }
            )  # fmt: skip
    return found


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensor parallelism over the ranks of a node, times stages of a pipeline, times replicas."""

    stages: int
    replicas: int

    @property
    def ranks(self) -> int:
        return NODE_RANKS * self.stages * self.replicas


LAYOUTS = Layout(1, 1), Layout(8, 1), Layout(16, 8)
DECISIONS = {"keep": A100_SXM, "recompute": A100_SXM, GROUP: over(GROUP_LINKS["NVLink 3"]), "raw @ host": A100_SXM}


def rows_of_jobs() -> list[dict[str, Any]]:
    """Run a decision for all layers on jobs of three sizes; replicas do alike."""
    block = Block(hidden=8192, heads=64, sequence=4096, tensor_parallel=NODE_RANKS)
    chain = with_group(transformer(block, 64, A100_SXM, MFU), block)
    found = []
    for layout in LAYOUTS:
        for name, hardware in DECISIONS.items():
            ranks = NODE_RANKS if name == "raw @ host" else 1  # the rest share nothing
            choice = chosen(chain, [name] * 63 + ["keep"])
            step = simulate(chain, choice, hardware, window=WINDOW, ranks=ranks, stages=layout.stages, microbatches=32)
            found.append(
                {
                    "ranks": layout.ranks, "stages": layout.stages, "replicas": layout.replicas, "all": name,
                    "ms": step.ms, "first": step.stages[0].device, "last": step.stages[-1].device,
                    "bubble_ms": step.stages[0].stalls.get("pipeline", 0.0), "stalled_ms": step.stalled,
                    "host": step.host,
                }
            )  # fmt: skip
    return found


def slowest(nodes: int, spread: float) -> float:
    """Return the median share of its usual rate that the slowest of `nodes` has, if rates are normal with `spread`."""
    return 1 + spread * NormalDist().inv_cdf(1 - 0.5 ** (1 / nodes))


def slower(hardware: Hardware, share: float, ranks: int) -> Hardware:
    """Return the hardware with this share of its rates, where `ranks` of a node copy at once."""
    links, node = hardware.links, hardware.node
    out, back = (share * min(own, of_node / ranks) for own, of_node in ((links.out, node.out), (links.back, node.back)))
    return replace(hardware, links=replace(links, out=out, back=back), node=Links())


def rows_of_slowest() -> list[dict[str, Any]]:
    """Compare a plan for the usual node with one for the slowest, both on the slowest, for which all ranks wait."""
    block = Block(hidden=4096, heads=32, sequence=4096)
    found = []
    for spread in (0.05, 0.1, 0.2):
        for ranks in (8, 64, 1024):
            share = slowest(ranks // NODE_RANKS, spread)
            machine = slower(A100_SXM, share, NODE_RANKS)
            usual, own = (
                transformer(block, 32, hardware, MFU) for hardware in (slower(A100_SXM, 1.0, NODE_RANKS), machine)
            )
            nbytes = own.layers[0].options[0].held
            limits = Limits(0.25 * len(own.layers) * nbytes + 2 * nbytes)
            times = [
                simulate(own, solve(made_for, limits, gap=0.005, time_limit=10).choice, machine, limits).ms / own.plain
                for made_for in (usual, own)
            ]
            found.append({"spread": spread, "ranks": ranks, "share": share, "usual": times[0], "agreed": times[1]})
    return found
