"""Measurements of several ranks as those of one: the slowest decides times, the largest bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from actstore.auto.profiler import Sample
from actstore.plan.profile import UnitBytes, UnitFigures
from actstore.plan.solver.chain import Links
from actstore.plan.wish import Wish


def sample_of(values: dict[str, Any]) -> Sample:
    """Build a sample from its `asdict`."""
    figures = {unit: [_figures_of(each) for each in of_unit] for unit, of_unit in values["figures"].items()}
    return Sample(**{**values, "figures": figures})


def _figures_of(values: dict[str, Any]) -> UnitFigures:
    parts = {name: UnitBytes(**part) for name, part in values["parts"].items()}
    return UnitFigures(**{**values, "parts": parts})


def slowest_sample(samples: Sequence[Sample]) -> Sample:
    """Return the sample that took longest, with the most bytes of all in each part of each unit."""
    first, *others = sorted(samples, key=lambda sample: -sample.total)
    figures = dict(first.figures)
    for other in others:
        for unit, theirs in other.figures.items():
            ours = figures.get(unit, theirs)
            if [each.decision for each in ours] == [each.decision for each in theirs]:
                figures[unit] = [_with_most_bytes(*pair) for pair in zip(ours, theirs, strict=True)]
    calls = {unit: max(sample.calls.get(unit, 0) for sample in samples) for unit in figures}
    turns = {unit: _most(unit, samples) for unit in first.turns}
    return replace(first, figures=figures, calls=calls, turns=turns)


def _most(unit: str, samples: Sequence[Sample]) -> list[int]:
    """Return the most calls of a unit at each turn; all at one turn, where ranks have other numbers of turns."""
    numbers = {len(turns) for sample in samples for turns in sample.turns.values()}
    nothing = [0] * max(numbers)
    found = [sample.turns.get(unit, nothing) for sample in samples]
    return [max(each) for each in zip(*found, strict=True)] if len(numbers) == 1 else [max(map(max, found))]


def _with_most_bytes(ours: UnitFigures, theirs: UnitFigures) -> UnitFigures:
    names = dict.fromkeys([*ours.parts, *theirs.parts])
    parts = {}
    for name in names:
        pair = asdict(ours.parts.get(name, UnitBytes())), asdict(theirs.parts.get(name, UnitBytes()))
        parts[name] = UnitBytes(**{field: max(each[field] for each in pair) for field in pair[0]})
    return replace(ours, parts=parts, transient=max(ours.transient, theirs.transient))


def slowest_links(links: Sequence[Links]) -> Links:
    """Return the links with the lowest rates of all."""
    lowest = {name: min(getattr(each, name) for each in links) for name in asdict(links[0])}
    return Links(**lowest)


def tightest_wish(wishes: Sequence[Wish]) -> Wish:
    """Return the wish with the lowest limits of all."""
    granted: dict[str, list[int]] = {}
    for place in ("host", "disk"):
        granted[place] = [limit for wish in wishes if (limit := getattr(wish, place)) is not None]
    return Wish(
        min(wish.device for wish in wishes),
        min(granted["host"], default=None),
        min(granted["disk"], default=None),
        min(wish.max_noise for wish in wishes),
    )
