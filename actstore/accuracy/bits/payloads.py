"""Payloads, their candidates, and choices among these."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Literal

from actstore.base.spec import Site, Spec
from actstore.base.units import format_nbytes
from actstore.errors import ConfigError
from actstore.policy import Decision, Keep, Policy, Rules, parse_decision
from actstore.policy.pattern import Pattern

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decision for a payload, with its cost.

    Attributes
    ----------
    decision : policy text, such as ``int4(group=32, round=dither)``
    nbytes : bytes of the payload
    error : squared relative error, ``|x' - x|**2 / |x|**2``
    ms : time of encode and decode; 0 where it was not measured
    bias : the part of the error that does not average out, relative to the payload: see `Trials`
    """

    decision: str
    nbytes: int
    error: float
    ms: float = 0.0
    bias: float = 0.0


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The variance of the weight gradients, summed over all weights, as a function of a payload's squared error.

    With one point it is proportional to the error, which holds for every small error, and for inputs of linear layers
    at any size. With several points it follows straight lines in log-log scale: the effect of errors under an
    exponential grows faster than the errors.

    Attributes
    ----------
    points : squared relative error above 0, and the variance there
    """

    points: tuple[tuple[float, float], ...]

    def at(self, error: float) -> float:
        """Return the variance at a squared error: proportional below the first point, extrapolated beyond the last."""
        points = sorted(self.points)
        if not error or not points:
            return 0.0
        (x, y), *more = points
        slope = 1.0
        for further, higher in more:
            if error <= x or not 0 < y <= higher or further == x:
                break
            slope = max(1.0, log(higher / y) / log(further / x))
            if error <= further or (further, higher) == points[-1]:
                break
            x, y = further, higher
        return y * exp(slope * log(error / x)) if error > x and slope > 1 else y * error / x


@dataclass(frozen=True, slots=True)
class SitePayload:
    """Payloads of one site in a step.

    Attributes
    ----------
    site : the first site that saves it
    numel : number of elements
    sensitivity : sensitivity of the weight gradients to its errors
    candidates : one for each decision
    readers : other sites that save the same storage, and share the payload under the same decision
    """

    site: Site
    numel: int
    sensitivity: Sensitivity
    candidates: tuple[Candidate, ...]
    readers: tuple[Site, ...] = ()

    def up_to(self, error: float) -> SitePayload:
        """Return the same payload without candidates of a larger squared relative error."""
        return replace(self, candidates=tuple(one for one in self.candidates if one.error <= error))


@dataclass(frozen=True)
class Choice:
    """A candidate for each payload.

    Attributes
    ----------
    decisions : policy text by site
    nbytes : bytes of all payloads
    variance : predicted variance of the weight gradients, in the unit of the sensitivities
    ms : time of encode and decode, as far as it was measured
    numel : number of elements of all payloads
    minimized : "bytes" or "variance"
    bound : lower bound of the minimized figure within the limit
    price : amount of the minimized figure that one more unit of the limit saves, where decisions could be mixed
    per : whether payloads of one "module" or one "site" share a decision
    """

    decisions: Mapping[Site, str]
    nbytes: int
    variance: float
    ms: float
    numel: int
    minimized: Literal["bytes", "variance"]
    bound: float
    price: float
    per: Literal["module", "site"]

    @property
    def bits(self) -> float:
        """Mean bits per element."""
        return 8 * self.nbytes / self.numel if self.numel else 0.0

    @property
    def gap(self) -> float:
        """Largest possible distance from the optimum, as a fraction of the choice's own figure."""
        value = float(self.nbytes if self.minimized == "bytes" else self.variance)
        return max(0.0, value - self.bound) / value if value else 0.0

    @property
    def certificate(self) -> str:
        """Prediction and bound in one line."""
        least = f"{self.bound:.3g}" if self.minimized == "variance" else format_nbytes(self.bound)
        return (
            f"{format_nbytes(self.nbytes)}, {self.bits:.2f} bits an element, variance {self.variance:.3g}; no choice "
            f"has less {self.minimized} than {least}, within {100 * self.gap:.2f} % of optimal"
        )

    @property
    def policy(self) -> Policy:
        """Rules by module, whose text can be written down; a function of the site where decisions are by site."""
        return self.rules() if self.per == "module" else _BySite(self.decisions)

    def rules(self) -> Rules:
        """Return the choice as rules; a site outside of it follows the rule of its enclosing module, or is kept.

        Raises
        ------
        ConfigError : sites of one module have different decisions, which no rule can express
        """
        wanted: dict[str, str] = {}
        for site, decision in self.decisions.items():
            if wanted.setdefault(_pattern(site), decision) != decision:
                raise ConfigError(
                    f"sites of {_pattern(site) or 'the model itself'!r} are decided differently, and a rule names "
                    "modules only. Use `policy`, tag the tensors (actstore.tag), or choose per='module'.",
                    module=site.name,
                )
        default = parse_decision(wanted.pop("", "keep"))
        return Rules(_generalised(wanted), default)


class _BySite:
    """Policy that decides by site."""

    def __init__(self, decisions: Mapping[Site, str]) -> None:
        self._decisions = {site: parse_decision(text) for site, text in decisions.items()}

    def __call__(self, site: Site, spec: Spec) -> Decision:
        return self._decisions.get(site, Keep())


def tied(payloads: Sequence[SitePayload], per: Literal["module", "site"]) -> list[list[int]]:
    """Return the indices of payloads by group of one decision, in the order of the first of each.

    Raises
    ------
    ConfigError : `per` is neither "module" nor "site"
    """
    if per not in ("module", "site"):
        raise ConfigError(f"per={per!r}: must be 'module' or 'site'.")
    leader: dict[object, object] = {}

    def find(key: object) -> object:
        while (above := leader.setdefault(key, key)) != key:
            key = above
        return key

    def keys(payload: SitePayload) -> list[object]:
        sites = (payload.site, *payload.readers)
        return [_pattern(site) if per == "module" else site for site in sites]

    for payload in payloads:
        first, *others = keys(payload)
        for other in others:
            leader[find(other)] = find(first)
    groups: dict[object, list[int]] = {}
    for index, payload in enumerate(payloads):
        groups.setdefault(find(keys(payload)[0]), []).append(index)
    return list(groups.values())


def _pattern(site: Site) -> str:
    return f"{site.name or '*'}/{site.tag}" if site.tag else site.name


def _inner_first(patterns: Iterable[str]) -> list[str]:
    """Return patterns in an order where a module's rule precedes those of enclosing modules, and tags precede all."""
    return sorted(patterns, key=lambda name: (-name.count("."), "/" not in name))


def _generalised(wanted: Mapping[str, str]) -> list[tuple[str, Decision]]:
    """Return rules with ``*`` for numbers, after the rules of modules that differ from most of their kind."""
    kinds: dict[str, list[str]] = {}
    for name in _inner_first(wanted):
        kinds.setdefault(_NUMBER.sub("*", name), []).append(name)
    rules = []
    for kind, names in kinds.items():
        usual, count = Counter(wanted[name] for name in names).most_common(1)[0]
        if count == 1 or _covers_others(kind, names, wanted):
            rules += [(name, parse_decision(wanted[name])) for name in names]
            continue
        rules += [(name, parse_decision(wanted[name])) for name in names if wanted[name] != usual]
        rules.append((kind, parse_decision(usual)))
    return rules


def _covers_others(kind: str, names: Sequence[str], wanted: Iterable[str]) -> bool:
    """Return whether the glob of a kind covers modules of another kind, as ``a.*.*.b`` covers ``a.x.0.b``.

    Modules further inside have their rules before it, and modules further outside have too few dots for it.
    """
    glob, place = Pattern.parse(kind), (kind.count("."), "/" in kind)
    return any(
        glob.covers(*other.split("/"))
        for other in wanted
        if (other.count("."), "/" in other) == place and other not in names
    )
