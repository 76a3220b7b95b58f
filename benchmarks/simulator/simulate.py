"""Simulation of a plan on a machine that is not available: discrete events on compute, the link's directions, the disk.

Copies go in chunks, one after the other in each direction: out in the order of forward, back in the order of backward,
from when the backward of a microbatch is what the device does next. Memory is checked at every event.

Where devices of a node copy at once, they share its host memory and its disk evenly (processor sharing): a switch
serves its ports packet by packet and a drive its queues request by request, both far below the size of a chunk, so that
no chunk waits for that of another device. Pipeline stages run 1F1B, each on a node of its own.

The result is simulated: it is as good as the times and rates of its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from actstore.base.units import format_nbytes
from actstore.errors import CapacityError, ConfigError
from actstore.plan.hardware import Hardware
from actstore.plan.solver.chain import LayerChain, Limits
from benchmarks.simulator.copies import Node
from benchmarks.simulator.device import Device
from benchmarks.simulator.lanes import Clock
from benchmarks.simulator.passes import check, passes_of


@dataclass(frozen=True, slots=True)
class Stage:
    """Figures of the devices of one pipeline stage. Times in ms, sizes in bytes.

    Attributes
    ----------
    compute : busy time of compute
    stalls : time that compute waited, by reason: "fetch" for bytes to come back, "memory" for room on the device,
        "window" for copies to leave, "drain" for all of them to leave, "pipeline" for other stages
    device : peak memory of one device, and `at`, the pass at that moment
    host, disk : peaks of the node
    copies : time for which each lane ran: "out", "back", "write", "read"
    """

    compute: float
    stalls: dict[str, float]
    device: float
    at: str
    host: float
    disk: float
    copies: dict[str, float]


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated step.

    Attributes
    ----------
    ms : from the first device's start to the last one's end, with the chain's `rest`
    stages : figures of each stage's device that ended last
    events : number of simulated pieces of compute and copies
    """

    ms: float
    stages: tuple[Stage, ...]
    events: int

    @property
    def device(self) -> float:
        """Peak memory of any device."""
        return max(stage.device for stage in self.stages)

    @property
    def host(self) -> float:
        """Peak host memory of any node."""
        return max(stage.host for stage in self.stages)

    @property
    def stalled(self) -> float:
        """Milliseconds that compute waited in the stage that waited longest, without waits for other stages."""
        return max(sum(ms for why, ms in stage.stalls.items() if why != "pipeline") for stage in self.stages)


def simulate(
    chain: LayerChain,
    choice: Sequence[int],
    hardware: Hardware | None = None,
    limits: Limits | None = None,
    *,
    chunks: int = 4,
    window: float = inf,
    ranks: int = 1,
    skew: float = 0.0,
    stages: int = 1,
    microbatches: int = 1,
    drain: bool = False,
) -> Simulated:
    """Run one step under a choice of options. Thread-safe; takes about 10 µs an event.

    Parameters
    ----------
    chain : of one microbatch; its links where `hardware` is None
    choice : index of an option for each layer
    hardware : the machine; compute times are the chain's
    limits : device and host bytes of one rank; None for none
    chunks : copies that a layer's payload is cut into
    window : upper bound of bytes in transit out, and of those prefetched; a larger payload goes alone
    ranks : devices of a node that train alike, side by side
    skew : ms by which each rank starts later than the one before
    stages : of the pipeline; each has an equal share of the layers
    microbatches : of a step
    drain : whether backward begins only when all that leaves has left, as the planner's timeline has it; copies overlap
        the first backward otherwise

    Raises
    ------
    ConfigError : an invalid choice or count
    CapacityError : the choice does not fit the limits, or deadlocks
    """
    limits = Limits(inf) if limits is None else limits
    hardware = Hardware(chain.links, both_ways=chain.links.both_ways) if hardware is None else hardware
    chain = replace(chain, links=hardware.links)
    counts = {"chunks": chunks, "ranks": ranks, "stages": stages, "microbatches": microbatches}
    if wrong := [f"{name}={count}" for name, count in counts.items() if count < 1]:
        raise ConfigError(f"{', '.join(wrong)}: must be 1 or more")
    layers = chain.layers
    if len(choice) != len(layers) or any(not 0 <= o < len(x.options) for o, x in zip(choice, layers, strict=True)):
        raise ConfigError(f"{len(layers)} layers need the index of one of their options each, not {list(choice)}")
    if stages > len(layers):
        raise ConfigError(f"{len(layers)} layers do not make {stages} stages: give at most one stage a layer")

    clock = Clock()
    nodes = [Node(hardware.node) for _ in range(stages)]
    pipelines: list[list[Device]] = []
    for rank in range(ranks):
        pipeline: list[Device] = []
        for stage, node in enumerate(nodes):
            passes = passes_of(chain, choice, stage, stages, microbatches)
            check(chain, passes, limits.device)
            pipeline.append(Device(clock, node, passes, hardware, limits, chunks, window, drain))
        for device, behind in pairwise(pipeline):
            device.next, behind.previous = behind, device
        for device in pipeline:
            device.begin(rank * skew)
        pipelines.append(pipeline)
    clock.run()
    for device in (device for pipeline in pipelines for device in pipeline):
        if not device.over:
            raise _standstill(chain, device, limits)
    end = max(device.ended for pipeline in pipelines for device in pipeline)
    found = [
        _stage(chain, node, max(devices, key=lambda device: device.ended))
        for node, devices in zip(nodes, zip(*pipelines, strict=True), strict=True)
    ]
    return Simulated(end + chain.rest, tuple(found), clock.events)


def _name(chain: LayerChain, device: Device, index: int) -> str:
    step = device.passes[index]
    return f"{'backward' if step.backward else 'forward'} of {chain.layers[step.layer].name}"


def _stage(chain: LayerChain, node: Node, device: Device) -> Stage:
    copies = {lane: getattr(device.copies, lane).busy_ms for lane in ("out", "back", "write", "read")}
    at = _name(chain, device, device.peak_at)
    stalls = dict(sorted(device.stalls.items()))
    return Stage(device.compute.busy_ms, stalls, device.peak, at, node.host_peak, node.disk_peak, copies)


def _standstill(chain: LayerChain, device: Device, limits: Limits) -> CapacityError:
    used = format_nbytes(round(device.copies.host))
    allowed = "any number" if limits.host == inf else format_nbytes(round(limits.host))
    return CapacityError(
        f"{_name(chain, device, device.cursor)} waits for ever ({device.waits}): {used} are in host memory, where "
        f"{allowed} are allowed, and what has to leave the device finds no room; raise the limit on host memory, or "
        "choose options that put less there",
        needed=device.copies.host,
        limit=limits.host,
    )
