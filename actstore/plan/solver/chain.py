"""A training step as the planner sees it: layers in the order of forward, and the options for the activations of each.

Times are in milliseconds, sizes in bytes, rates in bytes per millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class LayerOption:
    """One way for the activations of a layer to wait.

    Attributes
    ----------
    decision : policy text
    held : bytes on the compute device between the layer's forward and its backward
    link : bytes that cross the link between device and host memory, once in each direction
    host : bytes in host memory, between forward and backward
    disk : bytes on disk, between forward and backward; they cross the disk's lanes once in each direction
    forward, backward : time that the option adds to the layer's compute
    forward_peak, backward_peak : bytes on the device while the layer itself runs, `held` included
    error : noise, in the unit of `Limits.error`
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
    """A part of the model that runs once in a step, with its compute times and its options.

    Attributes
    ----------
    waiting : micro-batches whose bytes an option's `held` has, where the layer runs once for each of several
    turns : how many of them wait each time that a backward begins; empty where it is one
    """

    name: str
    forward: float
    backward: float
    options: tuple[LayerOption, ...]
    waiting: int = 1
    turns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Links:
    """Links that bytes travel on. Rates are those of one direction alone.

    Attributes
    ----------
    out, back : rates between the compute device and host memory
    disk_out, disk_back : rates to the disk and from it
    both_ways, disk_both_ways : share of its rate that each direction keeps while both run
    on_host : whether the compute device is the CPU. Then bytes for the disk wait on the device; otherwise they have
        crossed the link before and wait in host memory
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
        """Milliseconds of a step that keeps everything."""
        return self.rest + sum(layer.forward + layer.backward for layer in self.layers)
