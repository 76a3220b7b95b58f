"""Client of one worker process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from actstore.bench.peers.rows import Row
from actstore.bench.workloads.workload import Workload

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
