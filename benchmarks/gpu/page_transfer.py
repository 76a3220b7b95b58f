"""Figures of the transfer engine as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import cell, table

MIB = 2**20


def lines(figures: dict[str, Any]) -> list[str]:
    """Return the figures beside the goals; a figure that misses its goal is bold."""
    goals = figures["goals"]
    found = _link(figures["link"], figures["policy"], goals["of_ceiling"]) if figures.get("link") else []
    for name, title in (("hidden", "Compute longer than the transfer"), ("exposed", "Compute shorter")):
        if name in figures:
            found += [f"{title}:", "", *_step(figures[name], goals), ""]
    if "steady" in figures:
        found += [*_steady(figures["steady"], goals["allocated"]), ""]
    if "payloads" in figures:
        ceiling = figures.get("ceilings", {}).get("device_to_host", {}).get("gbps")
        found += ["Small payloads, each way; the host's time is beyond that of a step without copies:", ""]
        found += [*_payloads(figures["payloads"], ceiling), ""]
    if "price" in figures:
        found += ["`raw` by way of a buffer of the store, against a copy from the tensor itself:", ""]
        found += [*_price(figures["price"]), ""]
    if "pinning" in figures:
        found += ["Memory that is pinned, in ms:", "", *_pinning(figures["pinning"]), ""]
    found += [f"- {name} **failed**: {cell(reason)}" for name, reason in figures["failed"].items()]
    found += [f"- {cell(figures['trace'])}"] if figures.get("trace") else []
    return found[:-1] if found[-1:] == [""] else found


def _goal(text: str, good: bool) -> str:
    return text if good else f"**{text}**"


def _link(rows: list[dict[str, Any]], policy: str, goal: float) -> list[str]:
    rows_found = []
    for row in rows:
        window = f", window {row['window_nbytes'] / MIB:.0f}" if row["window_nbytes"] else ""
        cells = [f"{row['count']} of {row['nbytes'] / MIB:g}{window}" if row["correct"] else "**WRONG**"]
        for name in ("out", "back", "both"):
            flow = row[name]
            cells.append(f"{flow['gbps']:.1f}")
            if "of_ceiling" in flow:
                cells.append(_goal(f"{100 * flow['of_ceiling']:.0f} %", flow["of_ceiling"] >= goal))
            else:
                cells.append("-")
        rows_found.append([*cells, f"{row['both']['host_us']:.0f}"])
    header = ["payloads, MiB", "out GB/s", "of link", "back GB/s", "of link", "both GB/s", "of link", "host us"]
    about = f"Payloads through the engine, `{policy}`; the goal is {100 * goal:.0f} % of the link, the rest is bold."
    return [about, "", *table(header, rows_found), ""]


def _step(figures: dict[str, Any], goals: dict[str, float]) -> list[str]:
    share, goal = figures["stall_share"], goals["stall_share"]
    rows = [
        ["layers, MiB saved by each", f"{figures['layers']}, {figures['nbytes'] / MIB:g}", ""],
        ["gradients equal", "yes" if figures["equal"] else "**NO**", "yes"],
        ["step without a store, ms", f"{figures['plain_ms']:.1f}", ""],
        ["step, ms", f"{figures['store_ms']:.1f}", ""],
        ["times plain", f"{figures['ratio']:.3f}", ""],
        ["copies out, back, ms", f"{figures['offload_ms']:.1f}, {figures['fetch_ms']:.1f}", ""],
    ]
    stall = f"{figures['stall_ms']:.2f}"
    if "theory_ms" in figures:
        over, most = figures["stall_over_theory"], goals["stall_over_theory"]
        rows += [
            ["stall, ms", stall, f"{figures['theory_ms']:.2f} by theory"],
            ["stall over theory", "-" if over is None else _goal(f"{over:.2f}", over <= most), f"at most {most:.2f}"],
        ]
    else:
        rows += [
            ["stall, ms", stall, ""],
            ["stall, part of the step", _goal(f"{100 * share:.2f} %", share < goal), f"under {100 * goal:.0f} %"],
        ]
    return table(["", "measured", "goal"], rows)


def _steady(figures: dict[str, Any], goal: int) -> list[str]:
    rows = [[name, _goal(str(count), count <= goal), str(goal)] for name, count in sorted(figures["allocated"].items())]
    pinned = figures["pinned_segments"]
    about = f"Allocated in {figures['steps']} steps after the first; {len(pinned)} pinned segments"
    return [f"{about}, {sum(pinned) / MIB:.0f} MiB:", "", *table(["", "measured", "goal"], rows)]


def _payloads(rows: list[dict[str, Any]], ceiling: float | None) -> list[str]:
    cells = [
        [
            f"{row['count']} of {row['nbytes'] / MIB:g}",
            row["name"],
            *(f"{row[f'{half}_us']:.0f}" for half in ("out", "back")),
            f"{row['gbps']:.1f}",
            f"{row['gbps'] / ceiling:.0%}" if ceiling else "-",
        ]
        for row in rows
        if "gbps" in row
    ]
    notes = [
        f"- {row['name']}, {row['nbytes'] / MIB:g} MiB: {cell(row.get('failed') or row['left_out'])}"
        for row in rows
        if "gbps" not in row
    ]
    header = ["payloads, MiB", "way", "host us out", "host us back", "GB/s", "of link"]
    return [*table(header, cells), *([""] if notes else []), *notes]


def _price(rows: list[dict[str, Any]]) -> list[str]:
    names = ("direct", "encode", "encode_and_copy")
    cells = [
        [
            f"{row['nbytes'] / MIB:g}",
            *(f"{row[name]['ms']:.3f}" for name in names),
            f"{row['encode_and_copy']['ms'] / row['direct']['ms']:.3f}",
        ]
        for row in rows
    ]
    return table(["MiB", "direct ms", "into a buffer ms", "both ms", "times direct"], cells)


def _pinning(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        [
            f"{row['nbytes'] / MIB:g}",
            "refused" if row["refused"] else f"{row['register_ms']:.1f}",
            "-" if row["refused"] else f"{row['unregister_ms']:.1f}",
            f"{row['torch_ms']:.1f}",
        ]
        for row in rows
    ]
    return table(["MiB", "pages registered", "given back", "torch's allocator"], cells)
