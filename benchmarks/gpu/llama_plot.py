"""Pictures of the Llama blocks: memory against time of every row, and the timeline of a planned step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actstore.bench.plot import Label, place
from actstore.display import pictures as look
from actstore.trace import Trace
from actstore.trace import picture as timeline
from benchmarks.gpu.llama_model import Job
from benchmarks.gpu.llama_rows import Row, entered

MIB, GIB = 2**20, 2**30
STEPS = 3  # the last is drawn


def memory(row: dict[str, Any]) -> int | None:
    """Return bytes at the peak of a step; without a GPU those held at the end of forward, where they were counted."""
    found: int | None = row.get("peak_bytes", row.get("held_bytes"))
    return found


def scatter(found: dict[str, Any], path: Path) -> None:
    """Draw memory against time into a file."""
    rows: list[dict[str, Any]] = [
        row for row in (found["plain"], *found["rows"]) if "step_ms" in row and memory(row) is not None
    ]
    unit = MIB if found["dry_run"] else GIB
    figure = look.figure(5.6)
    axes = figure.add_subplot()
    for kind, drawn in look.KINDS.items():
        mine = [row for row in rows if _kind(row) == kind]
        x, y = [row["step_ms"] for row in mine], [(memory(row) or 0) / unit for row in mine]
        if mine:
            axes.scatter(x, y, s=64, color=drawn.color, marker=drawn.marker, label=drawn.label, zorder=3)
    look.heading(
        axes,
        f"{found.get('title', 'Llama blocks')}: memory against time",
        said(found) + ("; a dry run on a CPU" if found["dry_run"] else ""),
    )
    axes.set_xlabel("milliseconds of a step (further left is faster)")
    what = "held at the end of forward" if found["dry_run"] else "peak of the allocator, weights and gradients included"
    axes.set_ylabel(f"{'MiB' if unit == MIB else 'GiB'}, {what}")
    axes.margins(0.2)
    axes.set_ylim(bottom=0)
    look.clean(axes)
    if rows:
        figure.legend(loc="outside lower center", ncols=len(look.KINDS), frameon=False)
    figure.draw_without_rendering()
    place(axes, [Label(r["name"], r["step_ms"], (memory(r) or 0) / unit, look.KINDS[_kind(r)].color) for r in rows])
    figure.savefig(path)


def said(found: dict[str, Any]) -> str:
    """Return the sizes of a model."""
    if "said" in found:
        return str(found["said"])
    sizes = found["sizes"]
    lora = ", frozen but for adapters" if sizes.get("lora") else ""
    return f"{sizes['layers']} layers, width {sizes['width']}, {sizes['tokens']} tokens, bfloat16{lora}"


def _kind(row: dict[str, Any]) -> str:
    if row["kind"] == "ours":
        return "lossless" if row["equal"] else "lossy"
    return str(row["kind"])


def step(job: Job, path: Path) -> None:
    """Draw the timeline of one step into a file, and write its trace beside it for Perfetto."""
    policy = job.place.sized("raw @ host", "raw @ disk")  # on a CPU nothing moves to the host
    with entered(Row(policy, "ours", policy), job, observe=[Trace()]) as (enter, store):
        assert store is not None
        for _ in range(STEPS):
            job.step(enter())
            job.place.synchronize()
        whole = store.trace
        trace = Trace(device=whole.device)
        for event in whole.events(whole.last_step()):
            trace.add(*event)
    trace.to_chrome(path.with_suffix(".chrome.json"))
    timeline.save(trace, path)
