"""The numbers of a chain as arrays, checked once, with the links reduced to the one or two lanes that count."""

from __future__ import annotations

from dataclasses import fields
from math import inf, isfinite, isnan
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from actstore.errors import ConfigError
from actstore.plan.solver.chain import Layer, LayerChain, LayerOption, Limits, Links

Floats = NDArray[np.float64]

FAST = 1e30  # bytes/ms: stands for an infinite rate where a product with zero milliseconds must be zero
SLACK = 1e-9  # of a limit: what sums of floats may exceed it by
FORWARD, BACKWARD = 0, 1
DIRECTIONS = ("forward", "backward")


class Tables:
    """What the timeline, the relaxation and the search read of a chain and its limits.

    Tables are indexed [layer, option]; a layer with fewer options than the longest repeats its first one there, and
    `counts` says how many are real. Pairs are indexed by direction: `FORWARD`, `BACKWARD`.

    Attributes
    ----------
    plain : ms of a step that keeps everything
    compute : pair of lists, ms of each layer
    extra, peak : pairs of tables, ms that an option adds and bytes on the device while its layer runs
    held : bytes on the device between forward and backward
    near : bytes that leave the device and come back to it
    far : of these, bytes that go on to the disk from host memory; zero where the device is the host
    host, disk, error : what counts against those limits
    crossing : what a millisecond costs that both directions run at the turn, beyond the two that they take one after
        the other: more than nothing where they hinder each other by more than half
    near_rate, far_rate : pairs, bytes/ms; bytes for the disk cannot come faster than they cross the first lane, so
        that is the most that `far_rate` can be

    Raises
    ------
    ConfigError : a number that cannot be (negative, NaN, a rate of zero ...), a layer without options, peaks without
        what is held, bytes that reach the disk and did not cross the link
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
        self.near_rate = [min(rate, FAST) for rate in (disk if links.on_host else link)]
        self.far_rate = [min(rates) for rates in zip(self.near_rate, disk, strict=True)]

        kept = links.disk_both_ways if links.on_host else links.both_ways
        self.crossing = max(0.0, 1 / min(kept, links.disk_both_ways if self.two_lanes else 1.0) - 2)

    @property
    def two_lanes(self) -> bool:
        """Whether anything waits in host memory for the disk."""
        return bool(self.far.any())

    def _table(self, name: str) -> Floats:
        layers, longest = self.chain.layers, max(self.counts, default=0)
        rows = [[float(getattr(option, name)) for option in layer.options] for layer in layers]
        return np.array([row + row[:1] * (longest - len(row)) for row in rows]).reshape(len(rows), longest)


def slack(limit: float) -> float:
    """By how much a sum may exceed `limit` and still count as within it."""
    return SLACK * limit if isfinite(limit) else 0.0


def _check_limits(chain: LayerChain, limits: Limits) -> None:
    for name in ("device", "host", "disk", "error"):
        value = getattr(limits, name)
        if isnan(value) or value < 0:
            raise ConfigError(f"the {name} limit is {value}; give zero or more")
    for name in ("out", "back", "disk_out", "disk_back"):
        rate = getattr(chain.links, name)
        if isnan(rate) or rate <= 0:
            raise ConfigError(
                f"the rate `{name}` is {rate} bytes/ms; give more than zero, and leave out the options that need a "
                "link which does not exist"
            )
    for name in ("both_ways", "disk_both_ways"):
        part = getattr(chain.links, name)
        if not 0 < part <= 1:
            raise ConfigError(
                f"each direction of a link keeps the part {part} of its rate beside the other (`{name}`); give more "
                "than 0 and at most 1"
            )
    if not 0 <= chain.rest < inf:
        raise ConfigError(f"the time that no layer takes is {chain.rest} ms; give zero or more, and finite")


def _check_layer(layer: Layer, links: Links) -> None:
    if not layer.options:
        raise ConfigError(f"layer {layer.name} has no option; give it at least `keep`")
    for way, time in (("forward", layer.forward), ("backward", layer.backward)):
        if not 0 <= time < inf:
            raise ConfigError(f"{way} of layer {layer.name} takes {time} ms; give zero or more, and finite")
        for option in layer.options:
            if not 0 <= time + getattr(option, way) < inf:
                _refuse(layer, option, f"{way} would take {time + getattr(option, way):g} ms")
    for option in layer.options:
        for field in fields(option):
            if field.name in ("decision", "forward", "backward"):
                continue
            value = getattr(option, field.name)
            if not 0 <= value < inf:
                _refuse(layer, option, f"{field.name} is {value}; give zero or more, and finite")
        least = min(option.forward_peak, option.backward_peak)
        if least < option.held * (1 - SLACK):
            _refuse(layer, option, f"holds {option.held:.0f} bytes, and its peak is {least:.0f}; a peak includes them")
        if not links.on_host and option.disk > option.link * (1 + SLACK):
            _refuse(
                layer,
                option,
                f"{option.disk:.0f} bytes go to the disk, and {option.link:.0f} cross the link; count them there, too",
            )


def _refuse(layer: Layer, option: LayerOption, what: str) -> NoReturn:
    raise ConfigError(f"option {option.decision!r} of layer {layer.name}: {what}")
