"""Page of a machine, from the figures in its folder: ``python -m benchmarks.suite.page [FOLDER ...]``.

Without folders it makes all pages of ``results/`` anew, with their pictures.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from actstore.bench import plot
from actstore.bench.comparison import HELD_NOISE, Versus, versus
from actstore.bench.result import Result
from actstore.bench.table import cells
from actstore.bench.workloads import MODELS
from benchmarks import largest, machine
from benchmarks.markdown import cell, table
from benchmarks.suite import breakdown, convergence, long, scaling

Draw = Callable[[dict[str, Any]], Figure]
Lines = Callable[[dict[str, Any]], list[str]]

SECTIONS: dict[str, tuple[str, Draw, Lines]] = {
    "breakdown": ("Where the time goes", breakdown.draw, breakdown.lines),
    "scaling": ("With more layers, context and batch", scaling.draw, scaling.lines),
    "largest": ("The largest batch within a budget", largest.draw, largest.lines),
    "long": ("With a long context and a large vocabulary", long.draw, long.lines),
    "convergence": ("Training for longer", convergence.draw, convergence.lines),
}
MORE_FILES = {  # files that other commands leave in the folder
    "codecs": "the codecs: ratio, speed and error",
    "timeline": "one step of `raw @ disk`",
    "planned": 'plans by "auto" under budgets',
    "planner": "the planner itself",
    "overlap": "a step while its activations go to disk and come back",
    "hotpath": "the hot path",
    "evidence": "training under lossy stores",
}


def write(folder: Path) -> Path:
    """Write the page beside `folder`, and the pictures in it."""
    path = folder.with_name(f"{folder.name}.md")
    path.write_text("\n".join(lines(folder)).rstrip() + "\n", encoding="utf-8")
    return path


def lines(folder: Path) -> list[str]:
    """Return the page. A missing file has no section."""
    runs = {model: found for model in MODELS if (found := machine.read(folder / f"{model}.json"))}
    others = {name: found for name in SECTIONS if (found := machine.read(folder / f"{name}.json"))}
    notes = machine.read(folder / "parts.json") or {}
    environments = [found["environment"] for found in (*runs.values(), *others.values()) if "environment" in found]
    said = [f"# {_title(environments, folder.name)}", "", INTRODUCTION, ""]
    results = {model: Result.from_dict(found) for model, found in runs.items()}
    said += against(results)
    for model, result in results.items():
        said += _workload(folder, model, result, notes.get(model))
    for name, found in others.items():
        title, draw, words = SECTIONS[name]
        draw(found).savefig(folder / f"{name}.png")
        said += [f"## {title}", "", *_picture(folder, name, title), *words(found), "", *_went(notes.get(name))]
    return [*said, *_more(folder), *_measured_with(environments)]


INTRODUCTION = (
    "Made by `make bench-all` from the JSON files beside the pictures; what each figure means and how it is measured: "
    "[README](../README.md). Times are multiples of plain steps measured right beside."
)


def _title(environments: list[dict[str, Any]], name: str) -> str:
    if not environments:
        return name
    env = environments[0]
    return f"{env['processor']}, {env['cores']} cores"


def _workload(folder: Path, model: str, result: Result, went: dict[str, Any] | None) -> list[str]:
    plot.save(result, folder / f"{model}.png")
    header = ["row", "step ms", "times plain", "saved MiB", "held MiB", "held %", "peak MiB", "loss", "gradient error"]
    rows = [[row.name, *cells(row)] for row in result.rows if not row.failed]
    notes = [f"- {row.name} failed: {cell(row.failed)}" for row in result.failed]
    notes += [f"- {out['name']} is left out: {cell(out['reason'])}" for out in result.left_out]
    if result.busy:
        notes.append(
            f"- The machine was busy: half of plain's steps took {result.busy[0]:.0f} to {result.busy[1]:.0f} ms."
        )
    title = MODELS[model].title
    return [
        f"## {model}: {title}", "", f"{result.subject}.", "", *_picture(folder, model, title), *table(header, rows),
        *([""] if notes else []), *notes, "", *_went(went),
    ]  # fmt: skip


def _picture(folder: Path, name: str, title: str) -> list[str]:
    return [f"![{title}]({folder.name}/{name}.png)", ""] if (folder / f"{name}.png").exists() else []


def _went(note: dict[str, Any] | None) -> list[str]:
    """Describe when and how a part ran."""
    if note is None:
        return []
    words = f"{note['time'][:10]}, {note['seconds'] / 60:.1f} minutes."
    return [f"**Not finished**: {cell(note['error'])}. {words}" if note["error"] else words, ""]


def _more(folder: Path) -> list[str]:
    found = []
    for name, title in MORE_FILES.items():
        links = [
            f"[{ending}]({folder.name}/{name}.{ending})"
            for ending in ("png", "json", "md")
            if (folder / f"{name}.{ending}").exists()
        ]
        if links:
            found.append(f"- {title}: {', '.join(links)}")
    return ["## More of this machine", "", *found, ""] if found else []


def _measured_with(environments: list[dict[str, Any]]) -> list[str]:
    """Return the versions, each with all values in use."""
    names = [name for env in environments[:1] for name in env if name not in HIDDEN_FIELDS]
    seen = {name: dict.fromkeys(str(env.get(name)) for env in environments if env.get(name)) for name in names}
    rows = [[name.replace("_", " "), ", ".join(values)] for name, values in seen.items() if values]
    return ["## Measured with", "", *table(["", "version"], rows), ""] if rows else []


REASONS = {
    "torch checkpoint": "it does the work of `recompute` with less bookkeeping, by some 30 us a call "
    "([the hot path](../../docs/hot-path.md)): ours also puts random states of Python and NumPy, weights and buffers "
    "back as they were. Cells that are called hundreds of times feel it",
    "checkpoint every k-th": "it is `recompute` of every other block, and so has the same to do",
    "selective checkpoint": "it chooses by operator inside of a block, where `recompute` takes the whole of a module",
    "checkpoint_sequential": "it is `recompute` of a few blocks at once, and so has the same to do",
    "save_on_cpu": "on a CPU it moves nothing and holds what plain training holds: nothing can be faster",
    "compile": "the compiler fuses operators, and holds what plain training holds",
    "compile, budget 0.5": "the compiler fuses normalizations and activations into their neighbors, and so computes "
    "them again for nothing",
    "torch_remat, attention kept": "it does the work of `blocks.*.attn : keep, blocks.* : recompute`, and puts back no "
    "random states unless it is told how",
    "DeepSpeed checkpoint": "it is the reentrant kind, one autograd node for a block, and puts back no random states "
    "but torch's",
}
HIDDEN_FIELDS = ("time", "processor", "cores", "memory_bytes", "gpu", "gpu_memory_bytes", "gpu_capability", "cuda")


def against(results: dict[str, Result]) -> list[str]:
    """Compare each peer of each workload with the fastest row of actstore that holds no more and is as exact."""
    found = [(model, result, one) for model, result in results.items() for one in versus(result.rows, result.duels)]
    judged = [(model, result, one) for model, result, one in found if one.ours]
    if not found:
        return []
    count = Counter(one.verdict for *_, one in judged)
    two = ["times plain", "held MiB"]
    header = ["workload and peer", *two, "ours", *two, "our time over its", "verdict"]
    rows = [[f"{model}: {one.peer}", *_duel(result, one)] for model, result, one in judged]
    others = [one.peer for *_, one in judged if one.verdict != "faster"]
    why = [f"- {peer}: {REASONS[peer]}." for peer in REASONS if peer in others]
    missing = [f"- {model}: {one.peer}: {cell(one.reason)}" for model, _, one in found if not one.ours]
    return [
        "## Against each peer", "",
        f"The fastest row of ours that holds no more than the peer (to {HELD_NOISE:.1%}, the allocator's blocks) "
        "and is as exact. Since 28 November 2026 plans whose budget is what the peer holds take part, and rows of "
        f"about the same time are tried in turns first. Of {len(judged)} duels ours is "
        f"faster in {count['faster']}, slower in {count['slower']}, and in {count['as fast']} the two cannot be told "
        f"apart: the interval, of 95 %, has 1 in it. {_how_compared([one for *_, one in judged])}", "",
        *table(header, rows), *([""] if missing else []), *missing, "",
        *(["Why a peer can be as fast, or faster:", "", *why, ""] if why else []),
    ]  # fmt: skip


def _how_compared(judged: list[Versus]) -> str:
    """Describe the source of "our time over its"."""
    pairs = [one.pairs for one in judged if one.pairs]
    turns = f"a peer and ours trained in turns for it, at least {min(pairs)} steps each" if pairs else ""
    apart = "it is the quotient of the times plain, between which the speed of the machine may have changed"
    if not pairs:
        return f"*Our time over its*: {apart}."
    rest = len(judged) - len(pairs)
    return f"*Our time over its*: {turns}{f'; but for {rest} of them {apart}' if rest else ''}."


def _duel(result: Result, one: Versus) -> list[str]:
    cells_of = [_time_and_bytes(result, name) for name in (one.peer, one.ours)]
    verdict = f"**{one.verdict}**" if one.verdict == "slower" else one.verdict
    return [*cells_of[0], one.ours, *cells_of[1], f"{one.times:.2f} ({one.low:.2f} .. {one.high:.2f})", verdict]


def _time_and_bytes(result: Result, name: str) -> list[str]:
    row = next(row for row in result.rows if row.name == name)
    return [cells(row)[1], cells(row)[3]]


def main() -> None:
    """Write the pages."""
    folders = [Path(name) for name in sys.argv[1:]] or sorted(
        path for path in machine.RESULTS.iterdir() if path.is_dir()
    )
    for folder in folders:
        print(write(folder))


if __name__ == "__main__":
    main()
