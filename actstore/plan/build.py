"""The options of each unit, built from a profile, and the policy text of a choice of options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from math import inf, isfinite

from actstore.plan.decisions import DERIVE, KEEP, by_part, excepted_part, has_tiles, recomputes, rules_of
from actstore.plan.profile import Profile, Unit, UnitBytes, UnitFigures
from actstore.plan.recurrent import recurrent_options
from actstore.plan.solver.chain import Layer, LayerChain, LayerOption, Limits, SharedLayers

MAX_PARTS = 4  # parts of a unit with decisions of their own: those that save most
MIN_PART_SHARE = 0.08  # of the unit's saved bytes: a part that saves less gets no decision of its own


def chain_of(profile: Profile, max_noise: float = 0.0, *, tiles: bool = False) -> LayerChain:
    """Return the chain of a measured step, with every measured option, and their combinations over parts of a unit.

    Parameters
    ----------
    max_noise : variance that payloads may add to the gradients; 0 leaves out all lossy options
    tiles : whether gradients may differ by the rounding of tiles; False leaves these options out
    """
    layers = tuple(
        Layer(
            unit.name,
            keep.forward,
            keep.backward,
            tuple(_options(unit, figures, keep, profile, max_noise)),
            max(1, unit.waiting),
            unit.turns,
        )
        for unit in profile.units
        for measured in [profile.figures[unit.kind]]
        for figures in [measured if tiles else {d: f for d, f in measured.items() if not has_tiles(d)}]
        for keep in [kept(figures, unit.share)]
    )
    at = {layer.name: i for i, layer in enumerate(layers)}
    shared = tuple(
        SharedLayers(
            each.nbytes,
            indices,
            tuple(
                tuple(each.keeps(number, option.decision) for option in layers[index].options)
                for number, index in enumerate(indices)
            ),
        )
        for each in profile.shared
        if len(each.units) > 1
        for indices in [tuple(at[unit] for unit in each.units)]
    )
    return LayerChain(layers, profile.links, profile.rest, shared)


def kept(figures: dict[str, UnitFigures], share: float = 1.0) -> UnitFigures:
    """Return the figures of a unit that keeps everything, derived from other decisions if `keep` was never measured.

    `share` of its calls wait for backward at once.

    The time of a recompute bounds that of the forward: the first forward includes bookkeeping, which small units feel.
    """
    found = figures.get(KEEP)
    if found is not None:
        return found
    other = next(iter(figures.values()))
    again = other.work_backward if recomputes(other.decision) else 0.0
    parts = {name: replace(part, held=int(share * part.saved), host=0, disk=0) for name, part in other.parts.items()}
    return replace(
        other,
        decision=KEEP,
        forward=min(other.forward, again) if again else max(other.forward - other.work_forward, other.forward / 2),
        backward=max(other.backward - other.work_backward, other.backward / 2),
        parts=parts,
        transient=0,
        error=0.0,
        work_forward=0.0,
        work_backward=0.0,
    )


def policy_of(chain: LayerChain, choice: Sequence[int]) -> str:
    """Return the policy text of a choice: one option for each layer."""
    options = zip(chain.layers, chain.chosen(choice), strict=True)
    return str(rules_of({layer.name: option.decision for layer, option in options}))


def _options(
    unit: Unit, figures: dict[str, UnitFigures], keep: UnitFigures, profile: Profile, max_noise: float
) -> Iterable[LayerOption]:
    whole = keep.total("held")
    yield LayerOption(KEEP, whole, forward_peak=whole, backward_peak=whole)
    if not unit.name:
        return
    if unit.calls > 1 and unit.recomputable and not unit.waiting:
        yield from recurrent_options(unit, figures, keep)
        figures = {decision: f for decision, f in figures.items() if not recomputes(decision)}
    of_parts: dict[str, list[_Change]] = {}
    for decision, f in figures.items():
        if decision == KEEP or (f.error and not max_noise):
            continue
        if excepted := excepted_part(decision):
            change = _Change(unit, decision, f, keep, None)
            change.error = noise_of(unit, excepted, f)
            if change.error < inf:
                yield change.option(unit, keep, profile)
            continue
        (part, what), *more = by_part(decision).items()
        change = _Change(unit, decision if more else str(what), f, keep, None)
        if more:  # several parts, measured together
            yield change.option(unit, keep, profile)
            continue
        if part:
            change.error = noise_of(unit, part, f)
            if change.error < inf:
                of_parts.setdefault(part, []).append(change)
            continue
        if change.error < inf:
            yield change.option(unit, keep, profile)
        if not recomputes(decision):
            for name in _large_parts(unit, keep):
                change = _Change(unit, decision, f, keep, name)
                if change.error < inf:
                    of_parts.setdefault(name, []).append(change)
    names = [name for name in _large_parts(unit, keep) if name in of_parts]
    within = [each for each in profile.shared if each.units == (unit.name,)]
    for changes in product(*([None, *of_parts[name]] for name in names)):
        chosen = {name: change for name, change in zip(names, changes, strict=True) if change is not None}
        if chosen:
            text = "; ".join(f"{name} : {change.decision}" for name, change in chosen.items())
            if text in figures and len(chosen) > 1:  # measured together
                continue
            total = _Change(unit, text, keep, keep, None)
            for change in chosen.values():
                total = total.plus(change)
            apart = {name for name, change in chosen.items() if change.estimated}
            total.held += sum(each.nbytes for each in within if each.divided(apart))
            yield total.option(unit, keep, profile)


def _large_parts(unit: Unit, keep: UnitFigures) -> list[str]:
    whole = keep.total("saved")
    large = [name for name in unit.parts if (part := keep.parts.get(name)) and part.saved > MIN_PART_SHARE * whole]
    return sorted(large, key=lambda name: -keep.parts[name].saved)[:MAX_PARTS]


class _Change:
    """Changes by a decision relative to a unit that keeps everything; with `part`, the share of this part."""

    def __init__(self, unit: Unit, decision: str, f: UnitFigures, keep: UnitFigures, part: str | None) -> None:
        self.decision = decision
        self.estimated = part is not None
        self.transient = f.transient  # bytes beside the held ones in backward,
        works_in_forward = decision != DERIVE and not recomputes(decision)
        self.staged = f.transient if works_in_forward else 0  # and in forward, for decisions that work there
        self.forward, self.backward = _added(f, keep)
        if part is None:
            self.held = f.total("held") - keep.total("held")
            self.host, self.disk = f.total("host"), f.total("disk")
            self.error = sum(noise_of(unit, name, f) for name in f.parts)
        else:
            before, after = keep.parts.get(part, UnitBytes()), f.parts.get(part, UnitBytes())
            share = before.saved / max(1, keep.total("saved"))
            self.held = after.held - before.held + max(0, before.saved - after.saved)  # these count elsewhere then
            self.host, self.disk = after.host, after.disk
            self.error = noise_of(unit, part, f)
            self.forward, self.backward = self.forward * share, self.backward * share

    def plus(self, other: _Change) -> _Change:
        self.transient, self.staged = max(self.transient, other.transient), max(self.staged, other.staged)
        for name in ("forward", "backward", "held", "host", "disk", "error"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def option(self, unit: Unit, keep: UnitFigures, profile: Profile) -> LayerOption:
        held = max(0, keep.total("held") + self.held)
        moved = self.host + self.disk
        here = moved / unit.calls if unit.waiting else moved  # before it leaves, or when it has come back
        return LayerOption(
            self.decision,
            held,
            link=0 if profile.links.on_host else moved,
            host=unit.share * self.host,
            disk=unit.share * self.disk,
            forward=self.forward,
            backward=self.backward,
            forward_peak=held + here + self.staged,
            backward_peak=held + here + self.transient,
            error=self.error,
        )


def noise_of(unit: Unit, part: str, f: UnitFigures) -> float:
    """Return the noise that the payloads of a part add to the gradients; infinite where it is unknown."""
    found = f.error * unit.noise.get(part, inf) if f.error else 0.0
    return found if isfinite(found) else inf


def limits_of(device: float, host: float | None, disk: float | None, max_noise: float) -> Limits:
    """Return the limits for the solver: bytes in each place (None: no limit), and the noise that payloads may add."""
    return Limits(
        device,
        inf if host is None else host,
        inf if disk is None else disk,
        max_noise or inf,
    )


def _added(f: UnitFigures, keep: UnitFigures) -> tuple[float, float]:
    """Return the time that a decision adds to a unit's forward and backward: its own work, and slowdown elsewhere.

    The work is measured by itself. The difference of two step times includes all effects (bookkeeping, caches, page
    faults), but is noisy. So it is limited to the range from the work to twice the work.
    """
    work = f.work_forward + f.work_backward
    forward, backward = f.forward - keep.forward, f.backward - keep.backward
    total = min(max(forward + backward, work), 2 * work)
    share = min(max(forward, f.work_forward), total - f.work_backward)
    return share, total - share
