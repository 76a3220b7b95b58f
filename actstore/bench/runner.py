"""Runner of the rows, each in a fresh process, in lockstep with a process that trains plainly.

The speed of a machine drifts by more than the rows differ. So the plain process stays alive, and each timed step of a
row has a plain step right before or after it, in turn; the ratio is the median over these pairs. Only one of the two
processes computes at any moment.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic
from types import TracebackType
from typing import Any, Self

from actstore.bench.environment import environment
from actstore.bench.peers.rows import PLAIN, Row
from actstore.bench.result import Duel, Result, RowResult
from actstore.bench.workloads.user import is_users
from actstore.bench.workloads.workload import Workload

HEAT_STEPS = 5  # of each row, to find the fastest one
_ROOT = Path(__file__).resolve().parents[2]  # the worker must import the same actstore


class RowFailed(Exception):
    """A row's process that crashed, went silent or answered with an error; the message is the reason."""


class RowLeftOut(RowFailed):
    """A row that does not apply to this model; the message is the reason."""


class Client:
    """A fresh process that trains one row. Use it as a context manager: leaving it ends the process.

    Parameters
    ----------
    limit_s : seconds that an answer may take; the row's own limit unless given
    """

    def __init__(self, work: Workload, row: Row, disk_path: str | None, limit_s: float | None = None) -> None:
        self._start = {"workload": work.to_dict(), "row": row.to_dict(), "disk_path": disk_path}
        self._limit_s = row.limit_s if limit_s is None else limit_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS adds in a fixed order only with this
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "actstore.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environ,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def start(self) -> list[float]:
        """Build the model, run the warm-up steps, and return their losses."""
        losses: list[float] = self.ask("start", **self._start)["losses"]
        return losses

    def step(self) -> tuple[float, float]:
        """Train one step, and return its milliseconds and its loss."""
        answer = self.ask("step")
        return answer["ms"], answer["loss"]

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises
        ------
        RowFailed : the process crashed, went silent or answered with an error
        """
        assert self._process.stdin is not None
        request = json.dumps({"do": do, **values}) + "\n"
        try:
            self._process.stdin.write(request.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RowFailed(self._epitaph()) from None
        line = self._read_line(do)
        answer: dict[str, Any] = json.loads(line)
        if "left_out" in answer:
            raise RowLeftOut(answer["left_out"])
        if "error" in answer:
            raise RowFailed(answer["error"])
        return answer

    def close(self) -> None:
        """End the process: close its input, and kill it if it does not exit in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _read_line(self, do: str) -> bytes:
        assert self._process.stdout is not None
        line, end = b"", monotonic() + self._limit_s
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - monotonic()))
            if not ready:
                self._process.kill()
                raise RowFailed(f"no answer to {do!r} for {self._limit_s:.0f} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise RowFailed(self._epitaph())
            line += piece
        return line

    def _epitaph(self) -> str:
        """Describe the end of the process: its signal or exit status, and the last line that it wrote."""
        status = self._process.wait()
        self._log.seek(0)
        words = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        last = words[-1] if words else "it wrote nothing"
        if status >= 0:
            return f"the process ended with status {status}: {last}"
        name = signal.Signals(-status).name
        hint = " (often the system out of memory)" if name == "SIGKILL" else ""
        return f"the process was ended by {name}{hint}: {last}"


Progress = Callable[[str], None]
"""Called with the name of the row each time one of its timed steps is done."""


def _silent(name: str) -> None:
    pass


def _forget(result: Result) -> None:
    pass


class Metronome:
    """The plain process, whose steps are the unit of time. After a failure it is not used again.

    Attributes
    ----------
    failed : the reason of its failure; empty while it works
    times_ms : of all its steps
    losses : of all steps, warm-up too
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.failed = ""
        self.times_ms: list[float] = []
        self.losses: list[float] = []

    def step_ms(self) -> float | None:
        """Train one more plain step and return its time; None when plain has failed."""
        if self.failed:
            return None
        try:
            elapsed_ms, loss = self._client.step()
        except RowFailed as error:
            self.failed = str(error)
            return None
        self.times_ms.append(elapsed_ms)
        self.losses.append(loss)
        return elapsed_ms


def run(
    work: Workload,
    rows: list[Row],
    disk_path: str | None = None,
    progress: Progress = _silent,
    row_done: Callable[[Result], None] = _forget,
    repeats: int = 1,
) -> Result:
    """Measure `rows`, the first one plain. A row that fails is kept with the reason; the remaining rows run.

    `row_done` receives the result so far after each row. All rows run `repeats` times, each time in new processes and,
    after the first, in a new order; memory and gradients are checked once.
    """
    result = Result(environment(), work.to_dict())
    present: list[Row] = []
    for row in rows:
        reason = row.missing(work)
        if reason:
            result.left_out.append({"name": row.name, "reason": reason})
        else:
            present.append(row)
    with Client(work, PLAIN, disk_path) as client:
        metronome = Metronome(client)
        plain = RowResult(PLAIN.name, PLAIN.kind)
        result.rows.append(plain)
        metronome.failed = _guarded(lambda: _run_plain(plain, client, metronome, work, progress))
        if metronome.failed and is_users(work.model):  # then every row would fail
            plain.failed = metronome.failed
            return result
        running = {row: RowResult(row.name, row.kind, row.policy) for row in present[1:]}
        for repeat in range(repeats):
            for row in Random(repeat).sample(list(running), len(running)) if repeat else list(running):
                found = running[row]
                if repeat == 0:
                    result.rows.append(found)
                with Client(work, row, disk_path) as worker:
                    try:
                        found.failed = _guarded(partial(_run_row, found, worker, metronome, work, progress))
                    except RowLeftOut as reason:
                        result.rows.remove(found)
                        result.left_out.append({"name": row.name, "reason": str(reason)})
                        del running[row]
                if found.failed:
                    found.failed = f"in repeat {repeat + 1}: {found.failed}" if repeat else found.failed
                    del running[row]
                row_done(result)
        if metronome.times_ms:
            plain.set_times(metronome.times_ms, list(metronome.times_ms))
        plain.failed = metronome.failed or _guarded(lambda: plain.update(client.ask("check")))
    return result


def _guarded(measure: Callable[[], None]) -> str:
    """Run `measure`; return the reason if the row failed, else an empty text."""
    try:
        measure()
    except RowLeftOut:
        raise
    except RowFailed as error:
        return str(error)
    return ""


def _run_plain(plain: RowResult, client: Client, metronome: Metronome, work: Workload, progress: Progress) -> None:
    metronome.losses += client.start()
    for _ in range(work.steps):
        if metronome.step_ms() is None:
            raise RowFailed(metronome.failed)
        progress(plain.name)
    plain.set_losses(list(metronome.losses))
    plain.update(client.ask("peaks"))


def _run_row(found: RowResult, client: Client, metronome: Metronome, work: Workload, progress: Progress) -> None:
    losses = client.start()
    times: list[float] = []
    beats: list[float | None] = []
    for index in range(work.steps):
        if index % 2 == 0:
            beats.append(metronome.step_ms())
        elapsed_ms, loss = client.step()
        times.append(elapsed_ms)
        losses.append(loss)
        if index % 2:
            beats.append(metronome.step_ms())
        progress(found.name)
    first = not found.losses
    found.add_times(times, beats)
    if first:
        found.set_losses(losses)
        found.update(client.ask("peaks"))
        found.update(client.ask("check"))


def duel(work: Workload, peer: Row, ours: Row) -> Duel:
    """Train two rows in turns, `work.steps` of each; the one that begins alternates from pair to pair.

    Raises
    ------
    RowFailed : one of them failed
    """
    return Duel(peer.name, ours.name, *_turns(work, [peer, ours], work.steps))


def fastest(work: Workload, rows: list[Row]) -> Row:
    """Return the row with the smallest median time of `HEAT_STEPS` steps, which all of them train in turns.

    Raises
    ------
    RowFailed : one of them failed
    """
    if len(rows) == 1:
        return rows[0]
    times = [median(each) for each in _turns(work, rows, HEAT_STEPS)]
    return rows[times.index(min(times))]


def _turns(work: Workload, rows: list[Row], steps: int) -> list[list[float]]:
    """Return the milliseconds of each step of each row; their order is reversed from turn to turn."""
    times_ms: list[list[float]] = [[] for _ in rows]
    with ExitStack() as processes:
        clients = [processes.enter_context(Client(work, row, None)) for row in rows]
        for client in clients:
            client.start()
        sides = list(zip(clients, times_ms, strict=True))
        for index in range(steps):
            for client, found in sides if index % 2 else reversed(sides):
                found.append(client.step()[0])
    return times_ms


def steps_of(work: Workload, rows: list[Row], repeats: int = 1) -> int:
    """Return how often `run` calls its progress, if no row fails."""
    return work.steps * (1 + repeats * sum(not row.missing(work) for row in rows[1:]))
