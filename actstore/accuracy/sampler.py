"""Sampler of the errors of lossy payloads: it measures a step from time to time, and reports large errors."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from time import perf_counter_ns

import torch
from torch import Tensor

from actstore.accuracy.figures import ROW_NUMEL, ErrorFigures, Total, measure, scratch_nbytes
from actstore.base.caller import stacklevel
from actstore.base.ledger import Account, Ledger
from actstore.base.ticket import Between, Ticket
from actstore.codecs.base import Bound
from actstore.devices import Device
from actstore.errors import AccuracyError
from actstore.trace import Trace
from actstore.transfer import Readback, Readbacks

ROW_NBYTES = 8 * ROW_NUMEL


@dataclass(frozen=True)
class SampledPayload:
    """A measured payload, whose figures are on their way to the host."""

    losses: Losses
    account: Account
    readbacks: Readbacks
    readback: Readback
    nbytes: int
    span: Ticket | None  # the time of the measurement, for the trace


class Losses:
    """Errors of one site in one step, so far."""

    def __init__(self, step: int, decision: str) -> None:
        self.step = step
        self.decision = decision
        self.payloads = self.measured = self.nbytes = 0
        self.total = Total()
        self.row: Tensor | None = None  # figures of the last payload, on its device

    def figures(self) -> ErrorFigures:
        return self.total.figures(self.step, self.decision, self.payloads, self.measured, self.nbytes)


class Sampler:
    """Sampler of the lossy payloads of every `every`-th step, from the first step that has one. Thread-safe.

    It decodes an encoded payload at once and compares it on the device. This has no effect: payloads, keys and
    gradients are those of any other step. It books its memory for the moment. Where that would pass the limit of
    `ledger`, or the device has no room, it does not measure the payload, and counts it as not measured.

    Parameters
    ----------
    every : number of steps from sample to sample; 0 to sample only the steps that `ask` requests
    warn : relative error of a site above which the sampler warns, once
    fail : relative error of a site above which it raises AccuracyError

    Notes
    -----
    The host does not wait in forward or backward. `start` judges the figures that have come to the host; `errors` and
    `close` wait for all of them; with `fail`, `start` waits, too.
    """

    def __init__(self, ledger: Ledger, every: int, warn: float | None = None, fail: float | None = None) -> None:
        self._ledger = ledger
        self._every = every
        self._warn = warn
        self._fail = fail
        self._step = 0  # the last sampled step
        self._running = 0  # the running step
        self._asked = False  # whether `ask` requests the next step
        self._losses: dict[Account, Losses] = {}  # of the last sampled step
        self._rows: deque[SampledPayload] = deque()
        self._unjudged: dict[Account, Losses] = {}
        self._warned = set[tuple[Account, str]]()
        self._readbacks: dict[Device, Readbacks] = {}
        self._trace: Trace | None = None
        self._lock = Lock()

    def start(self, step: int) -> bool:
        """Begin a step, and return whether to sample it.

        Raises
        ------
        AccuracyError : an earlier sampled step has a larger error than `fail`
        """
        self._running = step
        self._judge(wait=self._fail is not None)
        if not self._rows:
            self._let_go()
        asked, self._asked = self._asked, False
        return asked or (self._every > 0 and (not self._step or step >= self._step + self._every))

    @property
    def step(self) -> int:
        """The last sampled step; 0 before the first."""
        return self._step

    def resume(self, step: int) -> None:
        """Sample as after this sampled step."""
        self.read(wait=True)
        self._step, self._losses = step, {}

    def ask(self) -> None:
        """Request that the next step be sampled."""
        self._asked = True

    def relative(self, account: Account) -> Tensor | None:
        """Return the relative error of a site's last payload: a float64 scalar on its device; None where unmeasured.

        The host does not wait. 0 where the payload is 0.
        """
        losses = self._losses.get(account)
        row = None if losses is None else losses.row
        return None if row is None else (row[6] / row[4]).nan_to_num(0.0, 0.0).sqrt()

    def codec(self, bound: Bound, plain: Bound, account: Account, device: Device, trace: Trace | None) -> Bound:
        """Return the codec, wrapped to measure each payload that it encodes; `plain` decodes without a measurement."""

        before = account.held

        def encode(src: Tensor, out: Tensor, key: int) -> int | None:
            def decoded() -> Tensor:
                back = torch.empty_like(src)
                plain.decode(out, back, key)
                return back

            used = bound.encode(src, out, key)
            unbooked = max(0, out.nbytes - (account.held - before))  # bytes of the payload; a tier has booked its own
            self.take(src, decoded, account, device, trace, unbooked)
            return used

        return bound._replace(encode=encode)

    def take(
        self,
        src: Tensor,
        decoded: Callable[[], Tensor | None],
        account: Account,
        device: Device,
        trace: Trace | None,
        unbooked: int = 0,
    ) -> None:
        """Measure a payload of the running step, if there is room.

        Parameters
        ----------
        src : the encoded tensor
        decoded : returns what its payload decodes to; None where that is not known now
        unbooked : bytes of the payload that no one has booked
        """
        losses = self._met(account)
        nbytes = unbooked + src.nbytes + scratch_nbytes(src)
        if not self._ledger.fits(nbytes):
            return
        self._ledger.touch_peak(account, nbytes, "sampling")
        begin = device.mark(device.current()) if trace is not None else None
        try:
            back = decoded()
            if back is None:
                return
            row = measure(src, back)
        except torch.OutOfMemoryError:
            return
        span = None if begin is None else Between(begin, device.mark(device.current()))
        losses.row = row
        self._expect(losses, account, row, src.nbytes, device, span)
        self._trace = trace

    def errors(self) -> dict[Account, ErrorFigures]:
        """Return the errors of each site in the last sampled step. The host waits for figures on their way.

        Raises
        ------
        AccuracyError : an error is larger than `fail`
        """
        self._judge(wait=True)
        with self._lock:
            return {account: losses.figures() for account, losses in self._losses.items()}

    def read(self, *, wait: bool) -> None:
        """Add up the figures that have come to the host, or with `wait` all that are on their way."""
        while self._rows and (wait or self._rows[0].readback.ready()):
            with self._lock:
                if not self._rows:
                    return
                row = self._rows.popleft()
                row.readback.wait()
                figures = row.readbacks.take(row.readback, torch.float64)
                losses = row.losses
                losses.total.add(figures)
                losses.measured += 1
                losses.nbytes += row.nbytes
                self._unjudged[row.account] = losses
                self._tell(row, figures)

    def close(self) -> None:
        """Judge the remaining figures, and return the memory, also that of figures on the devices.

        Raises
        ------
        AccuracyError : an error that was not judged yet is larger than `fail`
        """
        try:
            self._judge(wait=True)
        finally:
            for readbacks in self._readbacks.values():
                readbacks.close([])
            self._readbacks.clear()
            for losses in self._losses.values():
                losses.row = None

    # -----------------------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Return the memory of figures where this does not make a thread wait, as unpinning may."""
        for device in [device for device in self._readbacks if device.on_host]:
            self._readbacks.pop(device).close([])

    def _met(self, account: Account) -> Losses:
        """Count a lossy payload of the running step."""
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
            readbacks = self._readbacks.get(device)
            if readbacks is None:
                readbacks = self._readbacks[device] = Readbacks(device, ROW_NBYTES)
            readback = readbacks.expect(row.view(torch.uint8))
            self._rows.append(SampledPayload(losses, account, readbacks, readback, nbytes, span))

    def _tell(self, row: SampledPayload, figures: list[float]) -> None:
        """Add the measurement of a payload to the trace."""
        if self._trace is None or row.span is None:
            return
        losses, total = row.losses, Total()
        total.add(figures)
        note = str(total.figures(losses.step, losses.decision, 1, 1, row.nbytes))
        now = perf_counter_ns()
        begin, end = row.span.span() or (now, now)
        self._trace.add("measure", begin, end, row.account.site, losses.step, "", row.nbytes, note)

    def _judge(self, *, wait: bool) -> None:
        """Judge the figures that have come: warn of large errors, or raise."""
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
        """Warn once for each site and reason."""
        if (account, why) not in self._warned:
            self._warned.add((account, why))
            message = f"{_words(account, found)}: {why}. {_advice(account)}"
            warnings.warn(message, RuntimeWarning, stacklevel=stacklevel())


def _words(account: Account, found: ErrorFigures) -> str:
    return f"step {found.step}: {account.site} ({found.decision}) has a relative error of {found}"


def _advice(account: Account) -> str:
    site = account.site
    place = f"{site.name or '*'}/{site.tag}" if site.tag else site.name or "*"
    return f'Put a rule with more bits first, such as "{place} : e5m6", or "{place} : keep".'
