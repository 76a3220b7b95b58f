"""What was measured of a model's training step: its units, what each decision costs there, the machine.

Times in milliseconds, sizes in bytes, rates in bytes per millisecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from actstore.base.units import format_nbytes
from actstore.errors import ConfigError, PayloadError
from actstore.plan.fields import read_as
from actstore.plan.solver.chain import Links

KEEP = "keep"
FORMAT = "actstore profile 1"
MOST_CALLS = 10**6  # of a unit in a step


@dataclass(frozen=True)
class UnitBytes:
    """The bytes of one part of a unit: what plain autograd would hold, what was held on the device at the end of
    forward, and what went to host memory and to disk."""

    saved: int = 0
    held: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True)
class UnitFigures:
    """One unit in one step, or the medians of several, under one decision.

    Attributes
    ----------
    decision : policy text, with names as seen from the unit: ``"recompute"``, ``"attn : recompute"``
    forward, backward : time of all its calls
    parts : its bytes, by child; "" is what the unit itself saves
    transient : most bytes that its decoding or recomputation adds in backward to what it holds
    error : of its payloads, the sum of squared errors over the sum of squares; 0 for what is exact
    work_forward, work_backward : the part of these times that encoding, decoding and recomputation took
    samples : how many steps and units this is the median of
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
        """The sum over the parts of "saved", "held", "host" or "disk"."""
        return sum(getattr(part, name) for part in self.parts.values())

    @staticmethod
    def median(samples: Sequence[UnitFigures]) -> UnitFigures:
        """The medians of samples of one decision."""
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
    """A part of the model that is planned as one: a repeated block, or what lies between.

    Attributes
    ----------
    name : of the module; "" is what the model itself and the loss save
    kind : units of one kind share their figures: same class, shapes and saved bytes
    calls : in one step
    parts : children that a rule of their own may address
    recomputable : whether its forward can be run again
    noise : by child, "" for the unit itself: the variance that errors in its payloads add to the gradients of the
        weights, for each unit of squared relative error, as a fraction of the variance from batch to batch; not there
        where that was not measured
    """

    name: str
    kind: str
    calls: int
    parts: tuple[str, ...]
    recomputable: bool
    noise: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """Where else the memory of the device goes; None where it is not known (an optimizer that has not stepped yet)."""

    parameters: int
    gradients: int
    optimizer: int | None
    buffers: int


@dataclass(frozen=True)
class Profile:
    """A training step, measured. A file that can be shown, kept and used again.

    Attributes
    ----------
    units : in the order of forward
    figures : by kind, for each decision that was measured
    rest : the time of a step that no unit takes
    model : digest of the model's modules, shapes and dtypes
    machine : what the times depend on
    steps : how many steps were measured
    """

    units: tuple[Unit, ...]
    figures: dict[str, dict[str, UnitFigures]]
    links: Links
    rest: float
    memory: Memory
    model: str
    machine: dict[str, str]
    steps: int = 0

    @property
    def saved(self) -> int:
        """What plain autograd holds of a step's activations."""
        return sum(next(iter(self.figures[unit.kind].values())).total("saved") for unit in self.units)

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
        """What `to_dict` made.

        Raises
        ------
        PayloadError : it is not a profile; the field is named
        """
        values = {name: value for name, value in values.items() if name != "format"}
        if isinstance(links := values.get("links"), dict):
            values["links"] = {name: rate for name, rate in links.items() if rate is not None}
        try:
            return read_as(cls, values)._checked()
        except ConfigError as error:
            raise PayloadError(f"{path}: not a profile: {error}; measure again", path=path, **error.facts) from error

    def _checked(self) -> Profile:
        """Itself, if its parts go together.

        Raises
        ------
        ConfigError : they do not
        """
        for i, unit in enumerate(self.units):
            if not self.figures.get(unit.kind):
                raise ConfigError(f"units[{i}].kind is {unit.kind!r}, which has no figures", field=f"units[{i}].kind")
            if not 1 <= unit.calls <= MOST_CALLS:
                raise ConfigError(
                    f"units[{i}].calls is {unit.calls}, not from 1 to {MOST_CALLS:,}", field=f"units[{i}].calls"
                )
        return self

    def __str__(self) -> str:
        lines = [
            f"{len(self.units)} units, {format_nbytes(self.saved)} of activations, {self.steps} steps measured on "
            + ", ".join(self.machine.values())
        ]
        for kind, decisions in self.figures.items():
            units = [unit for unit in self.units if unit.kind == kind]
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
    """The medians of the `last` samples of each decision, in the order of first use."""
    by_decision: dict[str, list[UnitFigures]] = {}
    for sample in samples:
        by_decision.setdefault(sample.decision, []).append(sample)
    return {decision: UnitFigures.median(group[-last:]) for decision, group in by_decision.items()}


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write an object, with a checksum of it."""
    text = json.dumps({**values, "checksum": _checksum(values)}, indent=1, allow_nan=False)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; choose a path that can be written") from error


def read_json(path: Path, expected: str) -> dict[str, Any]:
    """An object that `write_json` wrote, and whose "format" is `expected`; without its checksum."""
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file that can be read") from error
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{path}: not JSON: {error}; give a file that actstore wrote", path=str(path)) from error
    found = values.get("format") if isinstance(values, dict) else None
    if found != expected:
        raise PayloadError(
            f"{path}: its format is {found!r}, not {expected!r}; give a file that this version of actstore wrote, or "
            "make it again with: actstore plan",
            path=str(path),
        )
    checksum = values.pop("checksum", None)
    if checksum != _checksum(values):
        raise PayloadError(
            f"{path}: its checksum is {checksum!r}, that of its contents {_checksum(values)!r}: it was changed after "
            "it was written. Make it again with: actstore plan; to run a policy of your own, give its text as policy=",
            path=str(path),
        )
    return dict(values)


def _checksum(values: dict[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
