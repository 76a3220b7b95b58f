"""Sentences of pages that have figures. A field in braces is a file, a row and a column: ``{gpt, plain, step, ms}``."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from benchmarks.figures.tables import COLUMNS, EPYC, H100, file, runs

SENTENCES: dict[str, tuple[str, ...]] = {
    "README.md": (
        "Plain training takes {gpt|plain|step, ms} ms a step and saves {gpt|plain|saved} MiB of activations",
        "with batch 48 its peak is {gpt-batch-48|plain|peak of the process} MiB for plain training, "
        "{gpt-batch-48|int8|peak of the process} MiB with `int8` and "
        "{gpt-batch-48|recompute|peak of the process} MiB with `recompute`",
        "Weights and gradients are {h100 weights and gradients} GiB of each peak",
        "the link ({h100 link} GB/s)",
    ),
    "docs/measured.md": (
        "Plain training takes {gpt|plain|step, ms} ms a step and saves {gpt|plain|saved} MiB of activations",
        "weights and gradients are {h100 weights and gradients} GiB of it",
        "take the predicted time within {h100 plans} %",
        "`int8` in the graph | step time {h100 graphs|int8|step time, plain = 1} of plain compilation; held "
        "{h100 int8 held} of its bytes, peak of backward {h100 int8 peak}; gradient error "
        "{h100 graphs|int8|gradient error} %",
        "the same, `keep` | step time {h100 graphs|keep|step time, plain = 1} of plain compilation, gradients bit for "
        "bit, peak {h100 keep peak} ",
        "plain {h100 context plain} tokens, `recompute` {h100 context recompute}",
        "| {h100 link 64} % or more of plain pinned copies ({h100 both ways} GB/s together)",
        "| {h100 link 16} %; {h100 link 4} %; {h100 link 1} %: the host spends about {h100 payload} ms",
        "| {h100 stall} % of the step",
        "`int8`, bfloat16: encode; decode | {int8 bfloat16 encode gbps}; {int8 bfloat16 decode gbps} GB/s read and "
        "written, {int8 bfloat16 encode copy} %; {int8 bfloat16 decode copy} % of a device copy",
        "`int4`, bfloat16: encode; decode | {int4 bfloat16 encode gbps}; {int4 bfloat16 decode gbps} GB/s",
        "`expack`, bfloat16: encode; decode | {expack bfloat16 encode gbps}; {expack bfloat16 decode gbps} GB/s",
        "in {h100 codec tests} tests",
        "{h100 exact models} random models under exact policies, {h100 lossy models} under lossy ones",
        "lossy codecs decode float32 at {h100 slowest decode} to {h100 fastest decode} % of a device copy",
    ),
    "docs/guide/process-memory.md": ("plain PyTorch saves {gpt-batch-48|plain|saved} MiB of activations",),
    "docs/guide/run.md": ("the peak of the process is within {run peaks} % of that with `with store:`",),
    "docs/guide/compile.md": (
        "took {h100 graphs|int8|step time, plain = 1} times as long with `int8` as plain compilation, and held "
        "{h100 int8 held} of its bytes",
    ),
    "docs/guide/budget.md": (
        "from {h100 llama|recompute|step time, plain = 1} to {h100 llama|attention kept|step time, plain = 1} times "
        "plain",
    ),
}


@cache
def _part(name: str) -> Any:
    return file(H100)["parts"][name]["figures"]


def _kernel(name: str, way: str, figure: str) -> float:
    return float(next(row for row in _part("kernels")["rows"] if row["name"] == name)[way][figure])


def _percent(value: float) -> str:
    return f"{100 * value:.0f}"


def _link(mib: int, figure: str = "of_ceiling") -> float:
    rows = [row for row in _part("transfer")["link"] if row["nbytes"] == mib * 2**20]
    return float(rows[0]["both"][figure])


def _graph(name: str, figure: str, of: str = "") -> str:
    graphs = runs("h100 graphs")
    return f"{graphs[name][figure] / graphs['plain'][of or figure]:.2f}"


def _plans() -> str:
    """Return the largest deviation of a plan's time from the prediction, in per cent."""
    rows = [row for row in runs("h100 llama").values() if "predicted_ms" in row]
    return f"{max(100 * abs(row['step_ms'] / row['predicted_ms'] - 1) for row in rows):.1f}"


def _decodes() -> list[float]:
    rows = [row for row in _part("kernels")["rows"] if "float32" in row["name"].split() and row.get("error")]
    return sorted(row["decode"]["of_copy"] for row in rows if "decode" in row)


FIGURES: dict[str, Callable[[], str]] = {  # that are not in a table of runs
    "run peaks": lambda: f"{100 * max(abs(peak - 1) for peak in file(f'{EPYC}/overhead')['peaks'].values()):.1f}",
    "h100 weights and gradients": lambda: f"{2 * _part('llama')['parameter_bytes'] / 2**30:.1f}",
    "h100 link": lambda: f"{_part('llama')['link']['device_to_host']:.0f}",
    "h100 both ways": lambda: f"{_part('transfer')['ceilings']['both_ways']['gbps']:.0f}",
    "h100 plans": _plans,
    "h100 int8 held": lambda: _graph("int8", "held_bytes"),
    "h100 int8 peak": lambda: _graph("int8", "backward_peak_bytes"),
    "h100 keep peak": lambda: _graph("keep", "backward_peak_bytes"),
    "h100 context plain": lambda: f"{runs('h100 context')['plain']['tokens']:,}",
    "h100 context recompute": lambda: f"{runs('h100 context')['recompute']['tokens']:,}",
    "h100 link 64": lambda: _percent(min(_link(64), _link(256))),
    "h100 link 16": lambda: _percent(_link(16)),
    "h100 link 4": lambda: _percent(_link(4)),
    "h100 link 1": lambda: _percent(_link(1)),
    "h100 payload": lambda: f"{_link(1, 'host_us') / 1000:.1f}",
    "h100 stall": lambda: f"{100 * _part('transfer')['hidden']['stall_share']:.2f}",
    "h100 codec tests": lambda: str(len(_part("codecs")["passed"])),
    "h100 exact models": lambda: str(_part("random")["examples"]),
    "h100 lossy models": lambda: str(_part("lossy")["examples"]),
    "h100 slowest decode": lambda: _percent(_decodes()[0]),
    "h100 fastest decode": lambda: _percent(_decodes()[-1]),
}


def value(field: str) -> str:
    """Return the number of a field, without its unit."""
    if field in FIGURES:
        return FIGURES[field]()
    if "|" not in field:
        codec, dtype, way, figure = field.split()
        speed = _kernel(f"{codec} {dtype}", way, "gbps" if figure == "gbps" else "of_copy")
        return f"{speed:,.0f}" if figure == "gbps" else _percent(speed)
    name, row, column = field.split("|")
    found = re.match(r"[-+]?\d[\d,]*(?:\.\d+)?", COLUMNS[column](runs(name)[row]))
    assert found is not None, field
    return found[0]
