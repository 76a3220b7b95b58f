"""Profile of a model's training step: its units, the cost of each decision there, the machine.

Times in milliseconds, sizes in bytes, rates in bytes per millisecond.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from actstore.base.units import format_nbytes
from actstore.errors import ConfigError, PayloadError
from actstore.plan.decisions import KEEP, encodes_for_derive, recomputes, recomputes_all
from actstore.plan.fields import read_as
from actstore.plan.solver.chain import Links, most_at_once

FORMAT = "actstore profile 1"
MAX_CALLS = 10**6  # of a unit in a step


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one part of a unit.

    Attributes
    ----------
    saved : bytes that plain autograd would hold
    held : bytes held on the device at the end of forward
    host, disk : bytes in host memory and on disk
    """

    saved: int = 0
    held: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True)
class UnitFigures:
    """Figures of one unit under one decision, in one step or as medians of several.

    Attributes
    ----------
    decision : policy text, with names relative to the unit
    forward, backward : time of all its calls
    parts : its bytes, by child; "" for those that the unit itself saves
    transient : peak of the bytes that decode or recompute add in backward to the held ones
    error : squared relative error of its payloads: sum of squared errors over sum of squares; 0 for exact ones
    work_forward, work_backward : the part of these times that encode, decode and recompute took
    samples : number of steps and units in these medians
    """

    decision: str
    forward: float
    backward: float
    parts: dict[str, UnitBytes]
    transient: int = 0
    error: float = 0.0
    work_forward: float = 0.0
    work_backward: float = 0.0
    samples: int = 1

    def total(self, name: str) -> int:
        """Return the sum over the parts of "saved", "held", "host" or "disk"."""
        return sum(getattr(part, name) for part in self.parts.values())

    @staticmethod
    def median(samples: Sequence[UnitFigures]) -> UnitFigures:
        """Return the medians of samples of one decision."""
        first = samples[0]
        names = dict.fromkeys(name for sample in samples for name in sample.parts)
        return UnitFigures(
            first.decision,
            median(sample.forward for sample in samples),
            median(sample.backward for sample in samples),
            {name: _median_part([sample.parts.get(name, UnitBytes()) for sample in samples]) for name in names},
            int(median(sample.transient for sample in samples)),
            median(sample.error for sample in samples),
            median(sample.work_forward for sample in samples),
            median(sample.work_backward for sample in samples),
            sum(sample.samples for sample in samples),
        )


@dataclass(frozen=True)
class Unit:
    """A part of the model that is planned as one: a repeated block, or a module between blocks.

    Attributes
    ----------
    name : name of the module; "" for the tensors that the model itself and the loss save
    kind : units of one kind share their figures: same class, shapes and saved bytes
    calls : number of calls in one step
    parts : children that a rule of their own can name
    recomputable : whether its forward can be run again
    waiting : calls that wait for backward at once, where each has a backward of its own, as micro-batches in a pipeline
        have; 0 where one backward is for all calls
    turns : how many calls wait each time that a backward begins, at the turns with most; empty where it is one
    noise : by child, "" for the unit itself: the variance that errors in its payloads add to the gradients of the
        weights, for each unit of squared relative error, as a fraction of the variance from batch to batch; absent
        where it was not measured
    """

    name: str
    kind: str
    calls: int
    parts: tuple[str, ...]
    recomputable: bool
    noise: dict[str, float] = field(default_factory=dict)
    waiting: int = 0
    turns: tuple[int, ...] = ()

    @property
    def share(self) -> float:
        """Share of its calls that wait for backward at once."""
        return self.waiting / self.calls if self.waiting else 1.0


@dataclass(frozen=True)
class SharedBytes:
    """Bytes that several units, or parts of one unit, save or take as an input. The first that keeps them holds them.

    Attributes
    ----------
    units : names, in the order of forward
    parts : of each unit, its children that save them, "" for the unit itself; none where they are an input alone
    inputs : of each unit, whether it holds them as its input where it runs again
    holds : of each unit, whether it has held them under decisions that were measured
    """

    units: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...]
    inputs: tuple[bool, ...]
    nbytes: int
    holds: tuple[dict[str, bool], ...] = ()

    def plus(self, other: SharedBytes) -> SharedBytes:
        """Return the sum with other bytes of the same units. Who holds them is what gives the larger peak."""
        first, *later = zip(self.holds, other.holds, strict=True)
        least = {name: first[0].get(name, True) and first[1].get(name, True) for name in {**first[0], **first[1]}}
        most = ({name: a.get(name, False) or b.get(name, False) for name in {**a, **b}} for a, b in later)
        return replace(self, nbytes=self.nbytes + other.nbytes, holds=(least, *most))

    def keeps(self, number: int, decision: str) -> bool:
        """Return whether a unit would hold them under a decision, if no earlier one does.

        Where that is unknown, the first unit would not and a later one would: the larger sum.
        """
        known = self.holds[number].get(decision) if self.holds else None
        if known is not None:
            return known
        if recomputes_all(decision) or not self.parts[number]:
            return self.inputs[number] and recomputes(decision)
        return number > 0 or decision == KEEP

    def divided(self, changed: Container[str]) -> bool:
        """Return whether some parts of the first unit no longer keep them, as they have changed, and others do."""
        return len({part in changed for part in self.parts[0]}) > 1

    def spilled(self, decisions: Mapping[str, str]) -> str | None:
        """Return the first later unit that holds the bytes, when the first unit does not; None for none."""
        keep = (i for i, unit in enumerate(self.units) if self.keeps(i, decisions.get(unit, KEEP)))
        number = next(keep, 0)
        return self.units[number] if number else None


@dataclass(frozen=True)
class Memory:
    """Device memory beside activations, in bytes; `optimizer` is None where unknown: none has stepped yet.

    Attributes
    ----------
    parameters, gradients, optimizer, buffers : what stays from step to step; gradients may go before forward
    updating : what the optimizer needs for a moment while it steps
    temporary : all else at the peak of a step: temporary results, logits, gradients of activations, tensors that are
        not the model's; None where no total bounds them, or no allocator counts
    """

    parameters: int
    gradients: int
    optimizer: int | None
    buffers: int
    updating: int = 0
    temporary: int | None = None

    @property
    def lasting(self) -> int:
        """Bytes that are there when backward ends."""
        return self.parameters + self.gradients + (self.optimizer or 0) + self.buffers

    @property
    def reserved(self) -> int:
        """Bytes of a total that activations cannot have."""
        return self.lasting + (self.temporary or 0)


@dataclass(frozen=True)
class Profile:
    """Measurements of a training step, which can be written to a file and read again.

    Attributes
    ----------
    units : the units in the order of forward
    figures : by kind, for each measured decision
    rest : the time of a step outside of all units
    model : digest of the model's modules, shapes and dtypes; two, where the first forward has changed the modules
    machine : the properties of the machine that times depend on
    steps : number of measured steps
    shared : bytes that several units save, and that the figures have at the first of them
    """

    units: tuple[Unit, ...]
    figures: dict[str, dict[str, UnitFigures]]
    links: Links
    rest: float
    memory: Memory
    model: str
    machine: dict[str, str]
    steps: int = 0
    shared: tuple[SharedBytes, ...] = ()

    @property
    def saved(self) -> int:
        """Bytes of activations that plain autograd holds at once in a step."""
        return int(
            most_at_once(
                (int(unit.share * next(iter(self.figures[unit.kind].values())).total("saved")), unit.turns)
                for unit in self.units
            )
        )

    def write(self, path: str | Path) -> None:
        """Write JSON.

        Raises
        ------
        ConfigError : the file cannot be written
        """
        write_json(Path(path), self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        links = {
            name: None if rate == inf else rate for name, rate in asdict(self.links).items()
        }  # JSON has no infinity
        return {"format": FORMAT, **asdict(self), "links": links}

    @classmethod
    def read(cls, path: str | Path) -> Profile:
        """Read what `write` wrote. Nothing in the file is executed.

        Raises
        ------
        ConfigError : the file cannot be opened
        PayloadError : it is not a profile
        """
        return cls.from_dict(read_json(Path(path), FORMAT), str(path))

    @classmethod
    def from_dict(cls, values: dict[str, Any], path: str = "") -> Profile:
        """Build a profile from the result of `to_dict`.

        Raises
        ------
        PayloadError : the values are not a profile; the error names the field
        """
        values = {name: value for name, value in values.items() if name != "format"}
        if isinstance(links := values.get("links"), dict):
            values["links"] = {name: rate for name, rate in links.items() if rate is not None}
        try:
            return read_as(cls, values)._checked()
        except ConfigError as error:
            raise PayloadError(f"{path}: not a profile: {error} Measure again.", path=path, **error.facts) from error

    def _checked(self) -> Profile:
        """Check that the parts fit together, and return the profile itself.

        Raises
        ------
        ConfigError : the parts do not fit together
        """
        for i, unit in enumerate(self.units):
            if not self.figures.get(unit.kind):
                raise ConfigError(f"units[{i}].kind is {unit.kind!r}, which has no figures.", field=f"units[{i}].kind")
            if not 1 <= unit.calls <= MAX_CALLS:
                raise ConfigError(
                    f"units[{i}].calls is {unit.calls}, not from 1 to {MAX_CALLS:,}.", field=f"units[{i}].calls"
                )
            if not 0 <= unit.waiting <= unit.calls:
                raise ConfigError(
                    f"units[{i}].waiting is {unit.waiting}, not from 0 to its calls, {unit.calls:,}.",
                    field=f"units[{i}].waiting",
                )
        return self

    def __str__(self) -> str:
        lines = [
            f"{len(self.units)} units, {format_nbytes(self.saved)} of activations, {self.steps} steps measured on "
            + ", ".join(self.machine.values())
        ]
        for kind, decisions in self.figures.items():
            if not (units := [unit for unit in self.units if unit.kind == kind]):
                continue
            shown = units[0].name or "(the model itself and the loss)"
            lines.append(f"{shown}{f' and {len(units) - 1} like it' if len(units) > 1 else ''}")
            for name, f in decisions.items():
                moved = "".join(
                    f", {format_nbytes(f.total(tier))} to {tier}" for tier in ("host", "disk") if f.total(tier)
                )
                lines.append(
                    f"  {name:32} forward {f.forward:8.2f} ms, backward {f.backward:8.2f} ms, "
                    f"held {format_nbytes(f.total('held'))} of {format_nbytes(f.total('saved'))}{moved}"
                    f"{f', error {f.error**0.5:.2%}' if f.error else ''} ({f.samples} samples)"
                )
        return "\n".join(lines)


def _median_part(parts: Sequence[UnitBytes]) -> UnitBytes:
    return UnitBytes(
        *(int(median(getattr(part, name) for part in parts)) for name in ("saved", "held", "host", "disk"))
    )


def medians(samples: Iterable[UnitFigures], last: int = 12) -> dict[str, UnitFigures]:
    """Return the medians of the `last` samples of each decision, in the order of first use.

    What is derived has the error of payloads, maybe of another unit, so ``derive(int8)`` counts with that of ``int8``.
    """
    by_decision: dict[str, list[UnitFigures]] = {}
    for sample in samples:
        by_decision.setdefault(sample.decision, []).append(sample)
    found = {decision: UnitFigures.median(group[-last:]) for decision, group in by_decision.items()}
    for decision, figures in found.items():
        if encoded := encodes_for_derive(decision):
            error = found[encoded].error if encoded in found else 1.0
            found[decision] = replace(figures, error=max(figures.error, error))
    return found


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write an object, with its checksum."""
    text = json.dumps({**values, "checksum": _checksum(values)}, indent=1, allow_nan=False)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Choose a path that can be written.") from error


def read_json(path: Path, expected: str) -> dict[str, Any]:
    """Read an object that `write_json` wrote, with this "format", check its checksum, and return it without that."""
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Give a file that can be read.") from error
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{path}: not JSON: {error}. Give a file that actstore wrote.", path=str(path)) from error
    found = values.get("format") if isinstance(values, dict) else None
    if found != expected:
        raise PayloadError(
            f"{path}: its format is {found!r}, not {expected!r}. Give a file that this version of actstore wrote, or "
            "make it again with: actstore plan.",
            path=str(path),
        )
    checksum = values.pop("checksum", None)
    if checksum != _checksum(values):
        raise PayloadError(
            f"{path}: its checksum is {checksum!r}, that of its contents {_checksum(values)!r}: it was changed after "
            "it was written. Make it again with: actstore plan. A policy of your own is text: policy=.",
            path=str(path),
        )
    return dict(values)


def _checksum(values: dict[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
