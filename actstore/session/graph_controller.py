"""The policy "auto" of a compiled model: its graphs follow a plan, and the store keeps what they save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from actstore.accuracy import Sampler
from actstore.accuracy.influence.influence import Influence
from actstore.auto.controller import AutoController
from actstore.base.ledger import Ledger
from actstore.compiled.budget.lossy import LossyModules
from actstore.compiled.budget.plan import GraphPlan, RegionBudget
from actstore.errors import CapacityError
from actstore.plan.build import noise_of
from actstore.plan.profile import Profile, UnitBytes
from actstore.policy import Policy, Rules
from actstore.store.tierset import TierSet

log = logging.getLogger("actstore")

CODEC = "int8"  # the decision of eager steps whose errors are those of the codec of a plan


class EagerObservers(NamedTuple):
    """Observers of a store whose figures of eager steps are not those of graphs."""

    ledger: Ledger
    sampler: Sampler
    influence: Influence | None

    def close(self) -> None:
        """Forget what eager steps have shown."""
        self.sampler.resume(self.sampler.step)
        if self.influence is not None:
            self.influence.close()


class GraphController:
    """The controller of a store whose model is compiled within a budget.

    Where payloads may lose, the first steps run eagerly under another controller, which measures what their errors do
    to the gradients. Then the model is compiled.

    Parameters
    ----------
    call : the model, and its compiled call
    observers : of eager steps
    max_noise : variance that payloads may add to the gradients, as a fraction of their variance from batch to batch

    Attributes
    ----------
    eager : the controller of the first steps; None behind them, and where all payloads are exact
    """

    name = "auto"
    gauge = None

    def __init__(
        self,
        budget: RegionBudget,
        call: tuple[Module, Callable[..., Any]],
        observers: EagerObservers,
        eager: AutoController | None,
        max_noise: float,
    ) -> None:
        self._budget = budget
        self._call = call
        self._observers = observers
        self.eager = eager
        self._max_noise = max_noise
        self._rules = Rules([])
        if eager is None:
            self._compile()

    @property
    def lossy(self) -> LossyModules | None:
        """Modules that may lose; None for none, or while eager steps measure them."""
        return self._budget.lossy

    @property
    def plan(self) -> GraphPlan | None:
        """Plan of the compiled model; None until its first step."""
        return self._budget.plan

    def next(self, place: TierSet, modules: Iterable[tuple[str, Module]], /) -> Policy:
        """Return the rules of an eager step, or those that keep all that the graphs save: it leaves inside of them."""
        if self.eager is not None:
            rules = self._next_eager(self.eager, place, modules)
            if rules is not None:
                return rules
        plan = self.plan
        place.engine.resize(plan.window if plan is not None and plan.window else self._budget.windows[0])
        return self._rules

    def _next_eager(
        self, eager: AutoController, place: TierSet, modules: Iterable[tuple[str, Module]]
    ) -> Policy | None:
        """Return the rules of the next eager step; None where they have shown enough, and the model is compiled."""
        why = ""
        try:
            rules = eager.next(place, modules)
            if eager.plan is None:
                return rules
        except CapacityError as error:  # of eager steps: those of a graph need less
            why = str(error)
        lossy = lossy_modules(eager.probes.profile(place.device.torch_device), self._max_noise)
        if why and not lossy.any:
            log.warning("the plan of the compiled model will be exact: its noise was not measured: %s", why)
        self._leave(eager, lossy)
        return None

    def _leave(self, eager: AutoController, lossy: LossyModules) -> None:
        """End the eager steps."""
        eager.close()
        self.eager = None
        self._budget.allow_loss(lossy)
        self._observers.close()
        self._compile()

    def _compile(self) -> None:
        """Let the model run as it is compiled."""
        model, compiled = self._call
        model._compiled_call_impl = compiled
        self._observers.ledger.budget.set(inf)

    def begin(self) -> None:
        """Begin the step, which an eager controller measures."""
        if self.eager is not None:
            self.eager.begin()

    def watching(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return the pack hook as it is."""
        return pack

    def end_forward(self, error: BaseException | None, /) -> None:
        """End the forward, which may have failed with `error`."""
        if self.eager is not None:
            self.eager.end_forward(error)

    def state(self) -> dict[str, Any]:
        """Return the noise that was measured. Another process has graphs and a plan of its own."""
        return {"plan": None, "noise": None if self.lossy is None else dict(self.lossy.noise)}

    def resume(self, state: dict[str, Any], place: TierSet, /) -> str:
        """Go on with the noise that was measured, without eager steps."""
        noise = state.get("noise")
        if self.eager is None:
            return ""
        if noise is None:
            return "eager steps were still measured when the state was saved: measured again"
        self._leave(self.eager, LossyModules(noise))
        return ""

    def close(self) -> None:
        """Release the measurements of eager steps."""
        if self.eager is not None:
            self.eager.close()


def lossy_modules(profile: Profile, max_noise: float) -> LossyModules:
    """Return the modules whose payloads may lose: those that save most bytes for their noise, within the limit.

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
