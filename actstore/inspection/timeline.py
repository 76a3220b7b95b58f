"""Memory through one step: bytes of activations by module at each moment, beside all that the device has allocated."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from actstore.base.spec import Site
from actstore.display.naming import joined, layer_pattern
from actstore.session.report import SiteReport

MAX_BANDS = 8  # of layers, and one of the rest
MIN_SHARE = 0.01  # of the bytes at the peaks, of a band of its own
REST = "the rest"
OUTSIDE = str(Site("", 0)).split("[")[0]
_LAYER = re.compile(r"(.*?(?:^|\.)\d+)(?:\.|$)")  # a name up to its first index


@dataclass(frozen=True)
class MemoryPoint:
    """One moment of a step.

    Attributes
    ----------
    ms : time since the step began, without the time that the inspection took
    backward : whether backward had begun
    modules : bytes of activations on the compute device by the module that saved them
    allocated_bytes : all bytes of tensors on the device, the model's and the optimizer's among them; None where nothing
        counts them
    gradients_bytes : of the gradients that weights have
    """

    ms: float
    backward: bool
    modules: Mapping[str, int]
    allocated_bytes: int | None
    gradients_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Sum over the modules."""
        return sum(self.modules.values())


@dataclass(frozen=True)
class Timeline:
    """Memory through one step, under one policy.

    Attributes
    ----------
    policy : its text
    points : the moments, in order of time
    """

    policy: str
    points: tuple[MemoryPoint, ...]

    @property
    def peak(self) -> MemoryPoint:
        """The moment with the most held bytes."""
        return max(self.points, key=lambda point: point.held_bytes)

    @property
    def ms(self) -> float:
        """Duration of the step."""
        return self.points[-1].ms

    @property
    def backward_ms(self) -> float:
        """The time at which backward began; that of the last moment where none did."""
        return next((point.ms for point in self.points if point.backward), self.ms)


def layer_of(module: str) -> str:
    """Return the layer of a module: its name up to the first index, ``blocks.3`` for ``blocks.3.mlp.0``."""
    found = _LAYER.match(module)
    return found[1] if found else module or "(outside of the model)"


def bands_of(timelines: Sequence[Timeline]) -> dict[str, str]:
    """Return for each module the band of a picture that it belongs to.

    Layers with the same name but for their index share bands, each of consecutive ones. Layers that hold next to
    nothing at the peaks share the last band.
    """
    peaks: dict[str, int] = {}
    for line in timelines:
        for point in line.points:
            for module in point.modules:
                peaks.setdefault(layer_of(module), 0)
        for module, nbytes in line.peak.modules.items():
            peaks[layer_of(module)] += nbytes
    least = MIN_SHARE * sum(peaks.values())
    series: dict[str, list[str]] = {}
    for layer in peaks:
        series.setdefault(layer_pattern(layer), []).append(layer)
    large = [group for group in series.values() if sum(peaks[layer] for layer in group) >= least]
    room = MAX_BANDS // max(1, len(large))
    bands = dict.fromkeys(peaks, REST)
    for group in large:
        size = -(-len(group) // max(1, room))
        for begin in range(0, len(group), size):
            part = group[begin : begin + size]
            bands.update(dict.fromkeys(part, joined(part)))
    modules = {module for line in timelines for point in line.points for module in point.modules}
    return {module: bands[layer_of(module)] for module in sorted(modules)}


def holders(line: Timeline, most: int = 3) -> list[tuple[str, int]]:
    """Return the bands that hold most at the peak of a timeline, with their bytes."""
    bands, found = bands_of([line]), Counter[str]()
    for module, nbytes in line.peak.modules.items():
        found[bands[module]] += nbytes
    return found.most_common(most)


def decisions_of(bands: Mapping[str, str], sites: Iterable[SiteReport]) -> dict[str, str]:
    """Return for each band the decisions on its tensors, the one on the largest share first."""
    found: dict[str, Counter[str]] = {}
    for site in sites:
        name = site.site.split("[")[0]
        if (band := bands.get("" if name == OUTSIDE else name)) is not None:
            found.setdefault(band, Counter())[site.decision or "keep"] += site.saved_bytes
    return {band: ", ".join(text for text, _ in decisions.most_common()) for band, decisions in found.items()}


def labels_of(timelines: Sequence[Timeline], bands: Mapping[str, str]) -> list[str]:
    """Return the names of the bands in the order in which their modules first hold something, the rest last."""
    order = (bands[module] for line in timelines for point in line.points for module in point.modules)
    found = list(dict.fromkeys(order))
    return [label for label in found if label != REST] + [REST] * (REST in found)
