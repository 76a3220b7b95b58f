"""Probes: decisions to try on units in the first steps, and the measurements of these tries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from hashlib import sha256
from math import inf
from statistics import median
from typing import Any
from weakref import WeakSet

import torch
from torch.nn import Module
from torch.nn.modules.rnn import RNNBase, RNNCellBase
from torch.optim import Optimizer

from actstore.accuracy.influence.batch_noise import samples_nbytes
from actstore.accuracy.influence.effect import GradientEffect
from actstore.auto.excepted import mlps_of, one_lines
from actstore.auto.forecast import Forecast
from actstore.auto.links import measure_links
from actstore.auto.machine import machine_of, memory_of
from actstore.auto.profiler import Profiler
from actstore.auto.sample import Sample, UnitCalls, scaled
from actstore.base.spec import Site
from actstore.model.blocks import has_forward
from actstore.model.units import Shape, digest_of
from actstore.plan.build import MIN_PART_SHARE
from actstore.plan.decisions import DERIVE, KEEP, RECOMPUTE, OneLines, has_tiles, offloads
from actstore.plan.fields import read_as
from actstore.plan.profile import Memory, Profile, SharedBytes, Unit, UnitFigures, medians
from actstore.plan.recurrent import PROBE_SEGMENT, PROBE_SLOTS, revolve_of, segments_of
from actstore.plan.solver.chain import Links
from actstore.plan.values import Grants
from actstore.rerun.optimizers import SteppedOptimizers
from actstore.store.tierset import TierSet

LOSSY = "int4(round=dither)"


class Candidates:
    """Decisions that may be tried on the units of a model, within the grants of the user.

    Attributes
    ----------
    shapes : the units, by name
    on_host : whether the compute device is the CPU
    """

    def __init__(self, profiler: Profiler, grants: Grants, calls: UnitCalls) -> None:
        self.shapes = {shape.name: shape for shape in profiler.shapes}
        self.grants, self.calls, self.on_host = grants, calls, True
        self._profiler = profiler

    def tiers(self) -> list[str]:
        """Return the granted tiers beside the device, the fastest first."""
        granted = ("host", 0 if self.on_host else self.grants.host), ("disk", self.grants.disk)
        return [tier for tier, grant in granted if grant != 0]

    def least(self) -> dict[str, str]:
        """Return the decisions with the least memory, as far as known without a plan."""
        tier = next(iter(self.tiers()), "")
        again, else_ = (f"recompute(raw @ {tier})", f"derive(raw @ {tier})") if tier else (RECOMPUTE, DERIVE)
        named = [shape for shape in self.shapes.values() if shape.named and shape.name]
        return {shape.name: again if self.frees(shape) else else_ for shape in named}

    def frees(self, shape: Shape) -> bool:
        """Return whether to recompute the unit frees more than `derive` does: not where it is one operator."""
        cell = isinstance(shape.module, RNNBase | RNNCellBase)
        return self.recomputable(shape) and (cell or not _is_simple(shape.module))

    def recomputable(self, shape: Shape) -> bool:
        """Return whether the unit can run again, as far as steps have shown."""
        return shape.recomputable and shape.name not in self._profiler.writers

    def of(self, shape: Shape, figures: Mapping[str, UnitFigures]) -> list[str]:
        """Return the decisions to try on a unit."""
        tiers = self.tiers()
        lossy = ["int8", LOSSY] if self.grants.max_noise else []
        found, late = [KEEP], list[str]()
        if not shape.named:
            return found
        if self.recomputable(shape):
            found.append(RECOMPUTE)
            if replays := self._replays(shape.name):
                return [*found, *replays]
            found += [f"recompute(raw @ {tier})" for tier in tiers]
            found += self.in_tiles(shape.name, figures)
            keep = figures.get(KEEP)
            if keep is not None:
                parts = {
                    name: of_part
                    for name, part in shape.parts.items()
                    if self._worth(f"{shape.name}.{name}", part) and (of_part := keep.parts.get(name))
                    if of_part.saved > MIN_PART_SHARE * keep.total("saved")
                }
                found += [f"{name} : recompute" for name in parts]
                late += self._profiler.separability.exceptions(shape.name, parts, figures, tiers, lossy=bool(lossy))
        moved = [f"{codec} @ {tier}" for tier in tiers for codec in ("raw", *lossy)]
        derived = [f"derive({wait})" for wait in (*lossy, *moved) if wait.startswith("int8")]
        return [*found, *late, DERIVE, "expack", *lossy, *moved, *derived]

    def forms(self, name: str, decision: str) -> list[str]:
        """Return the forms of a decision to try, in order. For a unit with several calls, some keep part of these."""
        calls = self.calls.chained(name)
        if decision not in (KEEP, RECOMPUTE) or calls == 1:
            return [decision]
        some = [f"recompute(first={calls - kept})" for kept in (calls // 2, calls // 8, calls // 32) if kept]
        return [decision, *some] if decision == KEEP else [*some, decision]

    def in_tiles(self, name: str, figures: Mapping[str, UnitFigures]) -> list[str]:
        """Return the decisions with a part of a unit in tiles that may need less memory than without."""
        again = [*(f"recompute(raw @ {tier})" for tier in self.tiers()), RECOMPUTE]
        once = self.grants.tiles and self.recomputable(self.shapes[name]) and self.calls.chained(name) == 1
        return list(self._profiler.separability.in_tiles(name, again, figures)) if once else []

    def finer(self, name: str) -> list[str]:
        """Return decisions on a unit that may need less memory than to recompute it as a whole."""
        shape = self.shapes[name]
        if not self.recomputable(shape):
            return []
        parts = [
            part
            for part, module in shape.parts.items()
            if self._worth(f"{name}.{part}", module) and next(module.children(), None) is not None
        ]
        by_parts = ["; ".join(f"{part} : recompute" for part in parts)] if len(parts) > 1 else []
        return self._replays(name) or [*self.in_tiles(name, {})[:1], *by_parts]

    def _replays(self, name: str) -> list[str]:
        """Return the replays to try on a unit that runs several times in a step."""
        calls = self.calls.chained(name)
        return [segments_of(PROBE_SEGMENT)] * (calls > 1) + [revolve_of(PROBE_SLOTS)] * (calls > 2 * PROBE_SLOTS)

    def _worth(self, name: str, part: Module) -> bool:
        """Return whether to try to recompute a part. PyTorch's activations and dropouts save at most an input, and some
        models change that input afterwards."""
        plain = Shape(name, part, {}, True).recomputable and has_forward(part)
        useless = _is_simple(part) and next(part.parameters(), None) is None
        return plain and not useless and name not in self._profiler.writers


def _is_simple(module: Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


SAMPLES_PER_DECISION = 3  # on each kind of unit
ALIKE = 0.01  # relative difference of the saved bytes of units of one kind
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
    temporary : as in `Memory`
    """

    def __init__(self, profiler: Profiler, model: Module, grants: Grants, before: Probes | None = None) -> None:
        self.steps = 0
        self.largest = 0
        self.excess = 0.0
        self.temporary: int | None = None
        self._profiler = profiler
        self._model = model
        self._was: str = digest_of(model) if before is None or before.steps > 1 else before._was
        self._grants = grants
        self._samples: dict[str, list[tuple[UnitFigures, int]]] = {}  # by unit, with the saved bytes of the step
        self._calls = UnitCalls()
        self._tries = Candidates(profiler, grants, self._calls)
        self._kinds: dict[str, str] = {}  # of units that ran or are expected to, in the order of forward
        self._ran: Counter[str] = Counter()  # number of steps in which each unit ran
        self._rest: list[float] = []
        self._peaks: list[tuple[dict[str, str], int, float, int | None]] = []  # decisions, saved bytes, peak, beside it
        self._beside: list[tuple[int, int]] = []  # saved bytes of steps, and `beside` of `add`
        self._shared: list[SharedBytes] = []  # of the first step
        self._shared_in = 0  # bytes that step has saved
        self._within: dict[str, dict[tuple[str, ...], int]] = {}  # by kind: bytes that several parts of a unit save
        self._holds: dict[str, dict[str, bool]] = {}  # see `_holding`
        self._noise: dict[str, dict[str, float]] = {}  # by unit and child: see `Unit.noise`
        self._proposed: dict[str, str] = {}  # of the step that runs
        self._links: Links | None = None if before is None else before._links
        met: WeakSet[Optimizer] = WeakSet() if before is None else before._optimizers.found
        self._optimizers: SteppedOptimizers = SteppedOptimizers(model, met)
        if grants.tiles:
            profiler.separability.sought = mlps_of(model)

    @property
    def has_met(self) -> bool:
        """True where an optimizer of the model has stepped."""
        return bool(self._optimizers.found)

    def memory(self) -> Memory:
        """Return the device memory beside activations."""
        return replace(memory_of(self._model, list(self._optimizers.found)), temporary=self.temporary)

    def reserve(self, temporary: int) -> None:
        """Count bytes of temporary results among the memory beside activations."""
        self.temporary = temporary

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
        figures = self.figures() if self._grants.tiles else {}
        known = {name: figures[kind] for name, kind in self._kinds.items() if kind in figures}
        tiled = {name: self._tries.in_tiles(name, of_unit)[:1] for name, of_unit in known.items()}
        return self._tries.least() | {name: one for name, each in tiled.items() for one in each if one in known[name]}

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
            "shared": [[asdict(each) for each in self._shared], self._shared_in, self._holds],
            "within": {kind: [[*each] for each in of_kind.items()] for kind, of_kind in self._within.items()},
            "tiled": parts.tiled,
            "temporary": self.temporary,
            "beside": self._beside,
            "modules": [sorted(names) for names in (self._profiler.writers, parts.seen, parts.bound)],
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Take over the measurements of another process."""
        self.steps, self.largest = int(state["steps"]), int(state["largest"])
        self._rest = [float(ms) for ms in state["rest"]]
        self._samples = {
            name: [(read_as(UnitFigures, f), int(saved)) for f, saved in each]
            for name, each in state["samples"].items()
        }
        calls, self._kinds, ran, self._noise = state["tables"]
        self._calls = self._tries.calls = UnitCalls(calls, state.get("turns", {}))
        self._ran = Counter(ran)
        shared, self._shared_in, self._holds = state.get("shared", ([], 0, {}))
        self._shared = [read_as(SharedBytes, each) for each in shared]
        within = state.get("within", {}).items()
        self._within = {kind: {tuple(parts): nbytes for parts, nbytes in of_kind} for kind, of_kind in within}
        self._links = None if state["links"] is None else Links(**state["links"])
        parts = self._profiler.separability
        for names, found in zip((self._profiler.writers, parts.seen, parts.bound), state["modules"], strict=True):
            names.update(found)
        self._profiler.separability.tiled.update(state.get("tiled", {}))
        self.temporary = state.get("temporary")
        self._beside = [(int(saved), int(beside)) for saved, beside in state.get("beside", ())]

    def add(self, sample: Sample, peak: float = 0.0, beside: int | None = None) -> None:
        """Add a step, its peak where that is to be compared with the forecast, and bytes as in `add_beside`."""
        first = not self.steps
        self.steps += 1
        self._calls.add(sample)
        self.grow(sample.saved)
        self._ran.update(sample.figures.keys())
        for name, figures in sample.figures.items():
            if name not in self._samples:
                self._kinds[name] = self._kind(name, figures[0].total("saved"), unread=name in sample.unread)
            self._samples.setdefault(name, []).extend((one, sample.saved) for one in figures)
        self._expect()
        self._share(sample, first=first)
        if not first:  # the first step includes all one-time work
            self._rest.append(sample.rest)
        if peak and all(len(figures) == 1 for figures in sample.figures.values()):
            ran = {name: figures[0].decision for name, figures in sample.figures.items()}
            self._peaks.append((ran, sample.saved, peak, beside))
        if beside is not None:
            self.add_beside(sample.saved, beside)
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
                forms = (each for each in self._tries.forms(name, decision) if counts[kind][each] < samples)
                form = next((each for each in forms if forecast.peak(chosen | {name: each}) <= room), None)
                if form is not None:
                    wanted = True
                    chosen = chosen | {name: form}
                    counts[kind].update({decision, form})
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
            for decision in reversed(self._tries.finer(name)[: 2 if self._grants.tiles else 1])
            if decision not in forecast.figures[name]
        }
        parts = {name: self._tries.shapes[name].parts.values() for name in untried}
        weighted = {name: sum(next(part.parameters(), None) is not None for part in parts[name]) for name in untried}
        tiled = any(map(has_tiles, untried.values()))  # these were asked for, so that a refusal has their figures
        if not untried or (forecast.lowest(weighted) > room and not tiled):
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
        return Forecast(of_units, self._calls, self._profiler.separability.results, self.shared(), in_order=always)

    def _expect(self) -> None:
        """Count blocks that have not run, where most of their class have: models leave out layers at random."""
        alike: dict[str, list[str]] = {}
        for shape in self._tries.shapes.values():
            if shape.recomputable:
                alike.setdefault(self._class(shape.name), []).append(shape.name)
        for names in alike.values():
            ran = [name for name in names if name in self._kinds]
            if not len(names) / 2 <= len(ran) < len(names):
                continue
            kinds: dict[str, str] = {}
            for name, kind in self._kinds.items():
                if name in ran:  # those before it, and at the last one those after it
                    end = None if name == ran[-1] else names.index(name)
                    kinds |= dict.fromkeys(names[:end], kind)
                kinds[name] = kind
            self._kinds = kinds

    def _share(self, sample: Sample, *, first: bool) -> None:
        """Add which units of a step have held bytes that several save. The first step, which recomputes, shows all."""
        if first:
            self._shared, self._shared_in = [each for each in sample.shared if len(each.units) > 1], sample.saved
        for each in sample.shared:
            if len(each.units) == 1:  # parts of one unit, which a step shows that does not recompute it
                of_kind = self._within.setdefault(self._kinds[each.units[0]], {})
                of_kind[each.parts[0]] = max(of_kind.get(each.parts[0], 0), each.nbytes)
            for number, decisions in enumerate(each.holds):
                known = self._holding(each, number)
                for decision, held in decisions.items():
                    before = known.get(decision, held)
                    known[decision] = (before or held) if number else (before and held)  # the larger sum

    def _holding(self, each: SharedBytes, number: int) -> dict[str, bool]:
        """Return by decision whether a unit holds the bytes: units of a kind do alike with what the same parts save."""
        key = f"{self._kinds[each.units[number]]} {number > 0} {','.join(each.parts[number])}"
        return self._holds.setdefault(key, {})

    def shared(self) -> list[SharedBytes]:
        """Return the bytes that several units save, for the largest step."""
        scale = self.scale(self._shared_in)
        within = [
            SharedBytes((name,), (parts,), (False,), int(scale * nbytes))
            for name, kind in self._kinds.items()
            for parts, nbytes in self._within.get(kind, {}).items()
        ]
        return within + [
            replace(
                each,
                nbytes=int(scale * each.nbytes),
                holds=tuple(self._holding(each, number) for number in range(len(each.units))),
            )
            for each in self._shared
        ]

    def figures(self) -> FiguresByKind:
        """Return the medians of all measurements, by kind and decision."""
        by_kind: dict[str, list[UnitFigures]] = {}
        shares = self._shares()
        for name, samples in self._samples.items():
            share = shares.get(name, 1.0)
            alike = [scaled(f, self.scale(saved), share) for f, saved in samples]
            by_kind.setdefault(self._kinds[name], []).extend(alike)
        return {kind: medians(samples) for kind, samples in by_kind.items()}

    def peaks(self) -> list[tuple[dict[str, str], float]]:
        """Return the decisions of measured steps, and their peaks, scaled to the largest step."""
        return [(decisions, self.scale(saved) * peak) for decisions, saved, peak, _ in self._peaks]

    def add_beside(self, saved: int, beside: int) -> None:
        """Add what a step that saves these bytes had beside its activations and `Memory.lasting`, at most."""
        self._beside.append((saved, beside))

    def most_beside(self) -> int | None:
        """Return the largest of these, scaled to the largest step; None where nothing was counted."""
        return max((int(self.scale(saved) * beside) for saved, beside in self._beside), default=None)

    def peaks_beside(self) -> list[tuple[dict[str, str], float, float]]:
        """Return the same as `peaks`, and what each step had beside it, where that was counted."""
        counted = ((ran, self.scale(saved), peak, beside) for ran, saved, peak, beside in self._peaks)
        return [(ran, scale * peak, scale * beside) for ran, scale, peak, beside in counted if beside is not None]

    def forget_peaks(self, decisions: dict[str, str]) -> None:
        """Forget the peaks of steps with these decisions: a later one needed more."""
        self._peaks = [each for each in self._peaks if not each[0].items() <= decisions.items()]

    def one_lines(self) -> OneLines:
        """Return policies in one line for the model, by their text."""
        named = [name for name in self._kinds if name and self._tries.shapes[name].named]
        blocks = [name for name in named if self._tries.recomputable(self._tries.shapes[name])]
        found = one_lines(self._model, named, blocks, self._tries.tiers(), lossy=self._grants.max_noise > 0)
        return {**found, **self._profiler.separability.one_line(self._model, blocks)}

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
            self.memory(),
            " ".join(dict.fromkeys((self._was, digest_of(self._model)))),
            machine_of(device),
            self.steps,
            tuple(self.shared()),
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
        """Return the share of units that most steps leave out (experts), so that all add up to the largest step."""
        sizes = {name: self._size(name) for name in self._samples}
        rare = [name for name in sizes if 2 * self._ran[name] < self.steps]
        of_rare = sum(sizes[name] for name in rare)
        if not of_rare:
            return {}
        share = (self.largest - (sum(sizes.values()) - of_rare)) / of_rare
        return dict.fromkeys(rare, min(1.0, max(0.0, share)))

    def _size(self, name: str) -> float:
        """Return the bytes that a unit saves in the largest step."""
        return median(self.scale(saved) * f.total("saved") for f, saved in self._samples[name])

    def _kind(self, name: str, saved: int, *, unread: bool) -> str:
        alike = self._class(name)
        others = (other for other in self._samples if self._kinds[other].startswith(alike))
        sizes = (self._samples[other][0][0].total("saved") for other in others)
        # The first block may save what all share, such as rotary embeddings.
        saved = next((size for size in sizes if abs(size - saved) <= ALIKE * saved), saved)
        tiled = self._profiler.separability.part_in_tiles(name)
        kind = f"{alike}{saved}{self._calls.text(name)}{tiled and f' {tiled} in tiles'}{' unread' * unread}"
        if not self._tries.shapes[name].named:  # no rule can name it, so it has no choice
            return f"{kind} {name}"
        return kind if self._tries.recomputable(self._tries.shapes[name]) else f"{kind} once"

    def _class(self, name: str) -> str:
        """Return the class of a unit's module, and a digest of the shapes of its parameters."""
        module = self._tries.shapes[name].module
        shapes = [tuple(parameter.shape) for parameter in module.parameters()]
        return f"{type(module).__name__} {sha256(repr(shapes).encode()).hexdigest()[:8]} "
