"""Largest batch with which a fresh process trains under a limit of memory that the system enforces.

    python -m benchmarks.largest --limit 1GiB                             # GPT; all rows
    python -m benchmarks.largest --limit 1210MiB --batch 48 --steps 50 --rows 'plain; int8'   # does it train?

The limit is that of a control group of its own where this process may make one, else RLIMIT_DATA: it counts everything
that the process has, Python and libraries included, and no account of ours has a say. A batch fits when the process
ends the steps; the next batch does not.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from actstore.base.units import format_nbytes, parse_nbytes
from actstore.bench.environment import environment
from actstore.bench.memory import peak_rss_bytes
from actstore.bench.peers import rows as rows_
from actstore.bench.peers.rows import Row
from actstore.bench.result import RowResult, subject
from actstore.bench.trainer import Trainer
from actstore.bench.workloads import sized
from actstore.bench.workloads.workload import Workload
from actstore.display import pictures as look
from actstore.policy import may_be_lossy, parse
from benchmarks.markdown import table

ROWS = (
    "plain", "torch checkpoint", "compile, budget 0.5", "bitsandbytes 8-bit", "derive", "int8", "int4", "int8 @ disk",
    "raw @ disk", "recompute", "recompute(int8)", "recompute(raw @ disk)",
)  # fmt: skip
USUAL = ("plain", "torch checkpoint", "bitsandbytes 8-bit", "int8", "int4", "recompute")  # in the suite
BISECT_AFTER_ATTEMPTS = 8  # attempts after which the search halves the interval
STEPS = 3
GROUPS = (  # of memory in control groups: the folder, and the file of the limit; versions 2 and 1
    (Path("/sys/fs/cgroup"), "memory.max"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
)


def measure(work: Workload, limit: int, most: int, chosen: list[Row], done: Callable[[dict[str, Any]], None]) -> None:
    """Find the largest batch of each row up to `most`; `done` receives the rows so far."""
    with control_group(limit) as group:
        found: dict[str, Any] = {
            "environment": environment(), "workload": work.to_dict(), "limit": limit, "steps": STEPS,
            "limited_by": "RLIMIT_DATA" if group is None else "a control group", "rows": [],
        }  # fmt: skip
        for row in (row for row in chosen if not row.missing(work)):
            batch, peaks = largest(lambda size, row=row: _peak(work, row, size, limit, group), limit, most)
            figures = {"name": row.name, "kind": row.kind, "most": most, "lossy": _is_lossy(row), "batch": batch}
            found["rows"].append(figures | {"peaks": {str(size): peaks[size] for size in sorted(peaks)}})
            done(found)


@contextmanager
def control_group(limit: int) -> Iterator[Path | None]:
    """Yield a new control group with this limit of memory; None where the system refuses it."""
    for folder, name in GROUPS:
        group = folder / f"actstore-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / name).exists():
                continue
            (group / name).write_text(str(limit))
            yield group
            return
        except PermissionError:
            continue
        finally:
            group.rmdir()
    yield None


def _peak(work: Workload, row: Row, batch: int, limit: int, group: Path | None, steps: int = STEPS) -> int | None:
    """Return the high-water mark of a process that trains `steps` steps under the limit; None where it fails."""
    request = {"workload": replace(work, batch=batch).to_dict(), "row": asdict(row), "steps": steps}
    command = [sys.executable, "-m", "benchmarks.largest", "--trial", json.dumps(request)]
    done = subprocess.run(  # under the limit from its first byte on
        command, capture_output=True, text=True, check=False, preexec_fn=partial(_limit, limit, group)
    )
    return int(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def _limit(limit: int, group: Path | None) -> None:
    """Limit the memory of this process."""
    if group is None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    else:
        (group / "cgroup.procs").write_text(str(os.getpid()))


def trial(request: dict[str, Any]) -> None:
    """Train for some steps, and print the high-water mark of the process."""
    trainer = Trainer(Workload.from_dict(request["workload"]), Row(**request["row"]), None)
    trainer.start()
    for _ in range(request["steps"]):
        trainer.step()
    print(peak_rss_bytes())


def largest(peak: Callable[[int], int | None], limit: int, most: int) -> tuple[int, dict[int, int | None]]:
    """Return the largest batch up to `most` for which `peak` is not None, 0 for none; and all attempts."""
    tried: dict[int, int | None] = {}
    low, high, guess = 0, most + 1, 1
    while low + 1 < high:
        guess = min(max(guess, low + 1), high - 1)
        tried[guess] = peak(guess)
        low, high = (guess, high) if tried[guess] is not None else (low, guess)
        guess = _on_the_line(tried, limit, high) if len(tried) < BISECT_AFTER_ATTEMPTS else (low + high) // 2
    return low, tried


def _on_the_line(tried: dict[int, int | None], limit: int, high: int) -> int:
    """Return the batch at the limit on a line through the two largest that fit; with one alone, a few times as many."""
    fits = sorted((batch, peak) for batch, peak in tried.items() if peak is not None)[-2:]
    if len(fits) < 2:
        return min(8 * fits[0][0], (fits[0][0] + high) // 2) if fits else high // 2
    (one, small), (two, large) = fits
    slope = (large - small) / (two - one)
    return int(two + (limit - large) / slope) if slope > 0 else 8 * two


def _is_lossy(row: Row) -> bool:
    return row.kind == "ours" and not row.share and may_be_lossy(parse(row.policy))


def draw(found: dict[str, Any]) -> Figure:
    """Draw a bar for each row, as long as its batch."""
    shown = found["rows"]
    figure = look.figure(1.7 + 0.34 * max(3, len(shown)))
    axes = figure.add_subplot()
    kinds = [_kind(row) for row in shown]
    axes.barh(range(len(shown)), [row["batch"] for row in shown], color=[look.KINDS[kind].color for kind in kinds])
    for at, row in enumerate(shown):
        words = _words(row, _plain(found))
        axes.annotate(words, (row["batch"], at), (4, 0), textcoords="offset points", va="center", fontsize=look.SMALL)
    axes.set_yticks(range(len(shown)), [row["name"] for row in shown], fontsize=look.NORMAL)
    axes.set_ylim(max(3, len(shown)) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * max([1, *(row["batch"] for row in shown)]))
    axes.set_xlabel("batch (longer is better)")
    title = f"The largest batch of a process that may have {format_nbytes(found['limit'])}"
    look.heading(axes, title, f"{subject(found['workload'])}, but for the batch; limited by {found['limited_by']}")
    look.clean(axes, "x")
    axes.tick_params(axis="y", length=0)
    for kind, drawn in look.KINDS.items():
        if kind in kinds:
            axes.barh([0], [0], color=drawn.color, label=drawn.label)
    if kinds:
        figure.legend(loc="outside lower center", ncols=len(look.KINDS), frameon=False, fontsize=look.NORMAL)
    return figure


def _kind(row: dict[str, Any]) -> str:
    return RowResult(row["name"], row["kind"], bit_equal=not row["lossy"]).look


def _plain(found: dict[str, Any]) -> int:
    return next((row["batch"] for row in found["rows"] if row["kind"] == "plain"), 0)


def _words(row: dict[str, Any], plain: int) -> str:
    if not row["batch"]:
        return "none"
    more = f", {row['batch'] / plain:.1f} times plain" if plain and row["kind"] != "plain" else ""
    return f"{'≥ ' if row['batch'] == row['most'] else ''}{row['batch']}{more}"


def lines(found: dict[str, Any]) -> list[str]:
    """Return the figures in Markdown."""
    cells = [[row["name"], _words(row, _plain(found))] for row in found["rows"]]
    return table([f"a process of {format_nbytes(found['limit'])}", "batch"], cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    parser.add_argument("--limit", default="1GiB", help="of the process, such as 1GiB")
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--most", type=int, default=1024, help="largest batch that is tried")
    parser.add_argument("--batch", type=int, help="try this batch alone")
    parser.add_argument("--steps", type=int, default=STEPS, help="of --batch")
    parser.add_argument("--rows", default="; ".join(ROWS), help="by name, between semicolons")
    options = parser.parse_args()
    if options.trial:
        trial(json.loads(options.trial))
        return 0
    work, limit = sized(options.model), parse_nbytes(options.limit, "limit")
    chosen = rows_.select(rows_.rows_for([]), [name.strip() for name in options.rows.split(";")])
    if options.batch:
        with control_group(limit) as group:
            for row in chosen:
                peak = _peak(work, row, options.batch, limit, group, options.steps)
                said = "does not train" if peak is None else f"trains {options.steps} steps, peak {format_nbytes(peak)}"
                print(f"{row.name:<24} {said}", flush=True)
        return 0
    measure(work, limit, options.most, chosen, lambda found: print("\n".join(lines(found)[-1:]), flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
