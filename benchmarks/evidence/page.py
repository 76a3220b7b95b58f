"""Page ``evidence.md`` of the cells of `benchmarks.evidence.run`: intervals and verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from scipy.stats import t

from benchmarks import machine
from benchmarks.evidence import plot as evidence_plot
from benchmarks.evidence.tasks import CHANGED, PLAIN, TASKS
from benchmarks.markdown import table

CONFIDENCE = 0.95
MEASURES = {"final": "Final training loss", "held_out": "Held-out loss"}

RULE = """\
Each row starts from plain's seeds, so differences are taken seed by seed: mean ± half of the 95 % confidence interval
(Student's t). Plain's own line is its mean over seeds ± the same: how far a change of seed alone moves it.

* *within*: the row's mean lies in the seeds' interval of plain. † marks those whose difference is seen in pairs all the
  same: its interval does not contain 0.
* *unclear*: it lies outside, but the interval of the difference contains 0: there are too few seeds to tell.
* *lower*, **worse**: it lies outside, and pairs agree.
* **diverged**: with some seed a loss was not finite, or training ended no lower than its first steps.

The final loss is the mean of the last tenth of the steps. *Bytes held* are those at the end of forward, by plain's;
what is never lossy is in them. A dash stands for what is not measured. ‡ marks what was measured before stores
changed what they do with the row."""


class Interval(NamedTuple):
    """A mean over two seeds or more, and half of its confidence interval by Student's t."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
        return cls(fmean(values), quantile * stdev(values) / sqrt(len(values)))


class Judged(NamedTuple):
    """Comparison of a row with plain, seed by seed.

    Attributes
    ----------
    off : mean difference to plain, over pairs with one seed
    plain : the mean of plain over the same seeds, whose interval shows the effect of the seed alone
    seeds : number of pairs
    verdict : within | unclear | lower | worse | diverged
    old : whether stores have changed their treatment of the row since some of its cells ran
    """

    off: Interval
    plain: Interval
    seeds: int
    verdict: str
    old: bool


def judge(found: dict[str, Any], task: str, row: str, measure: str = "final") -> Judged | None:
    """Compare a row with plain; return None where fewer than two seeds have both.

    "diverged": in some seed a loss is not finite, or the final training loss is not below the first point of the curve,
    which is a mean over some steps, since the first batch alone may be an easy one. "within": the row's mean lies in
    the seeds' interval of plain. Outside of it "unclear" where the interval of the paired difference contains 0, else
    "lower" or "worse".
    """
    plain, mine = ({cell["seed"]: cell for cell in _trained(found, task, name)} for name in (PLAIN, row))
    seeds = sorted(seed for seed in plain.keys() & mine.keys() if plain[seed][measure] is not None)
    if len(seeds) < 2:
        return None
    normal = Interval.of([plain[seed][measure] for seed in seeds])
    cells = [mine[seed] for seed in seeds]
    old = any(cell["date"] < CHANGED.get(row, "") for cell in cells)
    if any(cell[measure] is None or cell["final"] is None or cell["final"] >= cell["curve"][0] for cell in cells):
        return Judged(Interval(inf, inf), normal, len(seeds), "diverged", old)
    off = Interval.of([mine[seed][measure] - plain[seed][measure] for seed in seeds])
    if abs(off.mean) <= normal.half:
        verdict = "within"
    elif abs(off.mean) <= off.half:
        verdict = "unclear"
    else:
        verdict = "worse" if off.mean > 0 else "lower"
    return Judged(off, normal, len(seeds), verdict, old)


def _trained(found: dict[str, Any], task: str, row: str) -> list[dict[str, Any]]:
    """Return the cells of a task and a row that did not fail."""
    return [cell for cell in found["cells"] if (cell["task"], cell["row"]) == (task, row) and "failed" not in cell]


def write(folder: Path) -> Path:
    """Write ``evidence.md`` and ``evidence.png`` from ``evidence.json`` in `folder`; return the path of the page."""
    found = machine.read(folder / "evidence.json")
    verdicts = {(task, row): judge(found, task, row) for task in found["tasks"] for row in found["rows"]}
    offs = {names: (judged.off, judged.plain.half) for names, judged in verdicts.items() if judged}
    evidence_plot.draw(found, offs).savefig(folder / "evidence.png")
    path = folder / "evidence.md"
    path.write_text("\n".join(lines(found)).rstrip() + "\n", encoding="utf-8")
    return path


def lines(found: dict[str, Any]) -> list[str]:
    """Return the lines of the page."""
    said = ["# Training under lossy stores", "", "Made by `python -m benchmarks.evidence.run`.", ""]
    said += ["## Tasks", "", *_tasks(found), "", "## Results", ""]
    said += ["![loss curves, and how far final losses are from plain's](evidence.png)", ""]
    said += [*RULE.splitlines(), "", *_verdicts(found), ""]
    for measure, title in MEASURES.items():
        said += [f"### {title}", "", *_differences(found, measure), ""]
    return [*said, "### Right answers", "", *_accuracy(found), "", "### Runs", "", *_runs(found)]


def _tasks(found: dict[str, Any]) -> list[str]:
    cells = []
    for name, sizes in found["tasks"].items():
        size = f"{sizes['layers']} x {sizes['width']}, context {sizes['context']}, batch {sizes['batch']}"
        losses = []
        for what in ("first", *MEASURES):
            values = [cell[what] for cell in _trained(found, name, PLAIN) if cell[what] is not None]
            losses.append(f"{fmean(values):.3f}" if values else "-")
        cells.append([name, TASKS[name].title, size, str(sizes["steps"]), *losses, _dates(found, name)])
    return table(["task", "what", "layers x width", "steps", "first loss", "final", "held out", "measured"], cells)


def _dates(found: dict[str, Any], task: str) -> str:
    """Return the first and the last day on which a cell of the task ran."""
    days = sorted({cell["date"] for cell in found["cells"] if cell["task"] == task})
    return " to ".join(sorted({days[0], days[-1]})) if days else "-"


def _verdicts(found: dict[str, Any]) -> list[str]:
    header = ["row", "policy", "tasks", "bytes held", *(title.lower() for title in MEASURES.values())]
    return table(header, [_counted(found, row) for row in found["rows"] if row != PLAIN])


def _counted(found: dict[str, Any], row: str) -> list[str]:
    """Count the row's verdicts over the tasks that have it."""
    tasks = [task for task in found["tasks"] if judge(found, task, row)]
    held = [100 * cell["held"] for task in tasks for cell in _trained(found, task, row) if cell["held"]]
    (_, codec), *options = found["rows"][row].items()
    policy = ", ".join([f"`{codec}`", *(f"{name}={value}" for name, value in options)])
    names = [task + "‡" * one.old for task in tasks if (one := judge(found, task, row))]
    many = "all" if names == [*found["tasks"]] else ", ".join(names) or "-"
    said = [row, policy, many, f"{min(held):.0f} to {max(held):.0f} %" if held else "-"]
    for measure in MEASURES:
        judged = [one for task in tasks if (one := judge(found, task, row, measure))]
        counts = sorted(Counter(one.verdict for one in judged).items(), reverse=True)
        said.append(", ".join(f"{count} {word}" for word, count in counts) or "-")
    return said


def _differences(found: dict[str, Any], measure: str) -> list[str]:
    seeds = len({cell["seed"] for cell in found["cells"]})

    def judged(row: str, task: str) -> str:
        return _cell(judge(found, task, row, measure), row, seeds)

    cells = [[row, *(judged(row, task) for task in found["tasks"])] for row in found["rows"]]
    return table(["row", *found["tasks"]], cells)


def _cell(judged: Judged | None, row: str, seeds: int) -> str:
    """Describe the row in a task, marked where it is old, with the number of seeds where other cells have more."""
    if judged is None:
        return "-"
    said = _said(judged, row) + ("‡" if judged.old else "")
    return f"{said} ({judged.seeds} seeds)" if judged.seeds < seeds else said


def _said(judged: Judged, row: str) -> str:
    if row == PLAIN:
        return f"{judged.plain.mean:.4f} ± {judged.plain.half:.4f}"
    if judged.verdict == "diverged":
        return "**diverged**"
    seen = "†" if judged.verdict == "within" and abs(judged.off.mean) > judged.off.half else ""
    text = f"{judged.off.mean:+.4f} ± {judged.off.half:.4f} {judged.verdict}{seen}"
    return f"**{text}**" if judged.verdict == "worse" else text


def _accuracy(found: dict[str, Any]) -> list[str]:
    tasks = [name for name in found["tasks"] if TASKS[name].classes]
    cells = []
    for row in found["rows"]:
        of_tasks = [[100 * cell["accuracy"] for cell in _trained(found, task, row)] for task in tasks]
        cells.append([row, *(f"{fmean(some):.1f} %, least {min(some):.1f} %" if some else "-" for some in of_tasks)])
    return table(["row", *tasks], cells)


def _runs(found: dict[str, Any]) -> list[str]:
    """Describe the runs: their number, seeds and machine; and the failures."""
    env = found["environment"]
    seeds = sorted({cell["seed"] for cell in found["cells"]})
    said = [
        f"{len(found['cells'])} runs, seeds {seeds[0] if seeds else '-'} to {seeds[-1] if seeds else '-'}, one thread "
        f"each; {env['processor']}, no GPU; Python {env['python']}, torch {env['torch']}."
    ]
    for task in found["tasks"]:
        runs = {row: len(_trained(found, task, row)) for row in found["rows"]}
        none = [row for row, count in runs.items() if not count]
        few = [f"{row} ({count})" for row, count in runs.items() if 0 < count < len(seeds)]
        said += ["", f"Not measured of {task}: {'; '.join(none)}."] if none else []
        said += ["", f"Fewer seeds of {task}: {'; '.join(few)}."] if few else []
    failed = [cell for cell in found["cells"] if "failed" in cell]
    said += ["", *(f"- {cell['task']}, {cell['row']}, seed {cell['seed']} failed: {cell['failed']}" for cell in failed)]
    return said
