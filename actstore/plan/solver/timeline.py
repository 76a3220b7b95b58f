"""The timeline of a step under one choice of options: its time, and the bytes held at every event, in one exact pass.

Compute runs F1..FN, then BN..B1. Bytes that leave the device queue on the lane from it and flow while compute runs. A
layer's forward starts when the held bytes, the queued bytes and the layer's own need fit; the wait for this is a stall.
Backward is the same in reversed time: bytes that came back early are the queued ones. At the turn both queues are
empty, and the time for that is the drain: one direction after the other, or both at once where each keeps less than
half of its rate beside the other, as the store does not make one direction wait for the other.

Bytes for the disk cross the link before other bytes, and wait in host memory while it has room; without room they wait
on the device. With L bytes queued on the device, C bytes not yet on the disk, room R in host memory, link rate B and
disk rate D <= B, the queues after t ms are

    C' = max(0, C - D t)        L' = max(0, L - B t, C' - R)

No order of transfers has less of either queue at any time, and a stall is best taken as late as possible. So the pass
gives the least time of this choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from actstore.base.units import format_nbytes
from actstore.errors import ConfigError
from actstore.plan.solver.chain import LayerChain, Limits
from actstore.plan.solver.tables import BACKWARD, DIRECTIONS, FORWARD, UNLIMITED_RATE, Tables, slack


@dataclass(frozen=True, slots=True)
class Breach:
    """A limit that a choice breaks.

    Attributes
    ----------
    limit : "device", "host", "disk" or "error"
    needed, allowed : bytes, or error
    direction, layer : the event of the peak; empty for a limit on a whole step
    """

    limit: str
    needed: float
    allowed: float
    direction: str = ""
    layer: str = ""

    def __str__(self) -> str:
        if self.limit == "error":
            return f"error {self.needed:.4g} where {self.allowed:.4g} is allowed"
        where = f" in {self.direction} of {self.layer}" if self.layer else ""
        place = "on the disk" if self.limit == "disk" else f"of {self.limit} memory"
        return f"{format_nbytes(self.needed)} {place}{where}, where {format_nbytes(self.allowed)} are allowed"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Times and bytes of a step under a choice, in ms and bytes. Pairs are (forward, backward), lists go by layer.

    Attributes
    ----------
    choice : index of the option of each layer
    total : time of the step; where `broken` is not empty, as if every exceeded limit had room
    plain : time of a step that keeps everything
    added : compute that the options add in all
    stalls : compute waits right before a layer's forward, and right after its backward
    drain : the wait at the turn, for bytes to leave and for bytes to come back
    device, host : bytes in use at each event
    host_peak : bytes needed in host memory: all that wait there at once, and the most in transfer to or from the disk
    disk, error : totals of the step
    broken : every exceeded limit
    """

    choice: tuple[int, ...]
    total: float
    plain: float
    added: float
    stalls: tuple[tuple[float, ...], tuple[float, ...]]
    drain: tuple[float, float]
    device: tuple[tuple[float, ...], tuple[float, ...]]
    host: tuple[tuple[float, ...], tuple[float, ...]]
    host_peak: float
    disk: float
    error: float
    broken: tuple[Breach, ...] = ()

    @property
    def feasible(self) -> bool:
        """True where every limit holds."""
        return not self.broken

    @property
    def overhead(self) -> float:
        """Milliseconds beyond those of a step that keeps everything."""
        return self.total - self.plain

    @property
    def device_peak(self) -> float:
        """Peak of the bytes on the device over all events."""
        return max((max(events, default=0.0) for events in self.device), default=0.0)

    def peak_event(self) -> tuple[int, int]:
        """Return direction and layer index of the event with the peak; of equals the later in the step.

        Raises
        ------
        ConfigError : the chain has no layers
        """
        if not self.choice:
            raise ConfigError("a chain without layers has no events. Give it at least one layer.")
        _, direction, _, layer = max(
            (nbytes, direction, -layer if direction else layer, layer)
            for direction, events in enumerate(self.device)
            for layer, nbytes in enumerate(events)
        )
        return direction, layer


def evaluate(chain: LayerChain, choice: Sequence[int], limits: Limits) -> Evaluation:
    """Evaluate the step under `choice`; O(layers). The module's docstring describes the model.

    Parameters
    ----------
    choice : index of an option for each layer

    Raises
    ------
    ConfigError : as `Tables`; or `choice` does not fit the chain
    """
    return evaluated(Tables(chain, limits), choice)


def evaluated(tables: Tables, choice: Sequence[int]) -> Evaluation:
    """Evaluate as `evaluate`, from existing tables."""
    layers, limits = tables.chain.layers, tables.limits
    if len(choice) != len(layers) or any(not 0 <= o < n for o, n in zip(choice, tables.counts, strict=True)):
        raise ConfigError(f"{len(layers)} layers need the index of one of their options each, not {list(choice)}.")
    chosen = tables.chain.chosen(choice)
    waiting = sum(option.host for option in chosen)
    disk = sum(option.disk for option in chosen)
    error = sum(option.error for option in chosen)
    halves = [_half(tables, choice, direction, max(0.0, limits.host - waiting)) for direction in (FORWARD, BACKWARD)]
    broken = [half.breach for half in halves if half.breach is not None]
    broken = [max(broken, key=lambda breach: breach.needed)] if broken else []
    for name, needed in (("host", waiting), ("disk", disk), ("error", error)):
        allowed = getattr(limits, name)
        if needed > allowed + slack(allowed):
            broken.append(Breach(name, needed, allowed))
    added = sum(option.forward + option.backward for option in chosen)
    forward, backward = halves
    crossing = tables.crossing * min(forward.drain, backward.drain) / 2
    drain = forward.drain + crossing, backward.drain + crossing
    waits = sum(forward.stalls) + sum(backward.stalls) + sum(drain)
    return Evaluation(
        tuple(choice),
        tables.plain + added + waits,
        tables.plain,
        added,
        (tuple(forward.stalls), tuple(backward.stalls)),
        drain,
        (tuple(forward.device), tuple(backward.device)),
        (tuple(forward.host), tuple(backward.host)),
        waiting + max(forward.staged, backward.staged),
        disk,
        error,
        tuple(broken),
    )


@dataclass(slots=True)
class _Direction:
    """Forward, or backward in reversed time."""

    stalls: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    staged: float = 0.0
    drain: float = 0.0
    breach: Breach | None = None


def _half(tables: Tables, choice: Sequence[int], direction: int, room: float) -> _Direction:
    near_rate, far_rate = tables.near_rate[direction], tables.far_rate[direction]
    limit = tables.limits.device
    half = _Direction()
    held = waiting = 0.0
    queued = undelivered = bound = 0.0  # L and C of the module's docstring, and the part of L that goes to the disk
    for i, (layer, o) in enumerate(zip(tables.chain.layers, choice, strict=True)):
        option = layer.options[o]
        need = held + float(tables.peak[direction][i, o])
        free = limit - need
        if free < -slack(limit) and (half.breach is None or need > half.breach.needed):
            half.breach = Breach("device", need, limit, DIRECTIONS[direction], layer.name)
        free = max(0.0, free)
        stall = 0.0
        if free < inf:
            stall = max(0.0, (queued - free) / near_rate, (undelivered - room - free) / far_rate)
        time = tables.compute[direction][i] + float(tables.extra[direction][i, o])
        for at, elapsed in enumerate((stall, time)):
            crossed = inf if near_rate >= UNLIMITED_RATE else near_rate * elapsed
            undelivered = max(0.0, undelivered - (inf if far_rate >= UNLIMITED_RATE else far_rate * elapsed))
            queued = max(0.0, queued - crossed, undelivered - room)
            bound = max(0.0, bound - crossed, undelivered - room)
            half.staged = max(half.staged, undelivered - bound)
            if at == 0:
                half.stalls.append(stall)
                half.device.append(need + queued)
                half.host.append(waiting + undelivered - bound)
        queued += float(tables.near[i, o])
        undelivered += float(tables.far[i, o])
        bound += float(tables.far[i, o])
        held += option.held
        waiting += option.host
    half.drain = max(queued / near_rate, undelivered / far_rate)
    return half
