"""Result of a run of the benchmark, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from actstore.bench.workloads import MODELS
from actstore.display.text import finite

SPREAD_PAIRS = 4  # quartiles need at least as many
BUSY_SAMPLES = 8  # fewer samples give no verdict on the machine
BUSY_SPREAD = 0.3  # interquartile range over the median, above which the machine was busy


@dataclass
class RowResult:
    """Figures of one row. None where a figure is missing; `failed` then has the reason.

    Attributes
    ----------
    name, kind, policy : as in Row; kind is plain, peer or ours
    step_ms : median over the timed steps, forward to optimizer
    ratio : median over pairs of neighboring steps of this row's time to plain's
    saved_bytes : bytes that plain autograd holds at the end of forward, each storage once, without parameters
    held_bytes : held on the compute device at the end of forward
    peak_held_bytes, stored_bytes : peak of held_bytes over the step, and bytes of the payloads; kind ours only
    peak_bytes : high-water mark over the timed steps of the process's resident memory, or of the GPU's allocator
    libraries_bytes : part of `peak_bytes` that imports and kernels have added in `Trainer.start`; None on a GPU
    allocated_peak_bytes : high-water mark over the timed steps of allocated tensor memory
    baseline_bytes : the measure of `peak_bytes` before the first step
    host_peak_bytes : high-water mark of the process's resident memory, on any device
    peak_since_reset : whether the high-water mark of the process excludes what came before the timed steps
    loss, loss_hex : of the last step; the hex form is exact
    losses : of every step, warm-up too
    grad_error : ||g - g_plain|| / ||g_plain|| over all parameters on the same batch, in float64; 0.0 only where equal
    bit_equal : whether all gradients are equal bit for bit
    state_error : the same measure over the model's buffers after that step, such as running statistics
    step_samples_ms, plain_samples_ms : the pairs behind step_ms and ratio
    repeat_ratios : the ratio of each repeat by itself
    failed : the reason why the row is incomplete; empty where it is complete
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
    libraries_bytes: int | None = None
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
        """Times of the steps as multiples of the neighboring plain steps."""
        return _pairs(self.step_samples_ms, self.plain_samples_ms)

    @property
    def spread(self) -> float | None:
        """Half of the interquartile range of the pairs behind `ratio`; None where they are too few."""
        if len(self.pairs) < SPREAD_PAIRS:
            return None
        low, _, high = quantiles(self.pairs, n=4)
        return (high - low) / 2

    @property
    def look(self) -> str:
        """Category in pictures: plain, peer, lossless or lossy."""
        return self.kind if self.kind != "ours" else "lossless" if self.bit_equal else "lossy"

    def set_times(self, mine_ms: list[float], plain_ms: list[float | None]) -> None:
        """Set the times of this row's steps, and of the plain step next to each; None where plain failed."""
        self.step_samples_ms, self.plain_samples_ms = mine_ms, plain_ms
        self.step_ms = median(mine_ms)
        self.ratio = _ratio(mine_ms, plain_ms)

    def add_times(self, mine_ms: list[float], plain_ms: list[float | None]) -> None:
        """Add the times of one more repeat."""
        ratio = _ratio(mine_ms, plain_ms)
        self.repeat_ratios += [] if ratio is None else [ratio]
        self.set_times(self.step_samples_ms + mine_ms, self.plain_samples_ms + plain_ms)

    def set_losses(self, losses: list[float]) -> None:
        """Set the losses of all steps; there is at least one."""
        self.losses, self.loss, self.loss_hex = losses, losses[-1], losses[-1].hex()

    def update(self, figures: dict[str, Any]) -> None:
        """Set the fields that `figures` names."""
        for name, value in figures.items():
            setattr(self, name, value)


@dataclass(frozen=True)
class Duel:
    """Times of the steps of a peer and of a row of actstore, which trained in turns."""

    peer: str
    ours: str
    peer_ms: list[float]
    ours_ms: list[float]

    @property
    def pairs(self) -> list[float]:
        """Times of actstore's steps as multiples of the neighboring steps of the peer."""
        return _pairs(self.ours_ms, self.peer_ms)


@dataclass
class Result:
    """All rows, and the machine and workload of the run.

    Attributes
    ----------
    environment : versions, processor, memory, GPU
    workload : the fields of Workload
    rows : in the order of the table
    left_out : name and reason of each row that did not run
    duels : each of a peer and the row of actstore that it is compared with
    """

    environment: dict[str, Any]
    workload: dict[str, Any]
    rows: list[RowResult] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    duels: list[Duel] = field(default_factory=list)

    @property
    def busy(self) -> tuple[float, float] | None:
        """Quartiles of plain's step times in milliseconds, where their distance shows that the machine was busy.

        A busy machine distorts medians of step times, not ratios of neighboring steps.
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
        """Workload in words."""
        return subject(self.workload)

    @property
    def place(self) -> str:
        """Device in words: the GPU, or the processor and the number of threads."""
        work, env = self.workload, self.environment
        if work["device"].startswith("cuda"):
            return str(env["gpu"])
        return f"{env['processor']}, {work['threads'] or env['cores']} threads"

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON can hold: a figure that is not finite becomes None (`loss_hex` keeps the loss)."""
        found: dict[str, Any] = finite(asdict(self))
        return found

    def to_json(self) -> str:
        """Return strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """Build a result from what `to_dict` returned; unknown fields are ignored."""
        known = {f.name for f in fields(RowResult)}
        rows = [RowResult(**{k: v for k, v in row.items() if k in known}) for row in values["rows"]]
        duels = [Duel(**duel) for duel in values.get("duels", ())]
        return cls(values["environment"], values["workload"], rows, values["left_out"], duels)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Read the JSON of `to_json`."""
        return cls.from_dict(json.loads(text))

    def write(self, path: Path) -> None:
        path.write_text(self.to_json(), encoding="utf-8")


def _ratio(mine_ms: list[float], plain_ms: list[float | None]) -> float | None:
    pairs = _pairs(mine_ms, plain_ms)
    return median(pairs) if pairs else None


def _pairs(mine_ms: Sequence[float], plain_ms: Sequence[float | None]) -> list[float]:
    return [mine / plain for mine, plain in zip(mine_ms, plain_ms, strict=True) if plain is not None]


def subject(work: dict[str, Any]) -> str:
    """Describe a workload: "gpt: 6 layers, width 256, heads 4, context 256, batch 8, float32"."""
    model = work.get("model", "gpt")  # results without this field are all of gpt
    sizes = ("layers", "width", "heads", "context", "batch", "dropout")
    uses = MODELS[model].uses if model in MODELS else sizes if ":" not in model else ()
    words = [f"{name} {work[name]:g}" for name in sizes[1:] if name in uses and work[name]]
    layers = [f"{work['layers']} layer{'s'[: work['layers'] > 1]}"] if "layers" in uses else []
    return f"{model}: {', '.join([*layers, *words, work['dtype']])}"
