"""Steps of a model that is compiled within a budget, and the modules in it that may be lossy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import Any

from torch.nn import Module

from actstore.accuracy import Sampler
from actstore.accuracy.influence.influence import Influence
from actstore.base.ledger import Ledger
from actstore.compiled.budget.lossy import LossyModules
from actstore.compiled.budget.plan import GraphPlan, RegionBudget
from actstore.plan.build import noise_of
from actstore.plan.profile import Profile, UnitBytes
from actstore.policy import Rules
from actstore.store.tierset import TierSet

log = logging.getLogger("actstore")

CODEC = "int8"  # the decision of eager steps whose errors are those of the codec of a plan


class GraphSteps:
    """The steps of a compiled model: its graphs follow a plan, and the store keeps what they save.

    Parameters
    ----------
    call : the model, and its compiled call
    ledger, sampler, influence : of the store; their figures of eager steps are not those of graphs
    max_noise : variance that payloads may add to the gradients, as a fraction of their variance from batch to batch
    """

    def __init__(
        self,
        budget: RegionBudget,
        call: tuple[Module, Callable[..., Any]],
        ledger: Ledger,
        sampler: Sampler,
        influence: Influence | None,
        max_noise: float,
    ) -> None:
        self.max_noise = max_noise
        self._budget = budget
        self._call = call
        self._ledger, self._sampler, self._influence = ledger, sampler, influence
        self._rules = Rules([])

    @property
    def plan(self) -> GraphPlan | None:
        """Plan of the compiled model; None until its first step."""
        return self._budget.plan

    @property
    def lossy(self) -> LossyModules | None:
        """Modules that may be lossy; None for none, or while eager steps measure them."""
        return self._budget.lossy

    @property
    def noise(self) -> dict[str, float | None] | None:
        """The noise that eager steps have measured, by module; None where they have not."""
        return None if self.lossy is None else dict(self.lossy.noise)

    def start(self, lossy: LossyModules | None) -> None:
        """Let the model run as it is compiled, with lossy payloads in these modules."""
        self._budget.allow_loss(lossy)
        self._sampler.resume(self._sampler.step)  # forgets what eager steps have shown
        if self._influence is not None:
            self._influence.close()
        model, compiled = self._call
        model._compiled_call_impl = compiled
        self._ledger.budget.set(inf)

    def start_after(self, profile: Profile, why: str) -> None:
        """Let the model run as it is compiled, after eager steps, which `why` has ended where they lack memory."""
        lossy = lossy_modules(profile, self.max_noise)
        if why and not lossy.any:
            log.warning("the plan of the compiled model will be exact: its noise was not measured: %s", why)
        self.start(lossy)

    def resume(self, noise: dict[str, float | None]) -> None:
        """Let the model run as it is compiled, with the noise that another process has measured."""
        self.start(LossyModules(noise))

    def next(self, place: TierSet) -> Rules:
        """Return rules that keep all that the graphs save: encoding and offloading happen inside of the graphs."""
        plan = self.plan
        place.engine.resize(plan.window if plan is not None and plan.window else self._budget.windows[0])
        return self._rules


def lossy_modules(profile: Profile, max_noise: float) -> LossyModules:
    """Return the modules that may be lossy: those that save more bytes for their noise come first, within the limit.

    The noise is that of int8 for all that a module saves in an eager step. The graphs of the compiled model save
    other tensors of it, with errors of the same size. A module whose eager payloads were all exact may read there what
    another one of its unit has made: its noise is that of the unit.

    Parameters
    ----------
    max_noise : variance that payloads may add to the gradients, as a fraction of their variance from batch to batch
    """
    found: dict[str, float | None] = {}
    prices: dict[str, tuple[float, float]] = {}
    for unit in profile.units:
        figures = profile.figures[unit.kind].get(CODEC)
        for part in {"": None, **dict.fromkeys(unit.parts)} if unit.name else ():
            name = f"{unit.name}.{part}" if part else unit.name
            found[name] = None
            if figures is None:
                continue
            noise, saved = noise_of(unit, part, figures), figures.parts.get(part, UnitBytes()).saved
            if not noise:
                noise = sum(noise_of(unit, other, figures) for other in figures.parts) or inf
                saved = figures.total("saved")
            if noise < inf:
                prices[name] = (noise / max(1, saved), noise)
    total = 0.0
    for name, (_, noise) in sorted(prices.items(), key=lambda item: (item[1], item[0])):
        if total + noise <= max_noise:
            total += noise
            found[name] = noise
    return LossyModules(found)
