"""The result of an inspection: saved tensors, the memory through the step, tables of both, and a page of HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from actstore.base.units import format_nbytes
from actstore.display.colors import GREYS, SERIES
from actstore.display.naming import joined, layer_pattern
from actstore.display.text import columns, percent
from actstore.errors import ConfigError
from actstore.inspection.beside import BesideActivations
from actstore.inspection.saved import InspectedTensor
from actstore.inspection.suggestions import Suggestion
from actstore.inspection.timeline import REST, Timeline, bands_of, decisions_of, holders, labels_of
from actstore.session.report import Report, SiteReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEXT_COLUMNS = (1, 2, 3, 4, 5, 6, 9)  # of a tensor's row: each text is in the file once


def page(
    tensors: Sequence[InspectedTensor],
    timelines: Sequence[Timeline],
    sites: Sequence[SiteReport],
    notes: Sequence[str],
    beside: BesideActivations,
) -> str:
    """Return the text of the file; the last timeline is the store's, with its sites; `notes` stand below them."""
    bands = bands_of(timelines)
    labels = labels_of(timelines, bands)
    found = decisions_of(bands, sites)
    rows: list[list[Any]] = [
        [
            tensor.saved_bytes, "x".join(map(str, tensor.shape)) or "scalar", tensor.dtype, tensor.operator,
            tensor.module, tensor.place, tensor.code, round(tensor.saved_ms, 2),
            None if tensor.freed_ms is None else round(tensor.freed_ms, 2), bands.get(tensor.module, REST),
        ]
        for tensor in tensors
    ]  # fmt: skip
    texts = {column: _Numbers() for column in _TEXT_COLUMNS}
    for row in rows:
        for column, numbers in texts.items():
            row[column] = numbers[row[column]]
    values = {
        "bands": labels,
        "notes": notes,
        "decisions": [found.get(label, "") for label in labels],
        "beside": list(beside.bands(timelines[0].points[0])),
        "timelines": [_timeline(line, bands, labels, beside) for line in timelines],
        "texts": {column: list(numbers) for column, numbers in texts.items()},
        "tensors": rows,
    }
    text = json.dumps(values, separators=(",", ":")).replace("</", "<\\/")  # it stands inside of a script element
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return (
        template.replace("__COLORS__", json.dumps(SERIES))
        .replace("__GREYS__", json.dumps(GREYS))
        .replace("__DATA__", text)
    )


class _Numbers(dict[Hashable, int]):
    """Numbers of values, in the order of their first use."""

    def __missing__(self, key: Hashable) -> int:
        self[key] = number = len(self)
        return number


def _timeline(line: Timeline, bands: dict[str, str], labels: list[str], beside: BesideActivations) -> dict[str, Any]:
    numbers = {label: at for at, label in enumerate(labels)}
    held = []
    for point in line.points:
        sums = [0] * len(labels)
        for name, nbytes in point.modules.items():
            sums[numbers[bands[name]]] += nbytes
        held.append(sums)
    return {
        "policy": line.policy,
        "backward_ms": round(line.backward_ms, 2),
        "ms": [round(point.ms, 2) for point in line.points],
        "allocated": [point.allocated_bytes for point in line.points],
        "counted": beside.are_counted(line),
        "beside": [list(beside.bands(point).values()) for point in line.points],
        "bytes": held,
    }


MAX_ROWS = 16
MAX_CODE_LENGTH = 48  # characters
GroupBy = Literal["line", "operator", "module"]


@dataclass(frozen=True)
class Inspection:
    """A step, inspected.

    Attributes
    ----------
    tensors : all that autograd saves in the plain step, weights included, in the order of forward
    plain, store : memory through the plain step, and through the step with the store
    beside : bytes of weights, gradients and optimizers at the end of the plain step
    suggestions : at most three remedies, with their predicted peak and time
    report : the store's report after its step
    """

    tensors: tuple[InspectedTensor, ...]
    plain: Timeline
    store: Timeline
    beside: BesideActivations
    suggestions: tuple[Suggestion, ...]
    report: Report

    @property
    def saved_bytes(self) -> int:
        """Bytes that plain autograd holds for the step: each storage once, without parameters and buffers."""
        return sum(tensor.saved_bytes for tensor in self.tensors)

    def table(self, by: GroupBy = "line", most: int | None = MAX_ROWS) -> str:
        """Return a table of what plain autograd saves, the largest first, with its sum in the last row.

        Parameters
        ----------
        by : "line" of code, "operator", or "module", with equal modules of several layers in one row
        most : number of rows that are shown; one more has the sum of the rest. None for all
        """
        if by not in _KEYS:
            raise ConfigError(f"by={by!r}: must be 'line', 'operator' or 'module'.")
        groups: dict[str, list[InspectedTensor]] = {}
        for tensor in self.tensors:
            if tensor.saved_bytes:
                groups.setdefault(_KEYS[by](tensor), []).append(tensor)
        rows = sorted(groups.values(), key=lambda tensors: -_nbytes(tensors))
        shown = len(rows) if most is None or len(rows) <= most + 1 else most
        head = ("saved", "share", "tensors", "shape", "dtype", "saved by", "module", "line")
        cells = [self._cells(row) for row in rows[:shown]]
        if rest := [tensor for row in rows[shown:] for tensor in row]:
            cells.append((*self._sums(rest), "", "", "", "", f"{len(rows) - shown} more: table(most=None) shows them"))
        every = [tensor for row in rows for tensor in row]
        return "\n".join(columns([head, *cells, (*self._sums(every), "", "", "", "", "total")], left=3))

    def _cells(self, tensors: list[InspectedTensor]) -> tuple[str, ...]:
        first = tensors[0]
        code = first.code if len(first.code) <= MAX_CODE_LENGTH else first.code[: MAX_CODE_LENGTH - 3] + "..."
        same_line = _one(f"{tensor.file}:{tensor.line}" for tensor in tensors) is not None
        return (
            *self._sums(tensors),
            _one("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors) or "several",
            _one(tensor.dtype for tensor in tensors) or "several",
            _one(tensor.operator for tensor in tensors) or "several",
            _modules(tensors),
            f"{first.place}  {code}".strip() if same_line else "several",
        )

    def _sums(self, tensors: list[InspectedTensor]) -> tuple[str, str, str]:
        nbytes = _nbytes(tensors)
        return format_nbytes(nbytes), percent(nbytes / (self.saved_bytes or 1), ".0f"), str(len(tensors))

    def __str__(self) -> str:
        """Return the table by lines, the peaks of both steps, the store's advice, and what would lower the peak."""
        return self.text()

    def text(self, by: GroupBy = "line", most: int | None = MAX_ROWS) -> str:
        """Return the same with another `table`."""
        remedies = [f"\n{line}" if at == 0 else f"  {line}" for at, line in enumerate(self._remedies())]
        return "\n".join([self.table(by, most), "", *self._peaks(), str(self.beside), *self.report.advice, *remedies])

    def _peaks(self) -> Iterable[str]:
        for timeline in (self.plain, self.store):
            peak = timeline.peak
            when = "backward" if peak.backward else "forward"
            largest = ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in holders(timeline))
            yield (
                f"{timeline.policy}: at most {format_nbytes(peak.held_bytes)} of activations, {peak.ms:.0f} ms into "
                f"the step, in {when}: {largest or 'nothing'}"
            )

    def _remedies(self) -> list[str]:
        return ["To lower the plain peak:", *map(str, self.suggestions)] if self.suggestions else []

    def plot(self) -> Figure:
        """Draw the memory through both steps: bands of weights, optimizer and gradients, and of each group of layers.

        Raises
        ------
        ConfigError : matplotlib is not installed (the extra `bench`)
        """
        from actstore.inspection.picture import picture

        return picture(self.plain, self.store, self.report.sites, self.beside)

    def to_html(self) -> str:
        """Return the text of one HTML file, without other resources: both steps to hover and zoom, and all tensors."""
        notes = [str(self.beside), *self._remedies()]
        return page(self.tensors, (self.plain, self.store), self.report.sites, notes, self.beside)

    def _repr_html_(self) -> str:
        """Return the same for notebooks."""
        return f'<iframe srcdoc="{escape(self.to_html())}" width="100%" height="760" style="border:0"></iframe>'

    def to_json(self) -> str:
        """Return all tensors and both timelines as one JSON object, under the names of the attributes."""
        values = {name: value for name, value in asdict(self).items() if name != "report"}
        return json.dumps(values | {"report": json.loads(self.report.to_json())}, indent=1)


_KEYS: dict[str, Callable[[InspectedTensor], str]] = {
    "line": lambda tensor: f"{tensor.file}:{tensor.line} {tensor.operator} {tensor.shape} {tensor.dtype}",
    "operator": lambda tensor: tensor.operator,
    "module": lambda tensor: layer_pattern(tensor.module),
}


def _nbytes(tensors: Iterable[InspectedTensor]) -> int:
    return sum(tensor.saved_bytes for tensor in tensors)


def _one(texts: Iterable[str]) -> str | None:
    """Return the text that all are; None where they differ."""
    found = set(texts)
    return found.pop() if len(found) == 1 else None


def _modules(tensors: list[InspectedTensor]) -> str:
    names = list(dict.fromkeys(tensor.module for tensor in tensors))
    if len({layer_pattern(name) for name in names}) > 1:
        return "several"
    return joined(names) if len(names) > 1 else names[0] or "(outside of the model)"
