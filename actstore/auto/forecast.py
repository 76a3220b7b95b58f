"""Forecast of the peak of a step, from the figures that earlier steps have measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from actstore.auto.excepted import UNSEEN
from actstore.plan.decisions import KEEP, by_part, excepted_part, recomputed_calls, recomputes, recomputes_all
from actstore.plan.profile import SharedBytes, UnitFigures
from actstore.plan.solver.chain import LayerOption, needed

if TYPE_CHECKING:
    from actstore.auto.sample import UnitCalls

Bytes = tuple[float, float]  # held at the end of forward, and the most beside them


class Forecast:
    """Forecast of the bytes of steps, unit by unit.

    Parameters
    ----------
    figures : of each unit, by decision
    results : bytes of the results of units and their parts, by name: "" of all, and of classes of operators: "matmul"
    shared : bytes that several units save
    in_order : whether backward runs the units in reversed order, and each of them in every step
    """

    def __init__(
        self,
        figures: Mapping[str, Mapping[str, UnitFigures]],
        calls: UnitCalls,
        results: Mapping[str, Mapping[str, int]],
        shared: Sequence[SharedBytes] = (),
        *,
        in_order: bool,
    ) -> None:
        self.figures = figures
        self._calls = calls
        self._results = results
        self._shared = shared
        self._in_order = in_order

    def saved(self, name: str) -> float:
        """Return the bytes that plain autograd holds for a unit."""
        return self._calls.share(name) * max(f.total("saved") for f in self.figures[name].values())

    def peak(self, decisions: Mapping[str, str]) -> float:
        """Return the predicted peak of a step under decisions by unit, in the order of forward."""
        found = {name: self._bytes(name, decision) for name, decision in decisions.items()}
        for each in self._shared:
            if (unit := each.spilled(decisions)) in found:
                held, above = found[unit]
                found[unit] = held + each.nbytes, above
        return self._most(found)

    def lowest(self, untried: Mapping[str, int]) -> float:
        """Return a peak that units can hardly get below by finer recomputation, untried so far.

        Parts that are recomputed one by one may need half as much at once as their unit, and each holds its input.
        Replays of a unit that runs again and again may hold next to nothing.

        Parameters
        ----------
        untried : number of parts with weights, by unit
        """
        found: dict[str, Bytes] = {}
        for name, of_unit in self.figures.items():
            held, above = min((float(f.total("held")), float(f.transient)) for f in of_unit.values())
            if name in untried and self._calls.chained(name) > 1:
                held = 0.0
            elif name in untried:
                held, above = held * untried[name], above / 2
            found[name] = held, above
        return self._most(found)

    # -----------------------------------------------------------------------------------------------------------------

    def _most(self, of_units: Mapping[str, Bytes]) -> float:
        if self._in_order and not self._calls.turns:
            options = (LayerOption("", held, backward_peak=held + above) for held, above in of_units.values())
            return max(needed(options), default=0.0)
        # units that do not run in every step come in any order, and other micro-batches hold what one has left
        most = max((above for _, above in of_units.values()), default=0.0)
        return self._calls.most_at_once({name: nbytes for name, (nbytes, _) in of_units.items()}) + most

    def _bytes(self, name: str, decision: str) -> Bytes:
        """Return the bytes of a unit: those measured, or an estimate."""
        of_unit, saved = self.figures[name], self.saved(name)
        if (found := of_unit.get(decision)) is not None:
            return found.total("held"), found.transient
        again = self._recomputed(of_unit.values())
        if first := recomputed_calls(decision):
            share = first / self._calls.of[name]  # the recomputed part of the calls
            held, above = again or (saved, 0.0)
            return share * held + (1 - share) * saved, above
        if recomputes_all(decision):
            return again or (saved, saved)
        if part_of := excepted_part(decision):
            held, above = again or (saved, saved)
            return held + self._excepted(name, part_of), above
        if recomputes(decision):
            return saved, max(self._part(name, part) for part in by_part(decision))
        return saved, 0.0 if decision == KEEP else self._staged(name)

    def _recomputed(self, of_unit: Iterable[UnitFigures]) -> Bytes | None:
        """Return the bytes of a unit that is recomputed as a whole, with its inputs on the device."""
        for f in of_unit:
            if recomputes_all(f.decision):
                return f.total("held") + f.total("host") + f.total("disk"), f.transient
        return None

    def _part(self, name: str, part: str) -> float:
        """Return the upper bound of the bytes that a part of a unit saves."""
        known = [f.parts[part].saved for f in self.figures[name].values() if part in f.parts]
        return max(known) if known else self.saved(name)

    def _excepted(self, name: str, part: str) -> float:
        """Return the bytes that a part holds which does not run again: its results, and what it saves."""
        if part.startswith("@"):
            results, saved = self._results.get(name, {}), self.saved(name)
            return results.get(part[1:], saved) + (saved if UNSEEN in results else 0)
        return self._part(name, part) + self._results.get(f"{name}.{part}", {}).get("", 0)

    def _staged(self, name: str) -> float:
        """Return the bytes that a payload may take beside its tensor, estimated before it is measured."""
        most = max((part.saved for f in self.figures[name].values() for part in f.parts.values()), default=0)
        return most // self._calls.of[name] if name in self._calls.turns else most
