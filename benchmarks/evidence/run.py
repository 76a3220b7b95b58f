"""Learning under lossy stores: ``python -m benchmarks.evidence.run``; by estimate two hours on 2 cores.

Small models (`benchmarks.evidence.tasks.TASKS`) are trained through each store (`ROWS`) from the same seeds, which give
the weights, the order of batches and the random bits of the store. So each row is compared with plain training seed by
seed. Cells, one for each task, row and seed, run in processes with one thread each; what is done is written to
``results/<machine>/evidence.json`` as it ends and not run again, unless the sizes of its task, the arguments of its row
or what stores do to them (`Task.stores`, `CHANGED`) have changed. The page ``evidence.md`` and the picture beside that
file are made at the end; ``--seeds 0`` makes only these, ``--tasks 'cnn; moe'`` and ``--rows 'plain; int8'`` run some.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from functools import partial
from math import isfinite
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from actstore.bench.environment import environment
from benchmarks import machine
from benchmarks.evidence import page as evidence_page
from benchmarks.evidence.tasks import CHANGED, ROWS, TASKS, Task, train
from benchmarks.suite.convergence import smooth

FINAL_SHARE = 0.1  # share of the steps, at the end, whose mean loss is the final loss
SHARED_FIELDS = ("processor", "python", "torch", "text_sha256")  # equal for all cells of a file


class Cell(NamedTuple):
    """One training run."""

    task: str
    row: str
    seed: int


def name_of(cell: Mapping[str, Any]) -> Cell:
    """Return the name of a result."""
    return Cell(cell["task"], cell["row"], cell["seed"])


def run_cell(cell: Cell, task: Task, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Train one cell.

    Returns
    -------
    dict : the cell's names; first and final loss (the mean of the last tenth of the steps, None where a loss was not
        finite), curve, and what `train` gives beside the losses. Where it raised, the names and `failed`
    """
    try:
        found = train(task, kwargs, cell.seed)
    except Exception as error:  # the remaining cells run; the page and the exit code report the failure
        return {**cell._asdict(), "failed": f"{type(error).__name__}: {error}"}
    losses = found.pop("losses")
    whole = len(losses) == task.work.steps and isfinite(losses[-1])
    last = losses[-max(1, int(FINAL_SHARE * task.work.steps)) :]
    return {
        **cell._asdict(),
        "first": losses[0],
        "final": fmean(last) if whole else None,
        **{name: value if value is None or isfinite(value) else None for name, value in found.items()},
        "curve": [float(f"{loss:.5g}") for loss in smooth(losses)[1]] if whole else [],
    }


def opened(path: Path, tasks: Mapping[str, Task], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Read the results so far, without failed cells and those whose task or row has changed.

    Raises
    ------
    SystemExit : the results come from another machine, torch or text
    """
    now = environment()
    found = machine.read(path) or {"environment": now, "cells": []}
    unlike = {name for name in SHARED_FIELDS if found["environment"][name] != now[name]}
    if unlike:
        raise SystemExit(f"{path} was measured with another {', '.join(sorted(unlike))}. Give another --folder.")
    sizes = {name: task.sizes() for name, task in tasks.items()}
    valid = [
        cell
        for cell in found["cells"]
        if "failed" not in cell
        and found["tasks"].get(cell["task"]) == sizes.get(cell["task"], {})
        and found["rows"].get(cell["row"]) == rows.get(cell["row"], {})
    ]
    return found | {"tasks": sizes, "rows": dict(rows), "cells": valid}


def run(
    path: Path,
    seeds: Sequence[int],
    workers: int = 2,
    tasks: Mapping[str, Task] = TASKS,
    rows: Mapping[str, Mapping[str, Any]] = ROWS,
    done: Callable[[dict[str, Any]], object] = lambda cell: None,
    some: Callable[[Cell], bool] = lambda cell: True,
) -> dict[str, Any]:
    """Run the cells that `path` lacks, seed by seed, and write it after each.

    Parameters
    ----------
    some : which of them to run

    Returns
    -------
    dict : environment, tasks, rows, cells (what `run_cell` gives, and the date in UTC)
    """
    found = opened(path, tasks, rows)
    ready = {name_of(cell) for cell in found["cells"] if cell["date"] >= CHANGED.get(cell["row"], "")}
    cells = [Cell(task, row, seed) for seed in seeds for task in tasks for row in rows]
    for new in _trained([cell for cell in cells if cell not in ready and some(cell)], workers, tasks, rows):
        new["date"] = datetime.now(UTC).date().isoformat()
        found["cells"] = [*(cell for cell in found["cells"] if name_of(cell) != name_of(new)), new]
        machine.write(path, found)
        done(new)
    return found


def _trained(
    cells: Sequence[Cell], workers: int, tasks: Mapping[str, Task], rows: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the results as they end; without workers the cells run in this process."""
    jobs = [partial(run_cell, cell, tasks[cell.task], rows[cell.row]) for cell in cells]
    if not workers:
        yield from (job() for job in jobs)
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(job) for job in jobs]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def main() -> int:
    """Run the missing cells, and write the page. Exit code 1 where a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds: 0, 1, ...")
    parser.add_argument("--tasks", type=_names(TASKS), default=set(TASKS), help="only these; names with ; between them")
    parser.add_argument("--rows", type=_names(ROWS), default=set(ROWS), help="only these")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--folder", type=Path, help="of the results instead of benchmarks/results/<machine>")
    given = parser.parse_args()
    folder = given.folder or machine.RESULTS / machine.name_of(environment())
    folder.mkdir(parents=True, exist_ok=True)
    some = lambda cell: cell.task in given.tasks and cell.row in given.rows  # noqa: E731
    found = run(folder / "evidence.json", range(given.seeds), given.workers, done=_say, some=some)
    print(evidence_page.write(folder))
    return int(any("failed" in cell for cell in found["cells"]))


def _names(known: Mapping[str, object]) -> Callable[[str], set[str]]:
    """Return a reader of names separated by ";"."""

    def read(given: str) -> set[str]:
        names = {name.strip() for name in given.split(";")}
        if unknown := names - known.keys():
            raise argparse.ArgumentTypeError(f"{sorted(unknown)}: no such names. Take some of {'; '.join(known)}.")
        return names

    return read


def _say(cell: dict[str, Any]) -> None:
    final, held_out = ("-" if cell.get(name) is None else f"{cell[name]:.4f}" for name in ("final", "held_out"))
    said = cell.get("failed", f"final {final}, held out {held_out}")
    print(f"{cell['task']}, {cell['row']}, seed {cell['seed']}: {said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
