"""What a run of the benchmark found, and its JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from actstore.bench.workloads import MODELS

SPREAD_PAIRS = 4  # fewer have no quartiles
BUSY_SAMPLES = 8  # fewer say nothing about the machine
BUSY_SPREAD = 0.3  # between the quartiles, over the median


@dataclass
class RowResult:
    """The figures of one row. None where a figure could not be had; `failed` then says why.

    Attributes
    ----------
    name, kind, policy : of the row; kind is plain, peer or ours
    step_ms : median over the timed steps, forward to optimizer
    ratio : median over pairs of neighbouring steps of this row's time to plain's
    saved_bytes : that plain autograd would hold at the end of forward, each storage once, parameters excluded
    held_bytes : held on the compute device at the end of forward
    peak_held_bytes, stored_bytes : high-water of held_bytes over the step, and size of the payloads; rows of ours only
    peak_bytes : high-water over the timed steps of the process's resident memory, or of the GPU's allocator
    allocated_peak_bytes : high-water over the timed steps of what the allocator has given to tensors
    baseline_bytes : the measure of `peak_bytes` before the first step
    host_peak_bytes : high-water of the process's resident memory, whatever the device
    peak_since_reset : whether the high-water of the process leaves out what came before the timed steps
    loss, loss_hex : of the last step; the hex form is exact
    losses : of every step, warm-up too
    grad_error : ||g - g_plain|| / ||g_plain|| over all parameters on the same batch, in float64; 0.0 only where equal
    bit_equal : whether all gradients are equal bit for bit
    state_error : the same measure over the model's buffers after that step, such as running statistics
    step_samples_ms, plain_samples_ms : the pairs behind step_ms and ratio
    repeat_ratios : the ratio of each repeat by itself
    failed : why the row is not complete; empty where it is
    """

    name: str
    kind: str
    policy: str = ""
    step_ms: float | None = None
    ratio: float | None = None
    saved_bytes: int | None = None
    held_bytes: int | None = None
    peak_held_bytes: int | None = None
    stored_bytes: int | None = None
    peak_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    baseline_bytes: int | None = None
    host_peak_bytes: int | None = None
    peak_since_reset: bool | None = None
    loss: float | None = None
    loss_hex: str | None = None
    losses: list[float] = field(default_factory=list)
    grad_error: float | None = None
    bit_equal: bool | None = None
    state_error: float | None = None
    step_samples_ms: list[float] = field(default_factory=list)
    plain_samples_ms: list[float | None] = field(default_factory=list)
    repeat_ratios: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def held_fraction(self) -> float | None:
        """`held_bytes` over `saved_bytes`."""
        return self.held_bytes / self.saved_bytes if self.held_bytes is not None and self.saved_bytes else None

    @property
    def pairs(self) -> list[float]:
        """Times of the steps as multiples of the plain steps beside them."""
        return _pairs(self.step_samples_ms, self.plain_samples_ms)

    @property
    def spread(self) -> float | None:
        """Half of the distance between the quartiles of the pairs behind `ratio`; None where they are too few."""
        if len(self.pairs) < SPREAD_PAIRS:
            return None
        low, _, high = quantiles(self.pairs, n=4)
        return (high - low) / 2

    @property
    def look(self) -> str:
        """What it is in pictures: plain, peer, lossless or lossy."""
        return self.kind if self.kind != "ours" else "lossless" if self.bit_equal else "lossy"

    def set_times(self, mine_ms: list[float], plain_ms: list[float | None]) -> None:
        """Take the samples: steps of this row, and beside each the plain step next to it, None where plain failed."""
        self.step_samples_ms, self.plain_samples_ms = mine_ms, plain_ms
        self.step_ms = median(mine_ms)
        self.ratio = _ratio(mine_ms, plain_ms)

    def add_times(self, mine_ms: list[float], plain_ms: list[float | None]) -> None:
        """Take the samples of one more repeat."""
        ratio = _ratio(mine_ms, plain_ms)
        self.repeat_ratios += [] if ratio is None else [ratio]
        self.set_times(self.step_samples_ms + mine_ms, self.plain_samples_ms + plain_ms)

    def set_losses(self, losses: list[float]) -> None:
        """Take the losses of every step, of which there is one at least."""
        self.losses, self.loss, self.loss_hex = losses, losses[-1], losses[-1].hex()

    def update(self, figures: dict[str, Any]) -> None:
        """Set the fields that `figures` names."""
        for name, value in figures.items():
            setattr(self, name, value)


@dataclass(frozen=True)
class Duel:
    """A peer and a row of ours, by name, and the times of their steps, which they trained in turns."""

    peer: str
    ours: str
    peer_ms: list[float]
    ours_ms: list[float]

    @property
    def pairs(self) -> list[float]:
        """Times of our steps as multiples of the peer's beside them."""
        return _pairs(self.ours_ms, self.peer_ms)


@dataclass
class Result:
    """All rows with what they were measured on.

    Attributes
    ----------
    environment : versions, processor, memory, GPU
    workload : the fields of Workload
    rows : in the order of the table
    left_out : name and reason of the rows that were not run
    duels : of peers with the rows of ours that they compare with
    """

    environment: dict[str, Any]
    workload: dict[str, Any]
    rows: list[RowResult] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    duels: list[Duel] = field(default_factory=list)

    @property
    def busy(self) -> tuple[float, float] | None:
        """Quartiles of plain's step times in milliseconds where they lie so far apart that something else was running.

        Ratios of neighbouring steps bear with that, medians of step times do not.
        """
        samples = self.rows[0].step_samples_ms if self.rows else []
        if len(samples) < BUSY_SAMPLES:
            return None
        low, middle, high = quantiles(samples, n=4)
        return (low, high) if high - low > BUSY_SPREAD * middle else None

    @property
    def failed(self) -> list[RowResult]:
        return [row for row in self.rows if row.failed]

    @property
    def subject(self) -> str:
        """What was trained, in words."""
        return subject(self.workload)

    @property
    def place(self) -> str:
        """Where, in words: the GPU, or the processor and how many threads."""
        work, env = self.workload, self.environment
        if work["device"].startswith("cuda"):
            return str(env["gpu"])
        return f"{env['processor']}, {work['threads'] or env['cores']} threads"

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold: a figure that is not finite becomes None (`loss_hex` still tells)."""
        found: dict[str, Any] = finite(asdict(self))
        return found

    def to_json(self) -> str:
        """Strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """Take what `to_dict` gave; fields that this version does not know are left out."""
        known = {f.name for f in fields(RowResult)}
        rows = [RowResult(**{k: v for k, v in row.items() if k in known}) for row in values["rows"]]
        duels = [Duel(**duel) for duel in values.get("duels", ())]
        return cls(values["environment"], values["workload"], rows, values["left_out"], duels)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Read what `to_json` wrote."""
        return cls.from_dict(json.loads(text))

    def write(self, path: Path) -> None:
        path.write_text(self.to_json(), encoding="utf-8")


def _ratio(mine_ms: list[float], plain_ms: list[float | None]) -> float | None:
    pairs = _pairs(mine_ms, plain_ms)
    return median(pairs) if pairs else None


def _pairs(mine_ms: Sequence[float], plain_ms: Sequence[float | None]) -> list[float]:
    return [mine / plain for mine, plain in zip(mine_ms, plain_ms, strict=True) if plain is not None]


def subject(work: dict[str, Any]) -> str:
    """A workload in words: "gpt: 6 layers, width 256, heads 4, context 256, batch 8, float32"."""
    model = work.get("model", "gpt")  # results were once of this one alone
    sizes = ("layers", "width", "heads", "context", "batch", "dropout")
    uses = MODELS[model].uses if model in MODELS else sizes if ":" not in model else ()
    words = [f"{name} {work[name]:g}" for name in sizes[1:] if name in uses and work[name]]
    layers = [f"{work['layers']} layer{'s'[: work['layers'] > 1]}"] if "layers" in uses else []
    return f"{model}: {', '.join([*layers, *words, work['dtype']])}"


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
