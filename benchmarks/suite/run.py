"""Long run: ``make bench-all``, or ``python -m benchmarks.suite.run``; two hours on two cores.

Every workload with every row, and each peer in turns with the row of ours that compares with it; then how it scales,
the largest batch within a budget, where time goes, and loss curves. Figures go into ``results/<machine>/``, a file for
each part that is written again after each row, and pictures beside them. The page ``results/<machine>.md`` is written
after each part, so that an interrupted run leaves its results. ``--part`` runs single parts,
``--quick`` all of them at sizes that take seconds, as a check that they work, into ``build/results``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from actstore.bench import runner
from actstore.bench.comparison import differences, plans, versus
from actstore.bench.environment import environment
from actstore.bench.peers import rows
from actstore.bench.peers.rows import Row
from actstore.bench.result import Result
from actstore.bench.workloads import MODELS, sized
from actstore.bench.workloads.workload import Workload
from actstore.errors import ConfigError
from benchmarks import largest, machine
from benchmarks.suite import breakdown, convergence, long, page, scaling

MIB = 2**20
QUICK_SIZES = {"steps": 2, "warmup": 1, "threads": 1}
FULL_SIZES = {"steps": 12}  # pairs of a row and plain: six leave the median of a busy machine's ratios uncertain by 5 %
# Sizes at which a step takes milliseconds, by model; those of gpt are large enough to be encoded.
TINY: dict[str, dict[str, int]] = {
    "gpt": {"layers": 2, "width": 64, "heads": 2, "context": 64, "batch": 16},
    "llama": {"layers": 2, "width": 32, "heads": 4, "context": 32, "batch": 2},
    "vit": {"layers": 2, "width": 32, "heads": 2, "context": 16, "batch": 2},
    "resnet": {"layers": 1, "width": 8, "context": 16, "batch": 2},
    "lstm": {"width": 32, "context": 16, "batch": 2},
    "lora": {"layers": 2, "width": 32, "heads": 4, "context": 32, "batch": 2},
    "unet": {"layers": 2, "width": 8, "context": 16, "batch": 2},
}

Write = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Part:
    """One file of figures.

    Attributes
    ----------
    run : measures, and passes the figures so far to its argument
    minutes : duration on two cores
    duels : runs the duels of its result, each peer against the row of actstore that it is compared with
    """

    name: str
    run: Callable[[Write], None]
    minutes: float
    duels: Callable[[Result, Write], None] | None = None


def parts(quick: bool, names: list[str]) -> list[Part]:
    """Return all parts, the most important ones first, with the rows that `names` lists, or all."""
    sizes = TINY if quick else {}
    steps = QUICK_SIZES if quick else FULL_SIZES
    works = {model: sized(model, **sizes.get(model, {}), **steps) for model in MODELS}
    small = works["gpt"] if quick else sized("gpt", layers=4, width=128, batch=4)
    grown = {"layers": [1, 2], "batch": [4, 8]} if quick else SCALED_SIZES
    limit, most = (640 * MIB, 4) if quick else (768 * MIB, 1024)
    curves = [replace(works["gpt"], steps=12)] if quick else CURVES
    at = {"layers": 1, "width": 32, "context": 64} if quick else {"layers": 4, "width": 256, "context": 8192}
    longs = [sized(model, **at, heads=4, batch=1) for model in long.MODELS]

    def some(of_part: tuple[str, ...]) -> list[Row]:
        return [
            row for row in rows.ROWS if row == rows.PLAIN or (row.name in of_part and row.name in (names or of_part))
        ]

    return [
        *(Part(model, partial(_rows, work, names), 13, partial(_duels, work, names)) for model, work in works.items()),
        Part("breakdown", partial(breakdown.measure, works["gpt"], 1 if quick else 7), 1),
        Part("scaling", partial(scaling.measure, small, grown, some(scaling.ROWS)), 7),
        Part("largest", partial(largest.measure, small, limit, most, some(largest.USUAL)), 5),
        Part("long", partial(long.measure, longs, 512 if quick else 65536, 1 if quick else 2), 10),
        Part("convergence", partial(convergence.measure, curves, some(convergence.ROWS)), 5),
    ]


COMPILED = ("gpt", "resnet")
SCALED_SIZES = {"layers": [2, 4, 8, 16], "context": [128, 256, 512, 1024], "batch": [2, 4, 8, 16]}
CURVES = [
    sized("gpt", layers=4, width=128, context=64, steps=240, warmup=0),
    sized("resnet", layers=1, width=16, context=16, batch=32, steps=240, warmup=0),
]


def _rows(work: Workload, names: list[str], write: Write) -> None:
    """Measure every row of one workload; rows that compile, which takes long, of some workloads only."""
    chosen = rows.select(rows.rows_for(MODELS[work.model].policies), names or [rows.ALL])
    slow = [] if work.model in COMPILED else [row for row in chosen if row.limit_s == rows.COMPILE_LIMIT_S]

    def keep(result: Result) -> None:
        reason = f"compiling takes minutes; it is measured with {' and '.join(COMPILED)}"
        late = [{"name": row.name, "reason": reason} for row in slow]
        write(replace(result, left_out=[*result.left_out, *late]).to_dict())

    found = runner.run(work, [row for row in chosen if row not in slow], row_done=keep)
    keep(found)
    if not names:
        more = runner.run(work, [rows.PLAIN, *plans(found.rows)])
        keep(replace(found, rows=[*found.rows, *more.rows[1:]], left_out=[*found.left_out, *more.left_out]))


def _duels(work: Workload, names: list[str], result: Result, write: Write) -> None:
    """Run the duels of a result, or the missing ones and those of rows that are measured again."""
    by_name = {row.name: row for row in [*rows.rows_for(MODELS[work.model].policies), *plans(result.rows)]}
    for one in versus(result.rows, result.duels):
        if one.ours and not (names and one.pairs and {one.peer, one.ours}.isdisjoint(names)):
            kept = [duel for duel in result.duels if duel.peer != one.peer]
            ours = runner.fastest(work, [by_name[name] for name in one.near])
            result.duels = [*kept, runner.duel(work, by_name[one.peer], ours)]
            write(result.to_dict())


def merged(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Merge a result with rows that were measured again, or for the first time, later than the rest.

    Raises
    ------
    ConfigError : the machine, torch or the workload differs
    """
    old, new = Result.from_dict(before), Result.from_dict(after)
    if unlike := differences(old, new):
        raise ConfigError(f"rows cannot be merged: {'; '.join(unlike)}. Measure all of them, without --rows.")
    again = {row.name: row for row in new.rows if row.kind != "plain"}
    rows = [again.pop(row.name, row) for row in old.rows]
    return replace(old, environment=new.environment, rows=[*rows, *again.values()]).to_dict()


def run_part(part: Part, folder: Path, *, some: bool = False, duels_only: bool = False) -> str:
    """Run one part, or some rows of it, or its duels; note the outcome, and return the error's text or an empty one."""
    notes = folder / "parts.json"
    path = folder / f"{part.name}.json"
    before = machine.read(path) if some and part.name in MODELS else None
    begin = monotonic()
    said = "interrupted"
    try:
        if not duels_only:
            part.run(lambda found: machine.write(path, found if before is None else merged(before, found)))
        if part.duels is not None:
            if not path.exists():
                raise ConfigError(f"{part.name} has no rows in {folder} yet. Measure them without --duels.")
            part.duels(Result.from_dict(machine.read(path)), partial(machine.write, path))
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        went = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": round(monotonic() - begin)}
        if before is None and not duels_only:
            machine.write(notes, (machine.read(notes) or {}) | {part.name: went | {"error": said}})
        page.write(folder)
    return said


def main() -> int:
    """Run the parts. Exit code 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--rows", default="", help="only these rows, by name, between semicolons; of workloads, beside what is there"
    )
    parser.add_argument(
        "--duels", action="store_true", help="only the duels of the rows that are there, or of those that --rows names"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, into build/results: does it work?")
    parser.add_argument("--output", type=Path, help="folder of the results instead of benchmarks/results")
    given = parser.parse_args()
    names = [name.strip() for name in given.rows.split(";") if name.strip()]
    every = {part.name: part for part in parts(given.quick, names)}
    if given.duels:
        every = {part.name: part for part in every.values() if part.duels is not None}
    unknown = [name for name in given.part or [] if name not in every]
    if unknown:
        parser.error(f"no part is called {unknown[0]!r}; there are {', '.join(every)}")
    root = given.output or (Path("build/results") if given.quick else machine.RESULTS)
    folder = root / machine.name_of(environment())
    folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in given.part or every:
        print(f"{name}: about {every[name].minutes:g} minutes" if not given.quick else name, flush=True)
        said = run_part(every[name], folder, some=bool(names), duels_only=given.duels)
        if said:
            print(f"{name} failed: {said}", file=sys.stderr)
            failed = True
    print(f"page: {folder}.md")
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; the page has what was measured", file=sys.stderr)
        sys.exit(130)
