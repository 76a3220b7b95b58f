"""Figures of the Llama blocks, compiled too, and of the largest context, as Markdown."""

from __future__ import annotations

from typing import Any

from actstore.base.units import format_nbytes
from benchmarks.markdown import cell, table


def lines(figures: dict[str, Any]) -> list[str]:
    """Return the rows, the transfers of each, and the predictions of plans."""
    plain = figures.get("plain", {})
    rows = [row for row in (plain, *figures["rows"]) if "step_ms" in row]
    ceiling = figures["link"]["device_to_host"]
    units = figures["units"] if "units" in figures else figures["sizes"]["tokens"]
    header = ["row", "step ms", "times plain", f"{figures.get('unit', 'token')}s/s", "peak", "reserved", "held"]
    header += ["stall ms", "J", "to host", "of link"]
    about = f"{_about(figures)} A step is forward and backward."
    table_rows = [[*_row(row, units), *_link(row, ceiling), _error(row)] for row in rows]
    found = [about, "", *table([*header, "gradient error"], table_rows), ""]
    found += [
        "*peak*: high-water of what the allocator gave out; *reserved*: of what it took from the device. *held*: of",
        "activations, at the end of forward. *J*: energy of a step, by NVML. *of link*: the rate of copies out over",
        f"that of plain pinned copies alone, {ceiling:.1f} GB/s.",
        "",
        *_unrepeated(figures.get("unrepeated", 0)),
        *_first(rows),
        *_plans(rows),
    ]
    for row in figures["rows"]:
        for key, kind in (("failed", "**failed**"), ("left_out", "is left out")):
            found += [f"- {row['name']} {kind}: {cell(row[key])}"] if key in row else []
    return [*found, *([f"- {figures['picture']}"] if "picture" in figures else [])]


def _about(figures: dict[str, Any]) -> str:
    """Return the sizes of the model, and the bytes of its weights."""
    if "said" in figures:
        weights = format_nbytes(2 * figures["parameter_bytes"])
        return f"{figures['title']}: {figures['said']}; weights and gradients take {weights} of each peak."
    sizes = figures["sizes"]
    times, and_gradients = (1, ", frozen but for adapters,") if sizes.get("lora") else (2, " and gradients")
    vocabulary = f"a vocabulary of {sizes['vocabulary']:,}, " if sizes.get("vocabulary") else ""
    return (
        f"{sizes['layers']} layers, width {sizes['width']}, {sizes['heads']} heads, {sizes['kv_heads']} of keys, SwiGLU"
        f" of {sizes['hidden']}, {vocabulary}one sequence of {sizes['tokens']} tokens, bfloat16; weights"
        f"{and_gradients} take {format_nbytes(times * figures['parameter_bytes'])} of each peak."
    )


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
        f"{row['energy_j']:.0f}" if "energy_j" in row else "-",
    ]


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_nbytes(int(nbytes))


def _link(row: dict[str, Any], ceiling: float) -> list[str]:
    if not row.get("host_bytes") or not row["offload_ms"]:
        return ["-", "-"]
    return [_size(row["host_bytes"]), f"{row['host_bytes'] / row['offload_ms'] / 1e6 / ceiling:.0%}"]


def _unrepeated(count: int) -> list[str]:
    said = f"{count} gradients differ between two plain steps, as PyTorch warns: rows are not compared in these."
    return [said, ""] if count else []


def _first(rows: list[dict[str, Any]]) -> list[str]:
    """Return the time of first steps that pin host memory."""
    said = [
        f"{row['name']} {row['first_ms'] / 1e3:.1f} s for {format_nbytes(row['pinned_bytes'])}"
        for row in rows
        if "pinned_bytes" in row
    ]
    return [f"The first step pins host memory: {'; '.join(said)}.", ""] if said else []


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
    texts = []
    for row in plans:
        texts += [f"{row['name']}: {row['rival']}" if row.get("rival") else f"{row['name']}:", ""]
        texts += ["```", row["policy"].strip(), "```", ""]
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
    mode = f", mode {figures['mode']}" if figures.get("mode") else ""
    about = (
        f"{sizes['layers']} layers of the Llama, {sizes['tokens']} tokens, compiled whole by Inductor{mode}. *held*"
        " is at the end of forward, peaks are of backward and of the step: all above what was there before, in brackets"
        " over plain compilation's."
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
            format_nbytes(row["pinned_bytes"]) if row.get("pinned_bytes") else "-",
            ", ".join(f"{one['tokens']:,}{'' if one['peak_bytes'] else ' (too long)'}" for one in row["attempts"]),
        ]
        for row in rows
    ]
    about = (
        f"One sequence, {sizes['layers']} layers of the Llama, under a limit of {format_nbytes(figures['limit_bytes'])}"
        f" of device memory, weights{'' if sizes.get('lora') else ' and gradients'} included. The largest did run."
    )
    if figures.get("most_tokens"):
        about += " The blocks are frozen, but for adapters."
        about += f" The vocabulary has {sizes['vocabulary']:,} tokens." if sizes.get("vocabulary") else ""
        about += f" No row was tried beyond {figures['most_tokens']:,} tokens."
    header = ["row", "tokens", "times plain", "step ms", "tokens/s", "peak", "pinned", "attempts"]
    notes = [f"- {row['name']} **failed**: {cell(row['failed'])}" for row in figures["rows"] if "failed" in row]
    notes += [f"- {row['name']} is left out: {row['left_out']}" for row in figures["rows"] if "left_out" in row]
    notes += [f"- {row['name']}: not even the first attempt fits" for row in figures["rows"] if row.get("tokens") == 0]
    return [about, "", *table(header, cells), *([""] if notes else []), *notes]
