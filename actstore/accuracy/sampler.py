"""Measures what lossy payloads lose, in a step from time to time, and tells when that is too much."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass
from threading import Lock
from time import perf_counter_ns

import torch
from torch import Tensor

from actstore.accuracy.figures import ROW, ErrorFigures, Total, measure, scratch_nbytes
from actstore.base.caller import stacklevel
from actstore.base.ledger import Account, Ledger
from actstore.base.ticket import Between, Ticket
from actstore.codecs.base import Bound
from actstore.devices import Device
from actstore.errors import AccuracyError
from actstore.trace import Trace
from actstore.transfer import Cell, Cells

ROW_NBYTES = 8 * ROW


@dataclass(frozen=True)
class SampledPayload:
    """A payload that was measured; its figures are on their way to the host."""

    losses: Losses
    account: Account
    cells: Cells
    cell: Cell
    nbytes: int
    span: Ticket | None  # how long it took, for the trace


class Losses:
    """What one site lost in one step, so far."""

    def __init__(self, step: int, decision: str) -> None:
        self.step = step
        self.decision = decision
        self.payloads = self.measured = self.nbytes = 0
        self.total = Total()
        self.row: Tensor | None = None  # of the last payload, on its device

    def figures(self) -> ErrorFigures:
        return self.total.figures(self.step, self.decision, self.payloads, self.measured, self.nbytes)


class Sampler:
    """Measures the lossy payloads of every `every`-th step, from the first step that has one. Thread-safe.

    A payload that was encoded is decoded at once and compared on the device. What is measured has no effect: payloads,
    keys and gradients are those of any other step. The memory that it takes is booked for the moment; where that would
    pass the limit of `ledger`, or the device has no room, the payload is not measured, and counted so.

    Parameters
    ----------
    every : 0 for only those steps that somebody asks for
    warn : the relative error of a site above which it is warned of, once
    fail : that above which AccuracyError is raised

    Notes
    -----
    Nobody waits in forward or backward. What was measured is judged by `start`, as far as it has come to the host, and
    by `errors` and `close`, which wait for it; with `fail`, `start` waits, too.
    """

    def __init__(self, ledger: Ledger, every: int, warn: float | None = None, fail: float | None = None) -> None:
        self._ledger = ledger
        self._every = every
        self._warn = warn
        self._fail = fail
        self._step = 0  # the last step that was sampled
        self._running = 0  # the step that runs
        self._asked = False  # whether somebody wants the next one sampled
        self._losses: dict[Account, Losses] = {}  # of the last step that was sampled
        self._rows: deque[SampledPayload] = deque()
        self._unjudged: dict[Account, Losses] = {}
        self._warned = set[tuple[Account, str]]()
        self._cells: dict[Device, Cells] = {}
        self._trace: Trace | None = None
        self._lock = Lock()

    def start(self, step: int) -> bool:
        """Begin a step. Returns whether it is to be sampled.

        Raises
        ------
        AccuracyError : a step that was sampled before has lost more than is allowed
        """
        self._running = step
        self._judge(wait=self._fail is not None)
        if not self._rows:
            self._let_go()
        asked, self._asked = self._asked, False
        return asked or (self._every > 0 and (not self._step or step >= self._step + self._every))

    def ask(self) -> None:
        """Have the next step sampled."""
        self._asked = True

    def relative(self, account: Account) -> Tensor | None:
        """The relative error of a site's last payload: a float64 scalar on its device; None where it was not measured.

        Nobody waits. 0 where the payload is 0.
        """
        losses = self._losses.get(account)
        row = None if losses is None else losses.row
        return None if row is None else (row[6] / row[4]).nan_to_num(0.0, 0.0).sqrt()

    def codec(self, bound: Bound, plain: Bound, account: Account, device: Device, trace: Trace | None) -> Bound:
        """The same codec, whose payload is measured when it is encoded; `plain` decodes unobserved."""

        before = account.held

        def encode(src: Tensor, out: Tensor, key: int) -> int | None:
            used = bound.encode(src, out, key)
            losses = self._met(account)
            unbooked = max(0, out.nbytes - (account.held - before))  # of the payload: a tier's has been booked
            nbytes = unbooked + src.nbytes + scratch_nbytes(src)
            if self._ledger.fits(nbytes):
                self._ledger.touch_peak(account, nbytes, "sampling")
                begin = device.mark(device.current()) if trace is not None else None
                try:
                    back = torch.empty_like(src)
                    plain.decode(out, back, key)
                    row = measure(src, back)
                except torch.OutOfMemoryError:
                    return used
                span = None if begin is None else Between(begin, device.mark(device.current()))
                losses.row = row
                self._expect(losses, account, row, src.nbytes, device, span)
                self._trace = trace
            return used

        return bound._replace(encode=encode)

    def errors(self) -> dict[Account, ErrorFigures]:
        """What each site lost in the last step that was sampled. The host waits for what is on its way.

        Raises
        ------
        AccuracyError : it is more than is allowed
        """
        self._judge(wait=True)
        with self._lock:
            return {account: losses.figures() for account, losses in self._losses.items()}

    def read(self, *, wait: bool) -> None:
        """Take in what has come to the host, or all that is on its way."""
        while self._rows and (wait or self._rows[0].cell.ready()):
            with self._lock:
                if not self._rows:
                    return
                row = self._rows.popleft()
                row.cell.wait()
                figures = row.cells.take(row.cell, torch.float64)
                losses = row.losses
                losses.total.add(figures)
                losses.measured += 1
                losses.nbytes += row.nbytes
                self._unjudged[row.account] = losses
                self._tell(row, figures)

    def close(self) -> None:
        """Return the memory.

        Raises
        ------
        AccuracyError : what was not judged yet is more than is allowed
        """
        try:
            self._judge(wait=True)
        finally:
            for cells in self._cells.values():
                cells.close([])
            self._cells.clear()

    # -----------------------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Return the memory of figures where that makes nobody wait, as unpinning may."""
        for device in [device for device in self._cells if device.on_host]:
            self._cells.pop(device).close([])

    def _met(self, account: Account) -> Losses:
        """Count a lossy payload of the step that runs."""
        with self._lock:
            if self._step != self._running:
                self._step, self._losses = self._running, {}
            losses = self._losses.get(account)
            if losses is None:
                losses = self._losses[account] = Losses(self._step, account.where)
            losses.payloads += 1
            return losses

    def _expect(
        self, losses: Losses, account: Account, row: Tensor, nbytes: int, device: Device, span: Ticket | None
    ) -> None:
        with self._lock:
            cells = self._cells.get(device)
            if cells is None:
                cells = self._cells[device] = Cells(device, ROW_NBYTES)
            cell = cells.expect(row.view(torch.uint8))
            self._rows.append(SampledPayload(losses, account, cells, cell, nbytes, span))

    def _tell(self, row: SampledPayload, figures: list[float]) -> None:
        """Have the trace tell of a payload."""
        if self._trace is None or row.span is None:
            return
        losses, total = row.losses, Total()
        total.add(figures)
        note = str(total.figures(losses.step, losses.decision, 1, 1, row.nbytes))
        now = perf_counter_ns()
        begin, end = row.span.span() or (now, now)
        self._trace.add("measure", begin, end, row.account.site, losses.step, "", row.nbytes, note)

    def _judge(self, *, wait: bool) -> None:
        """Give the verdict on what has come."""
        self.read(wait=wait)
        with self._lock:
            unjudged, self._unjudged = self._unjudged, {}
        failed: list[tuple[Account, ErrorFigures]] = []
        for account, losses in unjudged.items():
            found = losses.figures()
            if self._fail is not None and found.relative > self._fail:
                failed.append((account, found))
            elif self._warn is not None and found.relative > self._warn:
                self._give_warning(account, found, f"that is more than SampleErrors(warn={self._warn:g})")
            if found.lost:
                self._give_warning(account, found, "what is lost came back as NaN, Inf or clipped, or was one of them")
            if found.shrunk:
                self._give_warning(account, found, "its gain is farther from 1 than rounding explains")
        if failed:
            account, found = max(failed, key=lambda pair: pair[1].relative)
            raise AccuracyError(
                f"{_words(account, found)}: that is more than SampleErrors(fail={self._fail:g}). {_advice(account)}",
                site=account.site,
                decision=found.decision,
                figures=found,
                limit=self._fail,
            )

    def _give_warning(self, account: Account, found: ErrorFigures, why: str) -> None:
        """Warn, once for each site and reason."""
        if (account, why) not in self._warned:
            self._warned.add((account, why))
            message = f"{_words(account, found)}: {why}. {_advice(account)}"
            warnings.warn(message, RuntimeWarning, stacklevel=stacklevel())


def _words(account: Account, found: ErrorFigures) -> str:
    return f"step {found.step}: {account.site} ({found.decision}) has a relative error of {found}"


def _advice(account: Account) -> str:
    site = account.site
    place = f"{site.name or '*'}/{site.tag}" if site.tag else site.name or "*"
    return f'Put a rule with more bits before the others, such as "{place} : e5m6", or "{place} : keep"'
