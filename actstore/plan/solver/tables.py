"""Tables: the numbers of a chain as arrays, checked once, with the links reduced to the one or two lanes that count."""

from __future__ import annotations

from dataclasses import fields
from math import inf, isfinite, isnan
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from actstore.errors import ConfigError
from actstore.plan.solver.chain import Layer, LayerChain, LayerOption, Limits, Links

Floats = NDArray[np.float64]

UNLIMITED_RATE = 1e30  # bytes/ms: stands for infinity, as its product with zero milliseconds must be zero
SLACK = 1e-9  # of a limit: the excess that sums of floats may have
FORWARD, BACKWARD = 0, 1
DIRECTIONS = ("forward", "backward")


class Tables:
    """Arrays of a chain and its limits, for the timeline, the relaxation and the search.

    Tables have the indices [layer, option]. A layer with fewer options than the longest repeats its first one, and
    `counts` says how many are real. Pairs have the direction as index: `FORWARD`, `BACKWARD`.

    Attributes
    ----------
    plain : ms of a step that keeps everything
    compute : pair of lists, ms of each layer
    extra, peak : pairs of tables: ms that an option adds, and bytes on the device while its layer runs
    held : bytes on the device between forward and backward
    near : bytes that leave the device and return to it
    far : of these, bytes that go on to the disk from host memory; zero where the device is the host
    host, disk, error : values that count against those limits
    crossing : ms that each millisecond of both directions at the turn costs, beyond the two of one after the other;
        more than zero where the directions slow each other down by more than half
    near_rate, far_rate : pairs, bytes/ms; bytes for the disk cross the first lane before, so `far_rate` is at most
        `near_rate`

    Raises
    ------
    ConfigError : an invalid number (negative, NaN, a rate of zero ...), a layer without options, a peak that excludes
        held bytes, bytes that reach the disk without crossing the link
    """

    def __init__(self, chain: LayerChain, limits: Limits) -> None:
        _check_limits(chain, limits)
        for layer in chain.layers:
            _check_layer(layer, chain.links)
        self.chain = chain
        self.limits = limits
        self.plain = chain.plain
        self.counts = [len(layer.options) for layer in chain.layers]
        self.compute = [layer.forward for layer in chain.layers], [layer.backward for layer in chain.layers]
        self.extra = self._table("forward"), self._table("backward")
        self.peak = self._table("forward_peak"), self._table("backward_peak")
        self.held = self._table("held")
        self.host = self._table("host")
        self.disk = self._table("disk")
        self.error = self._table("error")
        links = chain.links
        link = (links.out, links.back)
        disk = (links.disk_out, links.disk_back)
        self.near = self.disk if links.on_host else self._table("link")
        self.far = np.zeros_like(self.disk) if links.on_host else self.disk
        self.near_rate = [min(rate, UNLIMITED_RATE) for rate in (disk if links.on_host else link)]
        self.far_rate = [min(rates) for rates in zip(self.near_rate, disk, strict=True)]

        kept = links.disk_both_ways if links.on_host else links.both_ways
        self.crossing = max(0.0, 1 / min(kept, links.disk_both_ways if self.two_lanes else 1.0) - 2)

    @property
    def two_lanes(self) -> bool:
        """True where bytes wait in host memory for the disk."""
        return bool(self.far.any())

    def _table(self, name: str) -> Floats:
        layers, longest = self.chain.layers, max(self.counts, default=0)
        rows = [[float(getattr(option, name)) for option in layer.options] for layer in layers]
        return np.array([row + row[:1] * (longest - len(row)) for row in rows]).reshape(len(rows), longest)


def slack(limit: float) -> float:
    """Return the excess of a sum over `limit` that still counts as within it."""
    return SLACK * limit if isfinite(limit) else 0.0


def _check_limits(chain: LayerChain, limits: Limits) -> None:
    for name in ("device", "host", "disk", "error"):
        value = getattr(limits, name)
        if isnan(value) or value < 0:
            raise ConfigError(f"the {name} limit is {value}: must be 0 or more.")
    for name in ("out", "back", "disk_out", "disk_back"):
        rate = getattr(chain.links, name)
        if isnan(rate) or rate <= 0:
            raise ConfigError(
                f"`{name}`={rate} bytes/ms: must be more than 0. Leave out the options that need a "
                "link which does not exist."
            )
    for name in ("both_ways", "disk_both_ways"):
        part = getattr(chain.links, name)
        if not 0 < part <= 1:
            raise ConfigError(
                f"`{name}`={part}: must be more than 0 and at most 1, the part of its rate that a link keeps in each "
                "direction beside the other."
            )
    if not 0 <= chain.rest < inf:
        raise ConfigError(f"rest={chain.rest} ms: must be finite and 0 or more.")


def _check_layer(layer: Layer, links: Links) -> None:
    if not layer.options:
        raise ConfigError(f"layer {layer.name} has no option. Give it at least `keep`.")
    for way, time in (("forward", layer.forward), ("backward", layer.backward)):
        if not 0 <= time < inf:
            raise ConfigError(f"{way} of layer {layer.name} takes {time} ms: must be finite and 0 or more.")
        for option in layer.options:
            if not 0 <= time + getattr(option, way) < inf:
                _refuse(layer, option, f"{way} would take {time + getattr(option, way):g} ms.")
    for option in layer.options:
        for field in fields(option):
            if field.name in ("decision", "forward", "backward"):
                continue
            value = getattr(option, field.name)
            if not 0 <= value < inf:
                _refuse(layer, option, f"{field.name}={value}: must be finite and 0 or more.")
        least = min(option.forward_peak, option.backward_peak)
        if least < option.held * (1 - SLACK):
            _refuse(layer, option, f"holds {option.held:.0f} bytes, and its peak is {least:.0f}: must include them.")
        if not links.on_host and option.disk > option.link * (1 + SLACK):
            _refuse(
                layer,
                option,
                f"{option.disk:.0f} bytes go to the disk, and {option.link:.0f} cross the link: must include them.",
            )


def _refuse(layer: Layer, option: LayerOption, what: str) -> NoReturn:
    raise ConfigError(f"option {option.decision!r} of layer {layer.name}: {what}")
