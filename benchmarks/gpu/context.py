"""Largest context that fits: ``python -m benchmarks.gpu.context --json FILE --plot FILE``.

The blocks of `benchmarks.gpu.llama` with one sequence, under a limit of device memory, by default that of a card of
12 GiB: with more, host memory would be full first, and attention over that many tokens takes minutes. Two sizes
are measured; a line through their peaks predicts the size that fits, which is then tried: running out of memory is
rare. The size that is called the largest did run. ``--limit 24 --lora`` has all 32 layers, frozen but for adapters, the
vocabulary of Llama 3, and rows whose bytes in host memory stay few; none is longer than MAX_TOKENS.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from actstore import ActivationStore
from actstore.base.units import format_nbytes
from benchmarks.gpu import place as gpu_place
from benchmarks.gpu.chain import pinned_segments
from benchmarks.gpu.llama_model import Job, Sizes, deterministic
from benchmarks.gpu.llama_rows import KEEP, PLAIN, ROWS, TILED_ROWS, Enter, Row, entered
from benchmarks.gpu.place import Place, Sheet

GIB = 2**30
LIMIT_GIB, DRY_LIMIT_GIB = 12.0, 1 / 128
MAX_ATTEMPTS = 5  # after the first two
LENGTH_TOLERANCE = 0.03  # a context is the largest when one longer by this fraction does not fit
STEPS_PER_ATTEMPT = 2  # of each attempt: the second reuses the memory of the first
MAX_TOKENS = 65536  # of a row with adapters: a step takes 20 s on an H100
NAMES = (PLAIN.name, "recompute", "raw @ host", "recompute(raw @ host)", "int8 @ host")
LORA_NAMES = (
    PLAIN.name,
    "torch checkpoint",
    "recompute(raw @ host)",
    "Transformers offload",
    "TRL offload, checkpoint",
    "derive(int8)",
    *(row.name for row in TILED_ROWS),
)

Found = dict[str, Any]


@dataclass(frozen=True)
class Attempt:
    """Attempt with one length of context; `peak_bytes` and `step_ms` are None where it did not fit."""

    tokens: int
    peak_bytes: int | None = None
    step_ms: float | None = None

    @property
    def fits(self) -> bool:
        return self.peak_bytes is not None


def largest(
    attempt: Callable[[int], Attempt], first: int, limit: int, granule: int, most: int | None = None
) -> list[Attempt]:
    """Find the most tokens, `most` at most, whose peak is at most `limit` bytes; return all attempts in order.

    Parameters
    ----------
    first : tokens of the first attempt; the second has twice as many
    granule : tokens are multiples of it
    """
    made = [attempt(first)]
    if not made[0].fits:
        return made
    made.append(attempt(2 * first))
    for _ in range(MAX_ATTEMPTS):
        good = sorted((one for one in made if one.fits), key=lambda one: one.tokens)
        low, high = good[-1].tokens, min((one.tokens for one in made if not one.fits), default=None)
        tokens = (low + high) // 2 if high else low
        if len(good) > 1:
            tokens = _guess(good[-2], good[-1], limit)
            if high and tokens >= high:  # the line predicted too much
                tokens = (low + high) // 2
        tokens = min(tokens, most or tokens)
        tokens -= tokens % granule
        if tokens <= low * (1 + LENGTH_TOLERANCE):
            break
        made.append(attempt(tokens))
    return made


def _guess(a: Attempt, b: Attempt, limit: int) -> int:
    """Return the tokens at which a line through two peaks meets the limit, slightly below."""
    assert a.peak_bytes is not None
    assert b.peak_bytes is not None
    slope = max(1.0, (b.peak_bytes - a.peak_bytes) / (b.tokens - a.tokens))
    return int(b.tokens + (0.98 * limit - b.peak_bytes) / slope)


class Search:
    """Attempts with one job. On a GPU the allocator enforces the limit; elsewhere the store's own count is
    compared with it.
    """

    def __init__(self, job: Job, limit: int) -> None:
        self._job, self._limit = job, limit
        if job.place.on_gpu:
            torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)

    def run(self, row: Row, first: int, granule: int, most: int | None = None) -> tuple[list[Attempt], int]:
        """Run all attempts of a row with one store: its pinned memory stays pinned. Return these bytes, too."""
        counted = row if self._job.place.on_gpu or row != PLAIN else KEEP
        with entered(counted, self._job) as (enter, store):
            made = largest(lambda tokens: self._attempt(enter, store, tokens), first, self._limit, granule, most)
            return made, sum(map(sum, pinned_segments(store))) if store is not None else 0

    def _attempt(self, enter: Enter, store: ActivationStore | None, tokens: int) -> Attempt:
        """Train some steps and report whether they fit."""
        place, job = self._job.place, self._job
        job.resize(tokens)
        place.reset_peak()
        try:
            step_ms = [place.elapsed_ms(lambda: job.step(enter())) for _ in range(STEPS_PER_ATTEMPT)][-1]
            peak = place.peak() if store is None or place.on_gpu else store.report().peak_held_bytes
            found = Attempt(tokens, peak, step_ms) if peak <= self._limit else Attempt(tokens)
        except torch.OutOfMemoryError:
            found = Attempt(tokens)
        job.model.zero_grad(set_to_none=True)
        gc.collect()  # frees what the error's traceback held
        place.empty_cache()
        return found


def run_all(place: Place, limit: int, path: Path, *, lora: bool = False) -> Found:
    """Search with each row that has no figures of this commit, and save after each."""
    sizes = Sizes.at(place, tokens=place.sized(2048 if lora else 4096, 64), lora=lora)
    names = LORA_NAMES if lora else NAMES
    names = place.sized(names, (*names[:3:2], TILED_ROWS[0].name) if lora else names[:2])
    most = place.sized(MAX_TOKENS, 512) if lora else None
    by_name = {row.name: row for row in (PLAIN, *ROWS, *TILED_ROWS) if row.name in names}
    sheet = Sheet(path, by_name)
    sheet.found |= {"limit_bytes": limit, "most_tokens": most, "sizes": asdict(sizes), "dry_run": not place.on_gpu}
    search = Search(Job(place, sizes), limit)
    for row in map(by_name.__getitem__, sheet.left()):
        figures: Found = {"name": row.name}
        if missing := row.missing(place.on_gpu):
            sheet.put(figures | {"left_out": missing})
            continue
        try:
            made, pinned = search.run(row, sizes.tokens, place.sized(512, 16), most)
            best = max((one for one in made if one.fits), key=lambda one: one.tokens, default=Attempt(0))
            figures |= {**asdict(best), "attempts": [asdict(one) for one in made], "pinned_bytes": pinned}
            print(f"{row.name}: {best.tokens} tokens after {len(made)} attempts", flush=True)
        except Exception as error:  # the remaining rows run
            figures["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
        sheet.put(figures)
    return sheet.found


def picture(found: Found, path: Path) -> None:
    """Draw the largest contexts as bars into a file."""
    from actstore.display import pictures as look

    rows = [row for row in found["rows"] if row.get("tokens")][::-1]
    figure = look.figure(1.4 + 0.5 * len(rows))
    axes = figure.add_subplot()
    bars = axes.barh([row["name"] for row in rows], [row["tokens"] for row in rows], color=look.BLUE, zorder=2)
    axes.bar_label(bars, [f"{row['tokens']:,} ({row['step_ms'] / 1e3:.2f} s)" for row in rows], padding=4)
    note = f"{found['sizes']['layers']} layers, width {found['sizes']['width']}, bfloat16; in brackets a step"
    look.heading(
        axes,
        f"Largest context under {format_nbytes(found['limit_bytes'])}",
        note + ("; a dry run on a CPU" if found["dry_run"] else ""),
    )
    axes.set_xlabel("tokens")
    axes.margins(x=0.25)
    look.clean(axes, "x")
    figure.savefig(path)


def main() -> int:
    parser = gpu_place.parser_of(__doc__)
    parser.add_argument("--plot", type=Path, help="draw the largest contexts into this file")
    parser.add_argument("--limit", type=float, help=f"GiB of device memory, {LIMIT_GIB:.0f} by default")
    parser.add_argument("--lora", action="store_true", help="32 layers, frozen but for adapters")
    options = parser.parse_args()
    place = gpu_place.place_of(options)
    deterministic()
    limit = int(place.sized(options.limit or LIMIT_GIB, DRY_LIMIT_GIB) * GIB)
    found = run_all(place, limit, options.json, lora=options.lora)
    if options.plot is not None:
        picture(found, options.plot)
    return gpu_place.reported(gpu_place.wrong(found["rows"], "plain"))


if __name__ == "__main__":
    sys.exit(main())
