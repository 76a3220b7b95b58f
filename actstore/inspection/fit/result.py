"""The result of a fit: the memory of a step under each policy, and the largest sizes that fit."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, get_args

from actstore.base.units import format_nbytes
from actstore.display.naming import joined, layer_pattern
from actstore.display.text import columns, wrapped
from actstore.inspection.fit.memory import Label


class FitRow(NamedTuple):
    """The memory of one step under one policy.

    Attributes
    ----------
    policy : its text; ``plain`` for PyTorch without a store
    peak_bytes : peak of all tensors and payloads
    least_bytes, most_bytes : where the policy uses a disk, the same with copies that are never late, and with a disk
        that never keeps up; `peak_bytes` is with a disk that keeps up with forward, and with
        bytes fetched ahead as far as the store may. Otherwise all are equal
    at_peak : the `peak_bytes`: weights, gathered (the buffers of FSDP2), gradients, optimizer, logits, payloads,
        activations that autograd or the store holds as they are, and working (what operators have just made, also in
        the second run of a module)
    ms : least and most milliseconds of the step on the device; None where no device was given
    times_plain : least and most times that of plain PyTorch
    plan : text of the policy that "auto" would choose, by estimated times; None for any other policy
    budget_bytes : of that plan, for activations
    peak_at : operator and module that run at the peak, such as ``gelu in blocks.3.mlp.1, run again``
    frugal_bytes : for "auto" without a budget, what the step needs under the plan that needs least
    """

    policy: str
    peak_bytes: int
    least_bytes: int
    most_bytes: int
    at_peak: dict[Label, int]
    ms: tuple[float, float] | None = None
    times_plain: tuple[float, float] | None = None
    plan: str | None = None
    budget_bytes: int | None = None
    frugal_bytes: int | None = None
    peak_at: str = ""

    @property
    def largest(self) -> Label:
        """The label of the largest part of the peak."""
        return max(self.at_peak, key=lambda label: self.at_peak[label], default="working")


@dataclass(frozen=True)
class Fit:
    """Memory of a step, predicted for each policy.

    Attributes
    ----------
    rows : one for each policy, plain first
    memory_bytes : of the device; None where none was given
    sizes : the arguments that make_step got, and those that were searched
    largest : for each policy, the largest batch and context that fit, each with the other sizes as they are; 0 where
        not even 1 fits. Only those that make_step takes
    parts : for each policy, the label of the largest part of the peak of the next batch or context, which does not fit
    errors : for each policy, what the step raises at the next batch or context, where this ends the search, not memory
    device : whose rates give the times; None where none was given
    best : where a size was "auto", the step at the largest one, under the policy that reaches it first
    advice : what lowers the least peak of all rows, where tiles do; empty for nothing
    fsdp, tp : ranks that shard the weights, and that split the layers; the figures are those of one rank
    """

    rows: tuple[FitRow, ...]
    memory_bytes: int | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    largest: dict[str, dict[str, int]] = field(default_factory=dict)
    parts: dict[str, dict[str, Label]] = field(default_factory=dict)
    errors: dict[str, dict[str, str]] = field(default_factory=dict)
    device: str | None = None
    best: FitRow | None = None
    advice: str = ""
    fsdp: int = 1
    tp: int = 1

    def __str__(self) -> str:
        """Return a table with a row for each policy."""
        labels = [label for label in get_args(Label) if any(label in row.at_peak for row in self.rows)]
        sizes = self._names
        fits = [] if self.memory_bytes is None else ["fits"]
        times = ["ms", "times plain"] if any(row.ms for row in self.rows) else []
        head = [
            "policy",
            "peak",
            *labels,
            *fits,
            *(f"largest {size}" for size in sizes),
            *times,
            "largest part",
            "peak at",
        ]
        lines = [head, *(self._cells(row, labels, sizes) for row in self.rows)]
        return "\n".join([*columns(lines), *self._notes()])

    def _cells(self, row: FitRow, labels: list[Label], sizes: list[str]) -> list[str]:
        fits = [] if self.memory_bytes is None else ["yes" if row.peak_bytes <= self.memory_bytes else "no"]
        return [
            row.policy,
            format_nbytes(row.peak_bytes),
            *(format_nbytes(row.at_peak.get(label, 0)) for label in labels),
            *fits,
            *(self._most(row, size) for size in sizes),
            *(() if row.ms is None else (_range(row.ms, 1), _range(row.times_plain, 2))),
            row.largest,
            row.peak_at,
        ]

    def _most(self, row: FitRow, name: str) -> str:
        """Return the largest size, with the part that grows too large where it is another than in the row."""
        part = self.parts.get(row.policy, {}).get(name, row.largest)
        most = self.largest[row.policy][name]
        return f"{most}" if part == row.largest else f"{most} ({part})"

    def _notes(self) -> list[str]:
        notes = [
            f"{row.policy}: {format_nbytes(row.least_bytes)} to {format_nbytes(row.most_bytes)}, as fast as copies are"
            for row in self.rows
            if row.most_bytes > row.least_bytes
        ]
        notes += [line for row in self.rows if row.plan is not None for line in _plan_lines(row)]
        if self.memory_bytes is not None:
            notes.append(
                "; ".join(
                    [f"fits: whether {format_nbytes(self.memory_bytes)} are enough", *map(self._searched, self._names)]
                )
            )
        ends: dict[str, list[str]] = {}
        for policy, errors in self.errors.items():
            for name, error in errors.items():
                text = f"the step fails at {name}={self.largest[policy][name] + 1}: {error}"
                ends.setdefault(text, []).append(policy)
        notes += [f"{', '.join(policies)}: {text}" for text, policies in ends.items()]
        notes += wrapped(self.advice) if self.advice else []
        notes += wrapped(self._best(self.best)) if self.best is not None else []
        if self.fsdp > 1 or self.tp > 1:
            notes.append(f"of one rank: weights sharded by fsdp={self.fsdp}, layers split by tp={self.tp}")
            if self.device is not None:
                notes.append("times: none, as copies between ranks are not modelled")
        elif self.device not in (None, "cpu"):
            notes.append(f"times: by the data sheet of {self.device}; not measured")
        return notes

    def _best(self, row: FitRow) -> str:
        """Return the largest size and its step as text."""
        (name,) = self._names
        on = self.device or "this CPU"
        times = f"; it takes {_range(row.ms, 1)} ms on {on}, {_range(row.times_plain, 2)} times plain" if row.ms else ""
        return (
            f"largest {name}: {self.largest[row.policy][name]}, under {row.policy!r}; a step needs "
            f"{format_nbytes(row.peak_bytes)}, most of it at {row.peak_at}{times}"
        )

    @property
    def _names(self) -> list[str]:
        """Sizes that were searched."""
        return list(dict.fromkeys(name for found in self.largest.values() for name in found))

    def _searched(self, name: str) -> str:
        """Return the other sizes of a search, as text."""
        rest = ", ".join(f"{other}={value}" for other, value in self.sizes.items() if other != name)
        return f"largest {name}: with {rest}" if rest else f"largest {name}"

    def to_dict(self) -> dict[str, object]:
        """Return all figures, under the names of the attributes."""
        return asdict(self) | {"rows": [row._asdict() | {"largest": row.largest} for row in self.rows]}

    def to_json(self) -> str:
        """Return the same as one JSON object."""
        return json.dumps(self.to_dict(), indent=1)


def _range(found: tuple[float, float] | None, digits: int) -> str:
    """Return a range as text, one number where both ends are the same; from 100 on without digits."""
    texts = [f"{each:.{digits if each < 100 else 0}f}" for each in found or ()]
    return " to ".join(dict.fromkeys(texts))


def _plan_lines(row: FitRow) -> list[str]:
    """Return the plan of a row as text: units of several layers with the same decision in one piece."""
    names: dict[tuple[str, str], list[str]] = {}
    for line in (row.plan or "").splitlines():
        name, _, decision = line.rpartition(" : ")
        names.setdefault((layer_pattern(name), decision), []).append(name)
    rules = "; ".join(f"{joined(each)} : {decision}" for (_, decision), each in names.items())
    return wrapped(f"{row.policy}: plan for {format_nbytes(row.budget_bytes or 0)} of activations: {rules}")
