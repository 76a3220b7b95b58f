"""Simulated device: its passes in order, and its bytes at every event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from actstore.plan.hardware import Hardware
from actstore.plan.solver.chain import Limits
from benchmarks.simulator.copies import Copies, Node
from benchmarks.simulator.lanes import Clock, Lane
from benchmarks.simulator.passes import ROUNDING_TOLERANCE, Pass


class Device:
    """Device that runs its passes in order; after each event it begins whatever can begin.

    Attributes
    ----------
    previous, next : neighbors in the pipeline
    cursor : the pass that runs, or the next one
    over, ended : whether all passes have run, and when
    peak, peak_at : peak memory of the device, and the pass at that moment
    stalls : ms of waiting by reason; `waits` is the current reason
    """

    def __init__(
        self,
        clock: Clock,
        node: Node,
        passes: Sequence[Pass],
        hardware: Hardware,
        limits: Limits,
        chunks: int,
        window: float,
        drain: bool,
    ) -> None:
        self.node, self.passes = node, passes
        self.previous: Device | None = None
        self.next: Device | None = None
        self.compute = Lane(clock)
        self._clock = clock
        self._limit = limits.device * (1 + ROUNDING_TOLERANCE)
        self._window, self._drain = window * (1 + ROUNDING_TOLERANCE), drain
        self.copies = Copies(
            clock,
            node,
            hardware,
            passes,
            self._limit,
            limits.host * (1 + ROUNDING_TOLERANCE),
            chunks,
            self._window,
            self.advance,
        )
        self.compute.slowed_by((self.copies.out, self.copies.back), hardware.beside_copies)
        self.cursor, self.over, self.ended = 0, False, 0.0
        self._base = 0.0  # bytes on the device, without those in transit
        self.peak, self.peak_at = 0.0, 0
        self.stalls: defaultdict[str, float] = defaultdict(float)
        self.waits, self._waits_since = "", 0.0
        self._through: set[tuple[bool, int]] = set()  # (backward, microbatch) that this stage has run

    def begin(self, after: float) -> None:
        """Start the step `after` ms from now."""
        self._clock.start(self.compute, after, self._begun)

    def _begun(self) -> None:
        self.compute.busy_ms = 0.0  # waiting does not count as compute
        self.advance()

    def advance(self) -> None:
        """Begin what can begin now."""
        if self.over:
            return
        if not self.compute.busy:
            self._run()
        step = self.passes[self.cursor]
        backward = step.microbatch if step.backward and (self.copies.settled or not self._drain) else None
        early = self._base if self.compute.busy else self._need(step)
        self.copies.begin(self.cursor, backward, self._base, early)
        self._note()

    def _run(self) -> None:
        if self.waits:
            self.stalls[self.waits] += self._clock.now - self._waits_since
        step = self.passes[self.cursor]
        self.waits, self._waits_since = self._obstacle(step), self._clock.now
        if not self.waits:
            if step.backward:
                self.copies.ahead -= step.payload
            self._base = step.others + step.peak
            self._clock.start(self.compute, step.ms, self._ran)

    def _obstacle(self, step: Pass) -> str:
        """Return what the next pass waits for; empty for nothing."""
        copies = self.copies
        source = self.next if step.backward else self.previous
        if step.first and source is not None and (step.backward, step.microbatch) not in source._through:
            return "pipeline"
        if self._drain and step.backward and not copies.settled:
            return "drain"
        if copies.backlog > self._window and len(copies.outgoing) > 1:
            return "window"
        if copies.missing[self.cursor]:
            return "fetch"
        return "memory" if self._need(step) + copies.backlog + copies.ahead > self._limit else ""

    def _need(self, step: Pass) -> float:
        """Return the bytes that the next pass takes beyond those in transit; its payload is one of these."""
        return step.others + step.peak - (step.payload if step.backward else 0.0)

    def _ran(self) -> None:
        step = self.passes[self.cursor]
        self._base = step.after
        if step.backward:
            self.copies.used(step)
        else:
            self.copies.leave(step)
        self._note()
        self.cursor += 1
        if self.cursor == len(self.passes):
            self.over, self.ended = True, self._clock.now
        self.advance()
        if step.last:
            self._through.add((step.backward, step.microbatch))
            neighbor = self.previous if step.backward else self.next
            if neighbor is not None:
                neighbor.advance()

    def _note(self) -> None:
        used = self._base + self.copies.backlog + self.copies.ahead
        if used > self.peak:
            self.peak, self.peak_at = used, self.cursor
