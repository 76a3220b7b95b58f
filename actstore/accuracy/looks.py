"""Ordinary lossy steps to look at, from which the sensitivity of each payload follows at small and at large errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actstore.accuracy.effect import GradientEffect
from actstore.accuracy.payloads import Payload, Sensitivity, kind_of
from actstore.policy import Decision, parse_decision
from actstore.spec import Site, Spec

SMALL = "int4(round=dither)"
LARGE = "int2(round=dither)"


@dataclass(frozen=True)
class Look:
    """A policy to run one sampled step with.

    Attributes
    ----------
    small, large : decisions
    kind : module names, ``*`` for numbers, whose payloads are decided `large`; empty for none
    sites : names of the sites that are looked at in this step
    """

    small: Decision
    large: Decision
    kind: str
    sites: frozenset[str]

    def __call__(self, site: Site, spec: Spec) -> Decision:
        return self.large if self.kind and kind_of(site) == self.kind else self.small


def looks(payloads: Sequence[Payload], small: str = SMALL, large: str = LARGE) -> list[Look]:
    """One step with small errors everywhere, and one for each kind of module with large ones there.

    Only one kind has large errors at a time: with large ones everywhere the gradients, which the prediction takes for
    exact, would be mostly noise.

    Parameters
    ----------
    payloads : of all sites that matter; their sensitivities do not
    small, large : lossy codecs, as policy text. Errors between theirs are interpolated
    """
    kinds: dict[str, list[str]] = {}
    for payload in payloads:
        kinds.setdefault(kind_of(payload.site), []).append(str(payload.site))
    few, much = parse_decision(small), parse_decision(large)
    every = frozenset(name for names in kinds.values() for name in names)
    return [Look(few, much, "", every), *(Look(few, much, kind, frozenset(names)) for kind, names in kinds.items())]


def sensitivities(looked: Iterable[tuple[Look, GradientEffect]]) -> dict[str, Sensitivity]:
    """What the steps tell of each site: `report().gradients` of each look, as `SiteEffect.by_weight`.

    Returns
    -------
    dict : by the name of the site; one that was not predicted is not there
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for look, effect in looked:
        for site in effect.sites:
            if site.site in look.sites and site.variance and site.sensitivity and site.by_weight is not None:
                points.setdefault(site.site, []).append((site.variance / site.sensitivity, site.by_weight))
    return {name: Sensitivity(tuple(found)) for name, found in points.items()}
