"""Modules of a compiled model that may lose, by the noise that eager steps have measured."""

from __future__ import annotations

from math import inf

from actstore.compiled.budget.lossy import LossyModules
from actstore.plan.build import noise_of
from actstore.plan.profile import Profile, UnitBytes

CODEC = "int8"  # the decision of eager steps whose errors are those of the codec of a plan


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
