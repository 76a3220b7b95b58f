"""Figures of the Llama blocks, compiled too, and of the largest context, as Markdown."""

from __future__ import annotations

from typing import Any

from actstore.base.units import format_nbytes
from benchmarks.markdown import cell, table


def lines(figures: dict[str, Any]) -> list[str]:
    """Return the rows, the transfers of each, and the predictions of plans."""
    sizes, plain = figures["sizes"], figures.get("plain", {})
    rows = [row for row in (plain, *figures["rows"]) if "step_ms" in row]
    ceiling = figures["link"]["device_to_host"]
    about = (
        f"{sizes['layers']} layers, width {sizes['width']}, {sizes['heads']} heads, {sizes['kv_heads']} of keys, SwiGLU"
        f" of {sizes['hidden']}, one sequence of {sizes['tokens']} tokens, bfloat16; weights and gradients take"
        f" {format_nbytes(2 * figures['parameter_bytes'])} of each peak. A step is forward and backward."
    )
    header = ["row", "step ms", "times plain", "tokens/s", "peak", "reserved", "held", "stall ms"]
    header += ["to host", "of link"]
    table_rows = [[*_row(row, sizes["tokens"]), *_link(row, ceiling), _error(row)] for row in rows]
    found = [about, "", *table([*header, "gradient error"], table_rows), ""]
    found += [
        "*peak*: high-water of what the allocator gave out; *reserved*: of what it took from the device. *held*: of",
        "activations, at the end of forward. *of link*: the rate of copies out over that of plain pinned copies alone,",
        f"{ceiling:.1f} GB/s.",
        "",
        *_plans(rows),
    ]
    for row in figures["rows"]:
        for key, kind in (("failed", "**failed**"), ("left_out", "is left out")):
            found += [f"- {row['name']} {kind}: {cell(row[key])}"] if key in row else []
    return [*found, *([f"- {figures['picture']}"] if "picture" in figures else [])]


def _row(row: dict[str, Any], tokens: int) -> list[str]:
    return [
        row["name"],
        f"{row['step_ms']:.1f}",
        f"{row['ratio']:.2f}",
        f"{tokens / row['step_ms'] * 1e3:,.0f}",
        _size(row.get("peak_bytes")),
        _size(row.get("reserved_bytes")),
        _size(row.get("held_bytes")),
        f"{row['stall_ms']:.1f}" if "stall_ms" in row else "-",
    ]


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_nbytes(int(nbytes))


def _link(row: dict[str, Any], ceiling: float) -> list[str]:
    if not row.get("host_bytes") or not row["offload_ms"]:
        return ["-", "-"]
    return [_size(row["host_bytes"]), f"{row['host_bytes'] / row['offload_ms'] / 1e6 / ceiling:.0%}"]


def _error(row: dict[str, Any]) -> str:
    if row["equal"]:
        return "0 (exact)"
    return f"{'**' * row['exact']}{row['grad_error']:.2%}{'**' * row['exact']}"


def _plans(rows: list[dict[str, Any]]) -> list[str]:
    plans = [row for row in rows if "predicted_ms" in row]
    cells = [
        [
            row["name"],
            f"{format_nbytes(row['budget'])}{' (least)' if 'refused' in row else ''}",
            f"{row['peak_held_bytes'] / row['budget']:.1%}",
            f"{row['step_ms']:.1f}",
            f"{row['predicted_ms']:.1f}",
            "-" if row["bound_ms"] is None else f"{row['bound_ms']:.1f}",
            str(row["settled_after"]),
        ]
        for row in plans
    ]
    header = ["plan", "budget", "peak of it", "step ms", "predicted", "bound", "steps to settle"]
    texts = [line for row in plans for line in (f"{row['name']}:", "", "```", row["policy"].strip(), "```", "")]
    return [*table(header, cells), "", *texts] if plans else []


def graphs(figures: dict[str, Any]) -> list[str]:
    """Return the rows of compiled blocks."""
    plain, sizes = figures["plain"], figures["sizes"]
    rows = [{"ratio": 1.0, "equal": True, **plain}, *[row for row in figures["rows"] if "ratio" in row]]
    cells = [
        [
            row["name"],
            f"{row['step_ms']:.1f}",
            f"{row['ratio']:.2f}",
            *(
                f"{format_nbytes(int(row[key]))} ({row[key] / (plain[key] or 1):.2f})"
                for key in ("held_bytes", "backward_peak_bytes", "peak_bytes")
            ),
            "0 (exact)" if row["equal"] else f"{row['grad_error']:.2%}",
        ]
        for row in rows
    ]
    about = (
        f"{sizes['layers']} layers as above, {sizes['tokens']} tokens, compiled as a whole by Inductor. *held* is at"
        " the end of forward, peaks are of backward and of the step: all above what was there before, in brackets over"
        " plain compilation's."
    )
    header = ["row", "step ms", "times plain", "held", "backward's peak", "peak", "gradient error"]
    notes = [f"- {row['name']} **failed**: {cell(row['failed'])}" for row in figures["rows"] if "failed" in row]
    return [about, "", *table(header, cells), *([""] if notes else []), *notes]


def context(figures: dict[str, Any]) -> list[str]:
    """Return the largest context of each row, and its attempts."""
    sizes, rows = figures["sizes"], [row for row in figures["rows"] if row.get("step_ms")]
    first = rows[0]["tokens"] if rows else 1
    cells = [
        [
            row["name"],
            f"{row['tokens']:,}",
            f"{row['tokens'] / first:.2f}",
            f"{row['step_ms']:.0f}",
            f"{row['tokens'] / row['step_ms'] * 1e3:,.0f}",
            format_nbytes(row["peak_bytes"]),
            ", ".join(f"{one['tokens']:,}{'' if one['peak_bytes'] else ' (too long)'}" for one in row["attempts"]),
        ]
        for row in rows
    ]
    about = (
        f"One sequence, {sizes['layers']} layers as above, under a limit of {format_nbytes(figures['limit_bytes'])} of"
        " device memory, weights and gradients included. The largest did run."
    )
    header = ["row", "tokens", "times plain", "step ms", "tokens/s", "peak", "attempts"]
    notes = [f"- {row['name']} **failed**: {cell(row['failed'])}" for row in figures["rows"] if "failed" in row]
    notes += [f"- {row['name']}: not even the first attempt fits" for row in figures["rows"] if row.get("tokens") == 0]
    return [about, "", *table(header, cells), *([""] if notes else []), *notes]
