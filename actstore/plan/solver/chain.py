"""A training step as the planner sees it: layers in the order of forward, and the options for the activations of each.

Times are in milliseconds, sizes in bytes, rates in bytes per millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
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
    """Upper bounds: bytes in each place at any moment, and error in all."""

    device: float
    host: float = inf
    disk: float = inf
    error: float = inf


@dataclass(frozen=True, slots=True)
class SharedLayers:
    """Bytes that several layers save. The first of them whose option keeps them holds them.

    Attributes
    ----------
    layers : indices of the layers; `held` of the first one's options has the bytes already
    keeps : of each layer, whether each of its options keeps them
    """

    nbytes: float
    layers: tuple[int, ...]
    keeps: tuple[tuple[bool, ...], ...]


@dataclass(frozen=True, slots=True)
class LayerChain:
    """A step: its layers, and the time that no layer takes (loss, optimizer, data)."""

    layers: tuple[Layer, ...]
    links: Links = Links()
    rest: float = 0.0
    shared: tuple[SharedLayers, ...] = ()

    @property
    def plain(self) -> float:
        """Milliseconds of a step that keeps everything."""
        return self.rest + sum(layer.forward + layer.backward for layer in self.layers)

    def chosen(self, choice: Sequence[int]) -> list[LayerOption]:
        """Return the option of each layer."""
        return [layer.options[index] for layer, index in zip(self.layers, choice, strict=True)]


def spilled(chain: LayerChain, choice: Sequence[int]) -> list[float]:
    """Return for each layer the bytes that it holds beside those of its option, because an earlier layer does not."""
    found = [0.0] * len(chain.layers)
    for shared in chain.shared:
        keep = (i for i, layer in enumerate(shared.layers) if shared.keeps[i][choice[layer]])
        if number := next(keep, 0):
            found[shared.layers[number]] += shared.nbytes
    return found


def needed(options: Iterable[LayerOption]) -> Iterator[float]:
    """Yield the bytes on the device while each layer runs, in forward or in backward, where no copy is in transit.

    The largest is the peak of the step. Measured steps, forecasts, and advice after memory ran out all count so.

    Parameters
    ----------
    options : one for each layer, in the order of forward
    """
    held = 0.0
    for option in options:
        yield held + max(option.forward_peak, option.backward_peak)
        held += option.held


_NUMBERS = tuple(field.name for field in fields(LayerOption) if field.name != "decision")


def useful(layer: Layer) -> list[int]:
    """Return the indices of a layer's options, without those that another option equals or betters in every number.

    A smaller compute time counts as better: bytes that flow beside it flow as well beside a stall of the same length.
    Of equal options the first stays.
    """
    numbers = [tuple(getattr(option, name) for name in _NUMBERS) for option in layer.options]
    return [
        index
        for index, mine in enumerate(numbers)
        if not any(
            all(a <= b for a, b in zip(other, mine, strict=True)) and (other != mine or at < index)
            for at, other in enumerate(numbers)
        )
    ]


def share_at(turns: Sequence[int], number: int) -> float:
    """Return the share of the most calls of a unit that wait at a turn; 1 where `turns` tells nothing of the unit."""
    return turns[number] / max(turns) if turns and max(turns) else 1.0


def most_at_once(held: Iterable[tuple[float, Sequence[int]]]) -> float:
    """Return the peak over the turns of the bytes that units hold.

    Parameters
    ----------
    held : for each unit the bytes while most of its calls wait, and how many wait at each turn
    """
    units = list(held)
    number = max((len(turns) for _, turns in units), default=0)
    return max(sum(nbytes * share_at(turns, i) for nbytes, turns in units) for i in range(max(1, number)))
