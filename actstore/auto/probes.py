"""Probes: decisions to try on units in the first steps, and the measurements of these tries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from hashlib import sha256
from math import inf
from statistics import median
from typing import Any
from weakref import WeakSet

import torch
from torch.nn import Module
from torch.optim import Optimizer

from actstore.accuracy.influence.batch_noise import samples_nbytes
from actstore.accuracy.influence.effect import GradientEffect
from actstore.auto.candidates import LOSSY, Candidates, OneLines, one_lines
from actstore.auto.forecast import Forecast
from actstore.auto.links import measure_links
from actstore.auto.machine import machine_of, memory_of
from actstore.auto.profiler import Profiler
from actstore.auto.sample import Sample, UnitCalls, scaled
from actstore.base.spec import Site
from actstore.model.units import digest_of
from actstore.plan.build import MIN_PART_SHARE
from actstore.plan.decisions import KEEP, RECOMPUTE, offloads
from actstore.plan.fields import read_as
from actstore.plan.profile import Profile, Unit, UnitFigures, medians
from actstore.plan.solver.chain import Links
from actstore.plan.values import Grants
from actstore.rerun.optimizers import SteppedOptimizers
from actstore.store.tierset import TierSet

SAMPLES_PER_DECISION = 3  # on each kind of unit
MAX_MEASURED_STEPS = 40  # before the first plan
SAME_SIZE_SHARE = 0.95  # of the largest step's bytes: the figures of steps that save less are scaled up

FiguresByKind = dict[str, dict[str, UnitFigures]]


class Probes:
    """Measurements of the steps of one store, under decisions that it proposes.

    The first step recomputes all that can be, and so needs the least memory. Later ones try one decision on each unit,
    the last units first, as far as the budget allows; equal units share their figures. Where steps differ in size, all
    figures are scaled to the largest of them.

    Parameters
    ----------
    before : earlier probes of the same model; their links and optimizers still hold

    Attributes
    ----------
    largest : bytes that plain autograd would hold in the largest step
    excess : bytes by which a step has exceeded the forecast for its own figures, at most
    """

    def __init__(self, profiler: Profiler, model: Module, grants: Grants, before: Probes | None = None) -> None:
        self.steps = 0
        self.largest = 0
        self.excess = 0.0
        self._profiler = profiler
        self._model = model
        self._grants = grants
        self._samples: dict[str, list[tuple[UnitFigures, int]]] = {}  # by unit, with the saved bytes of the step
        self._calls = UnitCalls()
        self._tries = Candidates(profiler, grants, self._calls)
        self._kinds: dict[str, str] = {}  # kinds of the units that ran, in the order of forward
        self._ran: Counter[str] = Counter()  # number of steps in which each unit ran
        self._rest: list[float] = []
        self._noise: dict[str, dict[str, float]] = {}  # by unit and child: see `Unit.noise`
        self._proposed: dict[str, str] = {}  # of the step that runs
        self._links: Links | None = None if before is None else before._links
        met: WeakSet[Optimizer] = WeakSet() if before is None else before._optimizers.found
        self._optimizers: SteppedOptimizers = SteppedOptimizers(model, met)

    @property
    def has_met(self) -> bool:
        """True where an optimizer of the model has stepped."""
        return bool(self._optimizers.found)

    def use(self, links: Links) -> None:
        """Set the rates of the links, instead of those that `propose` would measure."""
        self._links = links

    def close(self) -> None:
        """Remove the hook on optimizer steps."""
        self._optimizers.close()

    def grow(self, saved: int) -> None:
        """Raise the bytes of the largest step to those of a step."""
        self.largest = max(self.largest, saved)

    def shrink(self, saved: int) -> None:
        """Lower the bytes of the largest step."""
        self.largest = saved

    def least(self) -> dict[str, str]:
        """Return the decisions with the least memory, as far as known without a plan."""
        return self._tries.least()

    def limit(self, grants: Grants) -> None:
        """Set the grants that later proposals must fit."""
        self._grants = self._tries.grants = grants

    def state(self) -> dict[str, Any]:
        """Return the measurements as JSON values."""
        parts = self._profiler.separability
        return {
            "steps": self.steps,
            "largest": self.largest,
            "samples": {name: [[asdict(f), saved] for f, saved in each] for name, each in self._samples.items()},
            "tables": [self._calls.of, self._kinds, self._ran, self._noise],
            "turns": self._calls.turns,
            "rest": self._rest,
            "links": None if self._links is None else asdict(self._links),
            "modules": [sorted(names) for names in (self._profiler.writers, parts.seen, parts.bound)],
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Take over the measurements of another process."""
        self.steps, self.largest, self._rest = state["steps"], state["largest"], state["rest"]
        self._samples = {
            name: [(read_as(UnitFigures, f), saved) for f, saved in each] for name, each in state["samples"].items()
        }
        calls, self._kinds, ran, self._noise = state["tables"]
        self._calls = self._tries.calls = UnitCalls(calls, state.get("turns", {}))
        self._ran = Counter(ran)
        self._links = None if state["links"] is None else Links(**state["links"])
        parts = self._profiler.separability
        for names, found in zip((self._profiler.writers, parts.seen, parts.bound), state["modules"], strict=True):
            names.update(found)

    def add(self, sample: Sample, peak: float = 0.0) -> None:
        """Add a step, and its peak where that is to be compared with the forecast."""
        first = not self.steps
        self.steps += 1
        self._calls.add(sample)
        self.grow(sample.saved)
        self._ran.update(sample.figures.keys())
        for name, figures in sample.figures.items():
            if name not in self._kinds:
                self._kinds[name] = self._kind(name, figures[0].total("saved"))
            self._samples.setdefault(name, []).extend((one, sample.saved) for one in figures)
        if not first:  # the first step includes all one-time work
            self._rest.append(sample.rest)
        if not any(map(offloads, self._proposed.values())):  # copies in transit come on top
            decisions = {name: self._proposed.get(name, KEEP) for name in self._kinds}
            self.excess = max(self.excess, peak - self._forecast().peak(decisions))

    def propose(self, place: TierSet) -> dict[str, str] | None:
        """Return the decisions for the next step, by unit; None where enough is known."""
        self._tries.on_host = place.device.on_host
        if self._links is None:
            self._links = measure_links(place, host=self._grants.host != 0, disk=self._grants.disk != 0)
        return self.untried(on_host=place.device.on_host)

    def untried(
        self, *, on_host: bool, samples: int = SAMPLES_PER_DECISION, room: float | None = None
    ) -> dict[str, str] | None:
        """Return the same, with links that are known.

        `samples` of a decision on a kind of unit are enough. A step may hold `room` bytes, by default the budget
        without what steps have held beyond their forecasts.
        """
        self._tries.on_host = on_host
        found = self._next(samples, self._grants.device - self.excess if room is None else room)
        self._proposed = found or {}
        return found

    def _next(self, samples: int, room: float) -> dict[str, str] | None:
        if not self.steps:
            return self._tries.least()
        if self.steps >= MAX_MEASURED_STEPS:
            return None
        forecast = self._forecast()
        if forecast.peak(dict.fromkeys(self._kinds, KEEP)) <= min(room, self._grants.device):
            return None  # everything fits: no other decision is needed
        chosen = next((known for known in self._frugal(forecast) if forecast.peak(known) <= room), None)
        if chosen is None:
            return self._rescue(forecast, room)
        figures = {self._kinds[name]: forecast.figures[name] for name in self._kinds}
        counts = {kind: Counter({d: f.samples for d, f in of_kind.items()}) for kind, of_kind in figures.items()}
        least = MIN_PART_SHARE * sum(map(forecast.saved, self._kinds)) / len(self._kinds)
        wanted = False
        for name, kind in reversed(self._kinds.items()):  # backward needs the last unit first
            if not name or forecast.saved(name) < least:
                continue
            for decision in self._tries.of(self._tries.shapes[name], figures[kind]):
                if counts[kind][decision] >= samples:
                    continue
                tries = (chosen | {name: form} for form in self._tries.forms(name, decision))
                if (fitting := next((each for each in tries if forecast.peak(each) <= room), None)) is not None:
                    wanted, chosen = True, fitting
                    counts[kind][decision] += 1
                    break
        return self._tries.least() | chosen if wanted else None

    def _frugal(self, forecast: Forecast) -> Iterator[dict[str, str]]:
        """Yield decisions on all units that have run: the simplest ones first, then those that may hold less."""
        again = {name: RECOMPUTE for name in self._kinds if self._tries.frees(self._tries.shapes[name])}
        keep = dict.fromkeys(self._kinds, KEEP)
        yield keep | again
        least = {name: decision for name, decision in self._tries.least().items() if name in self._kinds}
        yield keep | least
        known = forecast.figures
        finer = ((name, one) for name in self._kinds for one in self._tries.finer(name) if one in known[name])
        yield keep | least | dict(finer)
        held = {name: {f.total("held"): d for d, f in of_unit.items()} for name, of_unit in known.items()}
        yield {name: of_unit[min(of_unit)] for name, of_unit in held.items()}

    def _rescue(self, forecast: Forecast, room: float) -> dict[str, str] | None:
        """Return decisions that may need less than all that is known, which exceeds `room`; None where that is vain."""
        untried = {
            name: decision
            for name in self._kinds
            for decision in self._tries.finer(name)[:1]
            if decision not in forecast.figures[name]
        }
        parts = {name: self._tries.shapes[name].parts.values() for name in untried}
        weighted = {name: sum(next(part.parameters(), None) is not None for part in parts[name]) for name in untried}
        if not untried or forecast.lowest(weighted) > room:
            return None
        return self._tries.least() | untried

    def lossy(self) -> dict[str, str]:
        """Return lossy decisions for units whose effect on gradients is unknown so far, as many as fit."""
        forecast = self._forecast()
        least = {name: decision for name, decision in self._tries.least().items() if name in self._kinds}
        chosen = dict.fromkeys(self._kinds, KEEP) | least
        room = self._grants.device - self.excess - samples_nbytes(self._model)
        found = {}
        for name in reversed(self._kinds):
            is_open = name not in self._noise and LOSSY in forecast.figures[name]
            if is_open and forecast.peak(chosen | {name: LOSSY}) <= room:
                chosen[name] = found[name] = LOSSY
        return found

    def rate(self, units: Iterable[str], effect: GradientEffect, sites: Mapping[str, Site]) -> None:
        """Record the effect of the units' errors in a step that ran with these lossy decisions.

        Parameters
        ----------
        sites : the sites by name
        """
        figures = self.figures()
        for name in units:
            self._noise[name] = dict.fromkeys(["", *self._tries.shapes[name].parts], 0.0)
        for found in effect.sites:
            name, part = self._profiler.find(sites[found.site].name)
            if name in units:
                unit = (effect.noise_by_weight or 0.0) * figures[self._kinds[name]][LOSSY].error
                self._noise[name][part] += found.by_weight / unit if found.by_weight is not None and unit else inf

    def _forecast(self) -> Forecast:
        figures = self.figures()
        blocks = (name for name, shape in self._tries.shapes.items() if shape.recomputable)
        always = all(self._ran[name] == self.steps for name in (*self._kinds, *blocks))
        of_units = {name: figures[kind] for name, kind in self._kinds.items()}
        return Forecast(of_units, self._calls, self._profiler.separability.results, in_order=always)

    def figures(self) -> FiguresByKind:
        """Return the medians of all measurements, by kind and decision."""
        by_kind: dict[str, list[UnitFigures]] = {}
        shares = self._shares()
        for name, samples in self._samples.items():
            share = shares.get(name, 1.0)
            alike = [scaled(f, self.scale(saved), share) for f, saved in samples]
            by_kind.setdefault(self._kinds[name], []).extend(alike)
        return {kind: medians(samples) for kind, samples in by_kind.items()}

    def one_lines(self) -> OneLines:
        """Return policies in one line for the model, by their text."""
        named = [name for name in self._kinds if name and self._tries.shapes[name].named]
        blocks = [name for name in named if self._tries.recomputable(self._tries.shapes[name])]
        return one_lines(self._model, named, blocks, self._tries.tiers(), lossy=self._grants.max_noise > 0)

    def profile(self, device: torch.device) -> Profile:
        """Return all measurements so far as a profile."""
        units = tuple(
            Unit(
                name,
                kind,
                self._calls.of.get(name, 1),
                tuple(shape.parts),
                self._tries.recomputable(shape),
                {part: noise for part, noise in self._noise.get(name, {}).items() if noise < inf},
                self._calls.waiting(name),
                tuple(self._calls.turns.get(name, ())),
            )
            for name, kind in self._kinds.items()
            for shape in [self._tries.shapes[name]]
        )
        return Profile(
            units,
            self.figures(),
            self._links or Links(),
            median(self._rest) if self._rest else 0.0,
            memory_of(self._model, list(self._optimizers.found)),
            digest_of(self._model),
            machine_of(device),
            self.steps,
        )

    # -----------------------------------------------------------------------------------------------------------------

    def scale(self, saved: int) -> float:
        """Return the ratio of the largest step to one that saves `saved` bytes; below 1 after steps have shrunk."""
        return (
            self.largest / saved
            if saved and not SAME_SIZE_SHARE <= saved / max(1, self.largest) <= 1 / SAME_SIZE_SHARE
            else 1.0
        )

    def _shares(self) -> dict[str, float]:
        """Return the share of units that do not run in each step (experts), so that all add up to the largest step."""
        sizes = {name: self._size(name) for name in self._samples}
        rare = [name for name in sizes if self._ran[name] < self.steps]
        of_rare = sum(sizes[name] for name in rare)
        if not of_rare:
            return {}
        share = (self.largest - (sum(sizes.values()) - of_rare)) / of_rare
        return dict.fromkeys(rare, min(1.0, max(0.0, share)))

    def _size(self, name: str) -> float:
        """Return the bytes that a unit saves in the largest step."""
        return median(self.scale(saved) * f.total("saved") for f, saved in self._samples[name])

    def _kind(self, name: str, saved: int) -> str:
        module = self._tries.shapes[name].module
        shapes = [tuple(parameter.shape) for parameter in module.parameters()]
        kind = (
            f"{type(module).__name__} {sha256(repr(shapes).encode()).hexdigest()[:8]} {saved}{self._calls.text(name)}"
        )
        if not self._tries.shapes[name].named:  # no rule can name it, so it has no choice
            return f"{kind} {name}"
        return kind if self._tries.recomputable(self._tries.shapes[name]) else f"{kind} once"
