"""Result of a run of the benchmark of codecs, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from actstore.display.text import finite


@dataclass
class Speed:
    """Times of one direction of a codec, each call after a ``Tensor.copy_`` of the same tensor into touched memory.

    Attributes
    ----------
    ms : of the calls, which allocate what they return, in reused memory
    copy_ms : of the copies, each right before its call
    fresh_ms : of calls in fresh memory from the system; empty where the device's allocator keeps memory
    """

    ms: list[float]
    copy_ms: list[float]
    fresh_ms: list[float] = field(default_factory=list)

    @property
    def fresh_of_copy(self) -> float | None:
        """Median rate of calls in fresh memory over that of copies."""
        return median(self.copy_ms) / median(self.fresh_ms) if self.fresh_ms else None

    @property
    def of_copy(self) -> list[float]:
        """Speed of each call as a multiple of its copy's."""
        return [copy / mine for mine, copy in zip(self.ms, self.copy_ms, strict=True)]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Quartiles of `of_copy`; the middle one is the figure that counts."""
        samples = self.of_copy
        if len(samples) == 1:
            return samples[0], samples[0], samples[0]
        low, _, high = quantiles(samples, n=4, method="inclusive")
        return low, median(samples), high

    def gbps(self, nbytes: int) -> float:
        """Return 10^9 bytes of the tensor a second, at the median."""
        return nbytes / median(self.ms) / 1e6


@dataclass
class CodecRow:
    """Figures of one codec with one dtype; without them `failed` has the reason.

    Attributes
    ----------
    codec : policy text, or the name of a codec of another library
    family : kind of codec
    dtype, data : of the tensor behind `nbytes`, `payload_nbytes` and the speeds
    lossless, fixed : every element comes back bit for bit; the payload's size follows from shape and dtype
    nbytes, payload_nbytes : of the tensor, and of its payload
    encode, decode : speeds
    error : by data, ``||x - decode(encode(x))|| / ||x||`` in float64; 0.0 only where equal; floats only
    ratio_by_data : bytes of the tensor over those of its payload; floats only
    failed : the reason why the row is incomplete; empty where it is complete
    missing : whether `failed` names a package that is not installed, or a codec that does not exist
    """

    codec: str
    family: str
    dtype: str = ""
    data: str = ""
    lossless: bool = False
    fixed: bool = True
    nbytes: int = 0
    payload_nbytes: int = 0
    encode: Speed | None = None
    decode: Speed | None = None
    error: dict[str, float | None] = field(default_factory=dict)
    ratio_by_data: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    missing: bool = False

    @property
    def ratio(self) -> float:
        return self.nbytes / self.payload_nbytes if self.payload_nbytes else 0.0

    @property
    def bits(self) -> float:
        """Bits of the payload for one element."""
        itemsize = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "bool": 1}[self.dtype]
        return 8 * itemsize / self.ratio


@dataclass
class CodecResult:
    """All rows, and the machine and settings of the run.

    Attributes
    ----------
    environment : versions, processor, memory
    setting : size of the tensors, repeats, threads, seed
    rows : in the order of the table
    """

    environment: dict[str, Any]
    setting: dict[str, Any]
    rows: list[CodecRow] = field(default_factory=list)

    @property
    def good(self) -> list[CodecRow]:
        return [row for row in self.rows if not row.failed]

    @property
    def failed(self) -> list[CodecRow]:
        return [row for row in self.rows if row.failed]

    def to_json(self) -> str:
        """Return strict JSON: the figures of the table and the samples behind them."""
        values = asdict(self)
        for row, of in zip(self.rows, values["rows"], strict=True):
            if not row.failed:
                of |= {"ratio": row.ratio, "bits_per_element": row.bits}
            for verb, speed in (("encode", row.encode), ("decode", row.decode)):
                if speed is not None:
                    of[verb] |= {
                        "of_copy": speed.quartiles[1],
                        "fresh_of_copy": speed.fresh_of_copy,
                        "gbps": speed.gbps(row.nbytes),
                    }
        return json.dumps(finite(values), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CodecResult:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        rows = [_row(row) for row in values["rows"]]
        return cls(values["environment"], values["setting"], rows)

    def write(self, path: Path) -> None:
        path.write_text(self.to_json(), encoding="utf-8")


def _row(values: dict[str, Any]) -> CodecRow:
    known = {f.name for f in fields(CodecRow)}
    for verb in ("encode", "decode"):
        if values[verb] is not None:
            values[verb] = Speed(values[verb]["ms"], values[verb]["copy_ms"], values[verb].get("fresh_ms", []))
    return CodecRow(**{name: value for name, value in values.items() if name in known})


def dtypes_of(rows: Sequence[CodecRow]) -> list[str]:
    """Return the dtypes that occur, each once, in their order."""
    return list(dict.fromkeys(row.dtype for row in rows if row.dtype))
