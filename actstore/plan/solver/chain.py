"""A training step as the planner sees it: layers in the order of forward, and the ways that the activations of each can
wait for backward. Times in milliseconds, sizes in bytes, rates in bytes per millisecond."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class LayerOption:
    """One way for the activations of a layer to wait.

    Attributes
    ----------
    decision : what to do, as policy text
    held : on the compute device between the layer's forward and its backward
    link : that cross the link between device and host memory, once in each direction
    host : in host memory, between
    disk : on disk, between; they cross the disk's lanes once in each direction
    forward, backward : what it adds to the layer's compute there
    forward_peak, backward_peak : on the device while the layer itself runs, `held` included
    error : in the unit of `Limits.error`
    """

    decision: str
    held: float
    link: float = 0.0
    host: float = 0.0
    disk: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    forward_peak: float = 0.0
    backward_peak: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Layer:
    """A part of the model that runs once in a step, with its compute times and its options."""

    name: str
    forward: float
    backward: float
    options: tuple[LayerOption, ...]


@dataclass(frozen=True, slots=True)
class Links:
    """What bytes travel on. Rates are those of one direction alone.

    Attributes
    ----------
    out, back : between the compute device and host memory
    disk_out, disk_back : to the disk and from it
    both_ways, disk_both_ways : part of its rate that each direction keeps while the other one runs, too
    on_host : whether the compute device is the CPU, so that what waits for the disk waits on the device; otherwise it
        has crossed the link before and waits in host memory
    """

    out: float = inf
    back: float = inf
    disk_out: float = inf
    disk_back: float = inf
    on_host: bool = False
    both_ways: float = 1.0
    disk_both_ways: float = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Most bytes in each place at any moment, and the most error in all."""

    device: float
    host: float = inf
    disk: float = inf
    error: float = inf


@dataclass(frozen=True, slots=True)
class LayerChain:
    """A step: its layers, and the time that no layer takes (loss, optimizer, data)."""

    layers: tuple[Layer, ...]
    links: Links = Links()
    rest: float = 0.0

    @property
    def plain(self) -> float:
        """How long a step takes that keeps everything."""
        return self.rest + sum(layer.forward + layer.backward for layer in self.layers)
