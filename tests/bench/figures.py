"""Figures made up, in the form in which the parts of the suite write them."""

from __future__ import annotations

from typing import Any

from actstore.bench.result import Result, RowResult
from actstore.bench.workloads.workload import Workload
from benchmarks import largest
from benchmarks.suite import breakdown, convergence, scaling

MIB = 2**20
ENVIRONMENT: dict[str, Any] = {"processor": "Some(R) Processor CPU @ 2.00GHz", "cores": 2, "torch": "2", "gpu": None}
_WORK = Workload(layers=4, width=128).to_dict()
_SIZES = {"layers": [2, 4, 8, 16], "context": [128, 256, 512, 1024], "batch": [2, 4, 8, 16]}


def _point(axis: str, place: int, size: int) -> dict[str, Any]:
    plain = 10.0 * 2**place
    rows = [
        {"name": name, "kind": "", "ratio": 1 + 0.1 * n, "step_ms": plain * (1 + 0.1 * n), "failed": "",
         "held_bytes": int(plain * MIB / (1 + n))}
        for n, name in enumerate(scaling.ROWS)
    ]  # fmt: skip
    return {"axis": axis, "size": size, "rows": rows}


def _curves() -> dict[str, Any]:
    def row(name: str, kind: str, off: float) -> RowResult:
        return RowResult(name, kind, losses=[4 - 0.01 * step + off * (step % 7) for step in range(200)])

    rows = [row("plain", "plain", 0.0)]
    rows += [row(name, "ours", 0.01 if "int" in name else 0.0) for name in convergence.ROWS[2:]]
    runs = [Result(ENVIRONMENT, _WORK | {"model": model}, rows).to_dict() for model in ("gpt", "resnet")]
    return {"environment": ENVIRONMENT, "runs": runs}


MADE_UP: dict[str, dict[str, Any]] = {
    "breakdown": {
        "environment": ENVIRONMENT, "workload": _WORK, "rounds": 3,
        "rows": [
            {"name": name, breakdown.REST: 300.0 + n, **dict.fromkeys(breakdown.PARTS, 10.0 * n)}
            for n, name in enumerate(("plain", *breakdown.POLICIES))
        ],
    },
    "scaling": {
        "environment": ENVIRONMENT, "workload": _WORK, "sizes": _SIZES,
        "points": [_point(axis, n, size) for axis, sizes in _SIZES.items() for n, size in enumerate(sizes)],
    },
    "largest": {
        "environment": ENVIRONMENT, "workload": _WORK, "limit": 1024 * MIB, "limited_by": "a control group", "steps": 3,
        "rows": [
            {"name": name, "kind": "ours" if n > 2 else "peer" if n else "plain", "most": 300,
             "batch": 7 + 40 * n if n < 8 else 300, "peaks": {}, "lossy": n % 2 == 1}
            for n, name in enumerate(largest.ROWS)
        ],
    },
    "convergence": _curves(),
}  # fmt: skip
