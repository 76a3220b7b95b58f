"""Sentences of pages that have figures. A field in braces is a file, a row and a column: ``{gpt, plain, step, ms}``."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from benchmarks.figures.tables import COLUMNS, H100, file, runs

SENTENCES: dict[str, tuple[str, ...]] = {
    "README.md": (
        "Plain training takes {gpt|plain|step, ms} ms a step and saves {gpt|plain|saved} MiB of activations",
        "with batch 48 its peak is {gpt-batch-48|plain|peak of the process} MiB for plain training, "
        "{gpt-batch-48|int8|peak of the process} MiB with `int8` and "
        "{gpt-batch-48|recompute|peak of the process} MiB with `recompute`",
        "Weights and gradients are {h100 weights and gradients} GiB of each peak",
        "the link ({h100 link} GB/s)",
    ),
}


@cache
def _part(name: str) -> Any:
    return file(H100)["parts"][name]["figures"]


def _kernel(name: str, way: str, figure: str) -> float:
    return float(next(row for row in _part("kernels")["rows"] if row["name"] == name)[way][figure])


def _link(mib: int) -> float:
    return float(next(row for row in _part("transfer")["link"] if row["nbytes"] == mib * 2**20)["both"]["of_ceiling"])


FIGURES: dict[str, Callable[[], str]] = {  # that are not in a table of runs
    "h100 weights and gradients": lambda: f"{2 * _part('llama')['parameter_bytes'] / 2**30:.1f}",
    "h100 link": lambda: f"{_part('llama')['link']['device_to_host']:.0f}",
}


def value(field: str) -> str:
    """Return the number of a field, without its unit."""
    if field in FIGURES:
        return FIGURES[field]()
    name, row, column = field.split("|")
    found = re.match(r"[-+]?\d[\d,]*(?:\.\d+)?", COLUMNS[column](runs(name)[row]))
    assert found is not None, field
    return found[0]
