"""Progress of a run: on a terminal the table as it grows, steps and the time left; elsewhere a line for each row."""

from __future__ import annotations

from time import monotonic

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from actstore.bench.peers.rows import Row
from actstore.bench.result import Result
from actstore.bench.runner import run, steps_of
from actstore.bench.table import cells, rows_table
from actstore.bench.workloads.workload import Workload


def run_shown(work: Workload, rows: list[Row], disk_path: str | None, repeats: int, console: Console) -> Result:
    """Run `rows` as `runner.run` does, and show on `console` how far they are."""
    count = 1 + repeats * sum(not row.missing(work) for row in rows[1:])
    left = TimeLeft(count)
    if not console.is_terminal:
        said = 1  # plain has no line

        def say(result: Result) -> None:
            nonlocal said
            left.row_done()
            for row in result.rows[said:]:  # none where a row was left out, or in a later repeat
                _, ratio, _, held, _, _, _, error = cells(row)
                what = row.failed or f"{ratio} times plain, {held} MiB held, gradient error {error}"
                console.print(f"{left.done}/{count} {row.name}: {what}; {left}", highlight=False, soft_wrap=True)
            said = len(result.rows)

        return run(work, rows, disk_path, row_done=say, repeats=repeats)
    bar = Progress(
        TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
        TextColumn("{task.fields[left]}"),
    )  # fmt: skip
    task = bar.add_task("plain", total=steps_of(work, rows, repeats), left="")
    with Live(bar, console=console, transient=True, vertical_overflow="visible") as live:

        def step(name: str) -> None:
            bar.update(task, advance=1, description=name, left=str(left))

        def grow(result: Result) -> None:
            left.row_done()
            bar.update(task, left=str(left))
            live.update(Group(rows_table(result), bar))

        return run(work, rows, disk_path, step, grow, repeats)


class TimeLeft:
    """Estimate of the time left: each row to come takes the mean of those that are done, plain among them.

    Parameters
    ----------
    count : number of rows, each repeat of one counted
    """

    def __init__(self, count: int) -> None:
        self._count, self.done = count, 1  # plain is done before the first `row_done`
        self._begin = self._last = monotonic()

    def row_done(self) -> None:
        """Count one more row."""
        self.done += 1
        self._last = monotonic()

    @property
    def seconds(self) -> float:
        """Seconds left; 0 where the last row takes longer than the mean."""
        mean = (self._last - self._begin) / self.done
        return max(0.0, mean * (self._count - self.done) - (monotonic() - self._last))

    def __str__(self) -> str:
        if self.done == 1:
            return ""
        minutes, seconds = divmod(round(self.seconds), 60)
        return f"{minutes}:{seconds:02} left"
