"""Runs the rows, each in a fresh process, in lockstep with a process that trains plain.

The speed of a machine drifts by more than the rows differ. So the plain process stays alive, and each timed step of a
row has a plain step right before or after it, in turn; the ratio is the median over these pairs. Only one of the two
processes computes at any moment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from actstore.bench.client import Client, RowFailed
from actstore.bench.environment import environment
from actstore.bench.result import Result, RowResult
from actstore.bench.rows import PLAIN, Row
from actstore.bench.workload import Workload

Progress = Callable[[str], None]
"""Called with the name of the row each time one of its timed steps is done."""


def _silent(name: str) -> None:
    pass


def _forget(result: Result) -> None:
    pass


class Metronome:
    """The plain process, which keeps time for the others. Once it has failed it is out of use.

    Attributes
    ----------
    failed : why it failed; empty while it works
    times_ms : of all steps that it made
    loss : after the last of them
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.failed = ""
        self.times_ms: list[float] = []
        self.loss = 0.0

    def step_ms(self) -> float | None:
        """The time of one more plain step; None when plain has failed."""
        if self.failed:
            return None
        try:
            elapsed_ms, self.loss = self._client.step()
        except RowFailed as error:
            self.failed = str(error)
            return None
        self.times_ms.append(elapsed_ms)
        return elapsed_ms


def run(
    work: Workload,
    rows: list[Row],
    disk_path: str | None = None,
    progress: Progress = _silent,
    row_done: Callable[[Result], None] = _forget,
) -> Result:
    """Measure `rows`, of which the first is plain. A row that fails is kept with the reason, and the others go on.

    `row_done` is given the result so far after each row.
    """
    result = Result(environment(), work.to_dict())
    present: list[Row] = []
    for row in rows:
        reason = row.missing()
        if reason:
            result.left_out.append({"name": row.name, "reason": reason})
        else:
            present.append(row)
    with Client(work, PLAIN, disk_path) as client:
        metronome = Metronome(client)
        plain = RowResult(PLAIN.name, PLAIN.kind)
        result.rows.append(plain)
        metronome.failed = _guarded(lambda: _run_plain(plain, client, metronome, work, progress))
        for row in present[1:]:
            found = RowResult(row.name, row.kind, row.policy)
            result.rows.append(found)
            with Client(work, row, disk_path) as worker:
                found.failed = _guarded(partial(_run_row, found, worker, metronome, work, progress))
            row_done(result)
        if metronome.times_ms:
            plain.set_times(metronome.times_ms, list(metronome.times_ms))
        plain.failed = metronome.failed or _guarded(lambda: plain.update(client.ask("check")))
    return result


def _guarded(measure: Callable[[], None]) -> str:
    """Run `measure`; the reason where the row failed, empty where it did not."""
    try:
        measure()
    except RowFailed as error:
        return str(error)
    return ""


def _run_plain(plain: RowResult, client: Client, metronome: Metronome, work: Workload, progress: Progress) -> None:
    client.start()
    for _ in range(work.steps):
        if metronome.step_ms() is None:
            raise RowFailed(metronome.failed)
        progress(plain.name)
    _set_loss(plain, metronome.loss)
    plain.update(client.ask("peaks"))


def _run_row(found: RowResult, client: Client, metronome: Metronome, work: Workload, progress: Progress) -> None:
    client.start()
    times: list[float] = []
    beats: list[float | None] = []
    for index in range(work.steps):
        if index % 2 == 0:
            beats.append(metronome.step_ms())
        elapsed_ms, loss = client.step()
        times.append(elapsed_ms)
        if index % 2:
            beats.append(metronome.step_ms())
        progress(found.name)
    found.set_times(times, beats)
    _set_loss(found, loss)
    found.update(client.ask("peaks"))
    found.update(client.ask("check"))


def _set_loss(found: RowResult, loss: float) -> None:
    found.loss, found.loss_hex = loss, loss.hex()


def steps_of(work: Workload, rows: list[Row]) -> int:
    """How many times `run` will call its progress, if no row fails."""
    return work.steps * sum(not row.missing() for row in rows)
