"""The page of an inspection: one HTML file without other resources."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from importlib.resources import files
from typing import Any

from actstore.display.colors import GREYS, SERIES
from actstore.inspection.beside import BesideActivations
from actstore.inspection.saved import InspectedTensor
from actstore.inspection.timeline import REST, Timeline, bands_of, decisions_of, labels_of
from actstore.session.report import SiteReport

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
