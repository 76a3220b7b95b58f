"""Observation of sampled steps: the effect of lossy payloads on gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from weakref import ref

import torch

from actstore.accuracy.influence.batch_noise import Minibatch
from actstore.accuracy.influence.effect import GradientEffect, SiteEffect
from actstore.accuracy.influence.node_error import is_sum
from actstore.accuracy.influence.prediction import UNREACHED, PredictedStep, Relative
from actstore.base.ledger import Account, Ledger


def growth(
    step: PredictedStep, norms: Mapping[int, float], shares: Mapping[int, float] | None = None
) -> dict[int, float]:
    """Return the energy at all weights for each unit of noise energy that comes to a node, by the node's number.

    norms : the norms of the step, on the host
    shares : the factor of the energy at a weight, by the weight's identity; by default 1
    """
    reach: dict[int, float] = {}
    for number in step.walk.first_weights_first():
        seen = step.seen.get(number)
        came = sum(norms[i] ** 2 for i in seen.incoming) if seen is not None else 0.0
        if seen is None or not came:
            reach[number] = 0.0
            continue
        point, total = step.walk.points[number], 0.0
        for k, i in seen.outgoing.items():
            gain, edge = norms[i] ** 2 / came, point.edges[k]
            if edge is None:
                continue
            if k not in point.weights:
                total += gain * reach.get(edge[0], 0.0)
                continue
            share = 1.0 if shares is None else shares.get(edge[1], 0.0)
            if k in seen.white:
                gain = norms[seen.white[k]] ** 2
            elif is_sum(point.name, k):
                gain = 1.0
            total += share * gain
        reach[number] = total
    return reach


def variances(
    step: PredictedStep,
    norms: Mapping[int, float],
    shares: Mapping[int, float] | None = None,
    level: float | None = None,
) -> dict[Account, float]:
    """Return the predicted variance of all weight gradients, summed, by the site that causes it; as `growth`.

    level : relative error of payloads, one of the step's levels; by default the measured one
    """
    reach = growth(step, norms, shares)
    found: dict[Account, float] = {}
    for number, seen in step.seen.items():
        point = step.walk.points[number]
        for account, size, sizes in seen.local:
            if size != level:
                continue
            for k, i in sizes.items():
                edge = point.edges[k]
                if edge is not None:
                    further = reach.get(edge[0], 0.0)
                    if k in point.weights:
                        further = 1.0 if shares is None else shares.get(edge[1], 0.0)
                    found[account] = found.get(account, 0.0) + norms[i] ** 2 * further
            found.setdefault(account, 0.0)
    return found


REST_STEPS = 100  # without observation, after a step without lossy payloads


class Influence:
    """Observer of steps of one store, one at a time: `begin`, `end_forward`, and `read` for the figures.

    It releases everything but the figures when the step after the next one begins.

    Attributes
    ----------
    rest : steps left without observation

    Notes
    -----
    Not thread-safe: one thread enters the store during an observed step. The host waits for the device in `read` only.
    """

    def __init__(self, model: torch.nn.Module, ledger: Ledger, relative: Relative) -> None:
        self._model = ref(model)
        self._ledger = ledger
        self._relative = relative
        self._look: _Look | None = None  # the last observation
        self._before: _Look | None = None  # the one to show until the next backward
        self._open: PredictedStep | None = None  # the step whose forward has yet to end
        self._levels: tuple[float, ...] = ()  # levels of the next step
        self._asked = False
        self.rest = 0

    def ask(self, levels: tuple[float, ...] = ()) -> None:
        """Observe the next sampled step in whole, even if the last one had no lossy payloads.

        levels : relative errors of payloads to include in `SiteEffect.curve`
        """
        self.rest, self._levels, self._asked = 0, levels, True

    def resume(self, rest: int) -> None:
        """Observe no step before this number of further ones, unless asked."""
        self.rest = rest

    def begin(self, *, sampled: bool) -> PredictedStep | None:
        """Begin a step, and return its observer; None for a step without observation."""
        model, last = self._model(), self._look
        self.end_forward()
        if model is None:
            return None
        self.rest -= 1
        if not sampled or self.rest > 0:
            if last is not None:
                last.follow(model)
            self._settle()
            return None
        minibatch = Minibatch(self._ledger) if last is None or last.parts is None else last.parts[1].following()
        self._settle()
        if last is not None and last.came:
            self._before = last
        step = PredictedStep(self._ledger, self._relative, self._levels, whole=self._asked)
        self._levels, self._asked = (), False
        self._look, self._open = _Look(step, minibatch), step
        minibatch.begin(model)
        return step

    def _settle(self) -> None:
        """Release what no step needs any more."""
        look, before = self._look, self._before
        if before is not None:
            before.settle()
        if look is not None and look.came:
            look.settle()
        elif look is not None and look.gone:
            look.close()
            self._look = None

    def end_forward(self) -> None:
        """End the forward, which may have failed."""
        step, self._open = self._open, None
        if step is not None:
            step.note()
            self.rest = 0 if step.reasons else REST_STEPS

    def read(self) -> GradientEffect | None:
        """Return the figures of the last observed step that had a backward. The host waits for the device."""
        found = None if (latest := self.latest()) is None else latest()
        if found is None and self._before is not None:
            found = self._before.effect()
        return found

    def latest(self) -> Callable[[], GradientEffect | None] | None:
        """Return a function that reads the figures of the last observed step, now or later; None without a backward."""
        return self._look.effect if self._look is not None and self._look.came else None

    def close(self) -> None:
        """Remove all hooks from the model."""
        self.end_forward()
        if self._look is not None:
            self._look.close()
        self._look = self._before = None


class _Look:
    """Observation of a step, reduced to its figures once these are on the host.

    Attributes
    ----------
    parts : None for final figures
    """

    def __init__(self, step: PredictedStep, minibatch: Minibatch) -> None:
        self.parts: tuple[PredictedStep, Minibatch] | None = step, minibatch
        self._effect: GradientEffect | None = None
        self._made_of = (0, 0)  # counts of the norms and weights of `_effect`

    @property
    def came(self) -> bool:
        """True where the step has had a backward."""
        return self.parts is None or bool(self.parts[0].seen)

    @property
    def gone(self) -> bool:
        """True where no backward came, and none can come."""
        return not self.came and self.parts is not None and not self.parts[0].readers.alive

    def follow(self, model: torch.nn.Module) -> None:
        """Begin a step without observation, whose gradients give the noise."""
        if self.parts is not None:
            self.parts[1].follow(model)

    def settle(self) -> None:
        """Keep only the figures once they are on the host, as another step begins."""
        if self.parts is not None:
            step, minibatch = self.parts
            step.close()
            if step.norms.ready() and minibatch.ready():
                self.effect()
                self.parts = None

    def close(self) -> None:
        """Remove the hooks from the model."""
        if self.parts is not None:
            self.parts[1].close()

    def effect(self) -> GradientEffect | None:
        """Return the figures so far. The host waits for the device."""
        if self.parts is not None:
            step, minibatch = self.parts
            made_of = len(step.norms), minibatch.compared
            if self._made_of != made_of:
                self._made_of, self._effect = made_of, _figures(step, minibatch)
        return self._effect


def _figures(step: PredictedStep, minibatch: Minibatch) -> GradientEffect | None:
    square, noise = minibatch.read()
    if not square or not isfinite(square):  # an overflow of a loss scale
        return None
    norms = step.norms.read()
    found = variances(step, norms)
    shares, noise_by_weight = minibatch.shares()
    by_weight = variances(step, norms, shares)
    curves = [(level**2, variances(step, norms, shares, level)) for level in step.levels]
    sites = []
    for account, reason in step.reasons.items():
        if step.walk.full:
            reason = "the graph has more nodes than Python may look at"
        elif step.trouble:
            reason = step.trouble
        if reason or account not in found:
            sites.append(SiteEffect(str(account.site), None, None, reason or UNREACHED))
            continue
        variance, error = found[account] / square, norms[step.relatives[account]] ** 2
        sensitivity = variance / error if error else None
        nodes = tuple(sorted(step.nodes[account]))
        curve = tuple((error, one[account]) for error, one in curves)
        sites.append(SiteEffect(str(account.site), variance, sensitivity, "", by_weight[account], nodes, curve))
    return GradientEffect(tuple(sites), square**0.5, None if noise is None else noise / square, noise_by_weight)
