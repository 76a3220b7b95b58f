"""What a run of the benchmark found, and its JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median, quantiles
from typing import Any

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
    baseline_bytes : the same measure before the first step
    host_peak_bytes : high-water of the process's resident memory, whatever the device
    peak_since_reset : whether the high-water of the process leaves out what came before the timed steps
    loss, loss_hex : after the last step; the hex form is exact
    grad_error : ||g - g_plain|| / ||g_plain|| over all parameters on the same batch, in float64; 0.0 only where equal
    bit_equal : whether all gradients are equal bit for bit
    step_samples_ms, plain_samples_ms : the pairs behind step_ms and ratio
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
    baseline_bytes: int | None = None
    host_peak_bytes: int | None = None
    peak_since_reset: bool | None = None
    loss: float | None = None
    loss_hex: str | None = None
    grad_error: float | None = None
    bit_equal: bool | None = None
    step_samples_ms: list[float] = field(default_factory=list)
    plain_samples_ms: list[float | None] = field(default_factory=list)
    failed: str = ""

    @property
    def held_fraction(self) -> float | None:
        """`held_bytes` over `saved_bytes`."""
        return self.held_bytes / self.saved_bytes if self.held_bytes is not None and self.saved_bytes else None

    def set_times(self, mine_ms: list[float], plain_ms: list[float | None]) -> None:
        """Take the samples: steps of this row, and beside each the plain step next to it, None where plain failed."""
        self.step_samples_ms, self.plain_samples_ms = mine_ms, plain_ms
        self.step_ms = median(mine_ms)
        pairs = [mine / plain for mine, plain in zip(mine_ms, plain_ms, strict=True) if plain is not None]
        self.ratio = median(pairs) if pairs else None

    def update(self, figures: dict[str, Any]) -> None:
        """Set the fields that `figures` names."""
        for name, value in figures.items():
            setattr(self, name, value)


@dataclass
class Result:
    """All rows with what they were measured on.

    Attributes
    ----------
    environment : versions, processor, memory, GPU
    workload : the fields of Workload
    rows : in the order of the table
    left_out : name and reason of the rows that were not run
    """

    environment: dict[str, Any]
    workload: dict[str, Any]
    rows: list[RowResult] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)

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

    def to_json(self) -> str:
        """Strict JSON: a figure that is not finite becomes null (`loss_hex` still tells)."""
        return json.dumps(finite(asdict(self)), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Read what `to_json` wrote; fields that this version does not know are left out."""
        values = json.loads(text)
        known = {f.name for f in fields(RowResult)}
        rows = [RowResult(**{k: v for k, v in row.items() if k in known}) for row in values["rows"]]
        return cls(values["environment"], values["workload"], rows, values["left_out"])

    def write(self, path: Path) -> None:
        path.write_text(self.to_json(), encoding="utf-8")


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
