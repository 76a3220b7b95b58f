"""Probes: decisions to try on units in the first steps, and the measurements of these tries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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
from actstore.auto.calls import UnitCalls
from actstore.auto.exceptions import DERIVE
from actstore.auto.links import measure_links
from actstore.auto.machine import machine_of
from actstore.auto.memory import memory_of
from actstore.auto.profiler import PARTIAL_RECOMPUTE, Profiler, Sample, scaled
from actstore.base.spec import Site
from actstore.model.blocks import has_forward
from actstore.model.units import Shape, digest_of
from actstore.plan.build import MIN_PART_SHARE
from actstore.plan.fields import read_as
from actstore.plan.profile import KEEP, Profile, Unit, UnitFigures, medians, recomputes
from actstore.plan.recurrent import PROBE_SEGMENT, PROBE_SLOTS, revolve_of, segments_of
from actstore.plan.solver.chain import Links
from actstore.plan.wish import Wish
from actstore.rerun.optimizers import SteppedOptimizers
from actstore.store.tierset import TierSet

SAMPLES_PER_DECISION = 3  # on each kind of unit
LOSSY = "int4(round=dither)"
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
    """

    def __init__(self, profiler: Profiler, model: Module, wish: Wish, before: Probes | None = None) -> None:
        self.steps = 0
        self.largest = 0
        self._profiler = profiler
        self._model = model
        self._wish = wish
        self._shapes = {shape.name: shape for shape in profiler.shapes}
        self._samples: dict[str, list[tuple[UnitFigures, int]]] = {}  # by unit, with the saved bytes of the step
        self._calls = UnitCalls()
        self._kinds: dict[str, str] = {}  # kinds of the units that ran, in the order of forward
        self._ran: Counter[str] = Counter()  # number of steps in which each unit ran
        self._rest: list[float] = []
        self._noise: dict[str, dict[str, float]] = {}  # by unit and child: see `Unit.noise`
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
        return {name: "recompute" for name, shape in self._shapes.items() if self._recomputable(shape)}

    def limit(self, wish: Wish) -> None:
        """Set the wish that later proposals must fit."""
        self._wish = wish

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
        self._calls = UnitCalls(calls, state.get("turns", {}))
        self._ran = Counter(ran)
        self._links = None if state["links"] is None else Links(**state["links"])
        parts = self._profiler.separability
        for names, found in zip((self._profiler.writers, parts.seen, parts.bound), state["modules"], strict=True):
            names.update(found)

    def add(self, sample: Sample) -> None:
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

    def propose(self, place: TierSet) -> dict[str, str] | None:
        """Return the decisions for the next step, by unit; None where enough is known."""
        if self._links is None:
            self._links = measure_links(place, host=self._wish.host != 0, disk=self._wish.disk != 0)
        return self.untried(on_host=place.device.on_host)

    def untried(
        self, *, on_host: bool, samples: int = SAMPLES_PER_DECISION, room: float = 0.0
    ) -> dict[str, str] | None:
        """Return the same, with links that are known.

        `samples` of a decision on a kind of unit are enough. A step may hold `room` bytes, or those of the wish.
        """
        if not self.steps:
            return self.least()
        if self.steps >= MAX_MEASURED_STEPS:
            return None
        figures = self.figures()
        counts = {kind: Counter({d: f.samples for d, f in of_kind.items()}) for kind, of_kind in figures.items()}
        known = {name: self._shapes[name] for name in self._kinds}
        if self._peak(figures, dict.fromkeys(known, KEEP)) <= self._wish.device:
            return None  # everything fits: no other decision is needed
        least = MIN_PART_SHARE * sum(self._saved(figures, name) for name in known) / len(known)
        chosen = {name: "recompute" if self._recomputable(shape) else KEEP for name, shape in self._shapes.items()}
        room = max(room, self._wish.device, self._peak(figures, {name: chosen[name] for name in known}))
        wanted = False
        for name, shape in reversed(known.items()):  # backward needs the last unit first
            if not name or self._saved(figures, name) < least:
                continue
            count = counts[self._kinds[name]]
            for decision in self._candidates(shape, figures[self._kinds[name]], on_host=on_host):
                fitting = (
                    form
                    for form in self._forms(name, decision)
                    if self._peak(figures, {n: chosen[n] for n in known} | {name: form}) <= room
                )
                if count[decision] < samples and (proposed := next(fitting, None)) is not None:
                    wanted = True
                    chosen[name] = proposed
                    count[decision] += 1
                    break
        return chosen if wanted else None

    def lossy(self) -> dict[str, str]:
        """Return lossy decisions for units whose effect on gradients is unknown so far, as many as fit."""
        figures = self.figures()
        least = {name: decision for name, decision in self.least().items() if name in self._kinds}
        chosen = dict.fromkeys(self._kinds, KEEP) | least
        room = self._wish.device - samples_nbytes(self._model)
        found = {}
        for name, kind in reversed(self._kinds.items()):
            is_open = name not in self._noise and LOSSY in figures[kind]
            if is_open and self._peak(figures, chosen | {name: LOSSY}) <= room:
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
            self._noise[name] = dict.fromkeys(["", *self._shapes[name].parts], 0.0)
        for found in effect.sites:
            name, part = self._profiler.find(sites[found.site].name)
            if name in units:
                unit = (effect.noise_by_weight or 0.0) * figures[self._kinds[name]][LOSSY].error
                self._noise[name][part] += found.by_weight / unit if found.by_weight is not None and unit else inf

    def floor(self, *, on_host: bool) -> float:
        """Return a cautious lower bound on the bytes held at the turn to backward; 0 before the first step.

        A unit that can offload or lose payloads counts as 0. A unit that can recompute counts as half of the bytes that
        its recompute holds, since its parts may hold less; any other unit as half of its saved bytes. The bound is 0
        while replays of a unit with many saved bytes are untried: they may hold far less than its recompute, and the
        least is unknown.
        """
        wish, figures = self._wish, self.figures()
        much = MIN_PART_SHARE * sum(self._saved(figures, name) for name in self._kinds)
        for name, kind in self._kinds.items():
            untried = set(self._replays(name)) - figures[kind].keys()
            if untried and self._recomputable(self._shapes[name]) and self._saved(figures, name) >= much:
                return 0.0
        free = wish.disk != 0 or (wish.host != 0 and not on_host) or wish.max_noise > 0
        floor: dict[str, float] = {}
        for name, kind in self._kinds.items():
            shape, saved = self._shapes[name], self._saved(figures, name)
            if not shape.named or not name:
                floor[name] = saved
            elif not free and self._calls.chained(name) == 1:
                held = (f.total("held") for d, f in figures[kind].items() if d.startswith("recompute"))
                floor[name] = min(saved, *held) / 2 if self._recomputable(shape) else saved / 2
        return self._calls.most_at_once(floor)

    def figures(self) -> FiguresByKind:
        """Return the medians of all measurements, by kind and decision."""
        by_kind: dict[str, list[UnitFigures]] = {}
        shares = self._shares()
        for name, samples in self._samples.items():
            share = shares.get(name, 1.0)
            alike = [scaled(f, self.scale(saved), share) for f, saved in samples]
            by_kind.setdefault(self._kinds[name], []).extend(alike)
        return {kind: medians(samples) for kind, samples in by_kind.items()}

    def profile(self, device: torch.device) -> Profile:
        """Return all measurements so far as a profile."""
        units = tuple(
            Unit(
                name,
                kind,
                self._calls.of.get(name, 1),
                tuple(shape.parts),
                self._recomputable(shape),
                {part: noise for part, noise in self._noise.get(name, {}).items() if noise < inf},
                self._calls.waiting(name),
                tuple(self._calls.turns.get(name, ())),
            )
            for name, kind in self._kinds.items()
            for shape in [self._shapes[name]]
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

    def _recomputable(self, shape: Shape) -> bool:
        return shape.recomputable and shape.name not in self._profiler.writers

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
        module = self._shapes[name].module
        shapes = [tuple(parameter.shape) for parameter in module.parameters()]
        kind = (
            f"{type(module).__name__} {sha256(repr(shapes).encode()).hexdigest()[:8]} {saved}{self._calls.text(name)}"
        )
        if not self._shapes[name].named:  # no rule can name it, so it has no choice
            return f"{kind} {name}"
        return kind if self._recomputable(self._shapes[name]) else f"{kind} once"

    def _replays(self, name: str) -> list[str]:
        """Return the replays to try on a unit that runs several times in a step."""
        calls = self._calls.chained(name)
        return [segments_of(PROBE_SEGMENT)] * (calls > 1) + [revolve_of(PROBE_SLOTS)] * (calls > 2 * PROBE_SLOTS)

    def _worth(self, name: str, part: Module) -> bool:
        """Return whether to try to recompute a part. PyTorch's activations and dropouts save at most an input, and some
        models change that input afterwards."""
        simple = type(part).__module__.startswith("torch.nn.") and next(part.parameters(), None) is None
        plain = Shape(name, part, {}, True).recomputable and has_forward(part)
        return plain and not simple and name not in self._profiler.writers

    def _forms(self, name: str, decision: str) -> list[str]:
        """Return the forms of a decision to try, in order. For a unit with several calls, some keep part of these."""
        calls = self._calls.chained(name)
        if decision not in (KEEP, "recompute") or calls == 1:
            return [decision]
        some = [f"recompute(first={calls - kept})" for kept in (calls // 2, calls // 8, calls // 32) if kept]
        return [decision, *some] if decision == KEEP else [*some, decision]

    def _peak(self, figures: FiguresByKind, decisions: dict[str, str]) -> float:
        """Return the predicted peak of a step. An unmeasured decision counts as kept, a schedule as plain recompute."""
        held: dict[str, float] = {}
        peak = most = 0.0
        for name, decision in decisions.items():
            of_kind, saved = figures[self._kinds[name]], self._saved(figures, name)
            found, part = of_kind.get(decision), PARTIAL_RECOMPUTE.fullmatch(decision)
            share = int(part[1]) / self._calls.of[name] if part else 1.0  # the recomputed part of the calls
            if found is None and decision.startswith("recompute("):
                found = of_kind.get("recompute")
            held[name] = saved if found is None else share * found.total("held") + (1 - share) * saved
            above = self._staged(figures, name, decision) if found is None else found.transient
            most, peak = max(most, above), max(peak, sum(held.values()) + above)
        blocks = (name for name, shape in self._shapes.items() if shape.recomputable)
        always = all(self._ran[name] == self.steps for name in (*decisions, *blocks))
        # units that do not run in every step come in any order, and other micro-batches hold what one has left
        return peak if always and not self._calls.turns else self._calls.most_at_once(held) + most

    def _staged(self, figures: FiguresByKind, name: str, decision: str) -> int:
        """Return the bytes that a payload may take beside its tensor, estimated before it is measured."""
        if decision == KEEP or recomputes(decision):
            return 0
        of_kind = figures[self._kinds[name]].values()
        most = max((part.saved for f in of_kind for part in f.parts.values()), default=0)
        return most // self._calls.of[name] if name in self._calls.turns else most

    def _saved(self, figures: FiguresByKind, name: str) -> float:
        return self._calls.share(name) * max(f.total("saved") for f in figures[self._kinds[name]].values())

    def _candidates(self, shape: Shape, figures: dict[str, UnitFigures], *, on_host: bool) -> list[str]:
        """Return the decisions to try on a unit."""
        wish = self._wish
        tiers = [tier for tier, grant in (("host", 0 if on_host else wish.host), ("disk", wish.disk)) if grant != 0]
        codecs = ["expack", *(["int8", LOSSY] if wish.max_noise else [])]
        found, late = [KEEP], list[str]()
        if not shape.named:
            return found
        if self._recomputable(shape):
            found.append("recompute")
            if replays := self._replays(shape.name):
                return [*found, *replays]
            found += [f"recompute(raw @ {tier})" for tier in tiers]
            keep = figures.get(KEEP)
            if keep is not None:
                parts = {
                    name: of_part
                    for name, part in shape.parts.items()
                    if self._worth(f"{shape.name}.{name}", part) and (of_part := keep.parts.get(name))
                    if of_part.saved > MIN_PART_SHARE * keep.total("saved")
                }
                found += [f"{name} : recompute" for name in parts]
                late += self._profiler.separability.exceptions(shape.name, parts, figures, tiers, lossy=len(codecs) > 1)
        moved = (f"{codec} @ {tier}" for tier in tiers for codec in ("raw", *codecs[1:]))
        return [*found, DERIVE, *codecs, *moved, *late]
