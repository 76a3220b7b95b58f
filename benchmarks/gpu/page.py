"""Page of Markdown with the figures of a GPU. It shows measured figures only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from benchmarks.gpu import context, curves, exact, graphs, llama_rows, transfer
from benchmarks.gpu import models as gpu_models
from benchmarks.gpu import page_llama as gpu_page_llama
from benchmarks.gpu import page_transfer as gpu_page_transfer
from benchmarks.gpu.parts import CODECS, COMPILED, LIMITS_GIB, TESTS
from benchmarks.gpu.verdicts import verdicts
from benchmarks.markdown import cell, table
from benchmarks.suite import convergence

MIB = 2**20


def page(found: dict[str, Any], pictures: dict[str, str]) -> str:
    """Return the page of one GPU; each part has its date and versions. Figures of another device are not shown.

    Parameters
    ----------
    pictures : files beside the page, by their title in the part
    """
    parts = {
        name: part
        for name, part in found["parts"].items()
        if found["dry_run"] or part["environment"].get("gpu") == found["gpu"]
    }
    dry = "**A dry run on a CPU: it shows that everything runs. No figure here is of a GPU.**"
    lines = [dry, ""] if found["dry_run"] else []
    title = "Dry run of the GPU suite" if found["dry_run"] else found["gpu"]
    lines += [f"# {title}", "", "Written by `make gpu`; how each figure is measured: [README](../README.md).", ""]
    lines += ["## Verdicts", "", *_verdicts(parts), ""]
    lines += _waiting(parts)
    for file, words in _PICTURES.items():
        if file in pictures:
            lines += [f"![{words}]({pictures[file]})", ""]
    for name in [name for name in _TITLES if name in parts]:
        part = parts[name]
        env, figures = part["environment"], part["figures"]
        lines += [f"## {_TITLES[name]}", ""]
        if part["status"] != "ok":
            lines += [f"**{part['status']}** after {part['seconds']} s: {cell(part['said'])}", ""]
        if later := part.get("later"):
            lines += [
                f"Older figures: a run of commit {later['commit']} {later['status']} after {later['seconds']} s.",
                "",
            ]
        if figures is not None and name in _PAGES:
            lines += [*_PAGES[name](figures), ""]
        elif part["status"] == "ok":
            lines += [part["said"], ""]
        versions = f"actstore {env['actstore']}, torch {env['torch']}, {_cupy(env)}"
        lines += [f"{part['seconds']:.0f} s, {env['time']}: commit {_commits(part)}, {versions}", ""]
    return "\n".join(lines)


def _waiting(parts: dict[str, Any]) -> list[str]:
    """Return the list of what has no figures of this GPU; empty where all is measured."""
    left = {name: _left(name, parts.get(name, {}).get("figures")) for name in _TITLES}
    lines = [f"- {_TITLES[name]}: {'; '.join(waiting)}." for name, waiting in left.items() if waiting]
    about = "Rows, measurements and test files without figures, or left out, until a machine runs them:"
    return ["## What waits for a machine", "", about, "", *lines, ""] if lines else []


def _left(name: str, figures: dict[str, Any] | None) -> list[str]:
    """Return what a part has not measured: rows, measurements or test files, or all of it."""
    if name not in _ROWS or not figures:
        return [] if figures else sorted(_ROWS.get(name, ("all of it",)))
    if figures.get("finished"):
        return []
    rows = {row["name"] for row in figures.get("rows", ()) if "left_out" not in row and not row.get("failed")}
    return sorted(set(_ROWS[name]) - rows - figures.get("files", {}).keys() - figures.keys())


def _commits(part: dict[str, Any]) -> str:
    """Return the commit that measured a part, and those of rows or test files that are older."""
    figures = part["figures"] if isinstance(part["figures"], dict) else {}
    rows = figures.get("rows", [])
    of = {row["name"]: row.get("commit") for row in rows if "commit" in row} if isinstance(rows, list) else {}
    of |= figures.get("files", {}) | figures.get("commits", {})
    last = part.get("commit") or "unknown"
    older = [f"{name} at {commit or 'an unknown one'}" for name, commit in of.items() if commit != last]
    return last + (f" ({'; '.join(older)})" if older else "")


def _verdicts(parts: dict[str, Any]) -> list[str]:
    words = {True: "PASS", False: "**FAIL**", None: "not measured"}
    rows = [[verdict.promise, words[verdict.good], verdict.found or "-"] for verdict in verdicts(parts)]
    return table(["promise", "verdict", "measured"], rows)


def _tests(figures: dict[str, Any]) -> list[str]:
    """Return the counts, the failures, and the reasons of skipped tests."""
    counts = ", ".join(f"{len(figures[kind])} {kind}" for kind in ("passed", "failed", "skipped"))
    lines = [counts + ("." if figures["finished"] else "; not finished."), ""]
    lines += [f"- `{test}` **failed**: {cell(reason)}" for test, reason in figures["failed"].items()]
    skipped = Counter(figures["skipped"].values())
    lines += [f"- {count} skipped: {cell(reason)}" for reason, count in skipped.most_common()]
    return lines if lines[-1] else lines[:-1]


def _cupy(env: dict[str, Any]) -> str:
    versions = [f"{name} {env[name]}" for name in ("cupy-cuda12x", "cupy-cuda13x") if env.get(name)]
    return f"{', '.join(versions) or 'no CuPy'}, Python {env['python']}"


def _ceilings(figures: dict[str, Any] | None) -> list[str]:
    if not figures:
        return []
    names = {
        "device_copy": "device copy, read plus written",
        "host_to_device": "pinned host to device",
        "device_to_host": "device to pinned host",
        "both_ways": "both at once, together",
    }
    rows = [
        [title, f"{figures[key]['gbps']:.1f}", f"{figures[key]['ms']:.3f}", _spread(figures[key])]
        for key, title in names.items()
        if key in figures
    ]
    size = f"Buffers of {figures['nbytes'] / MIB:.0f} MiB."
    return [size, "", *table(["copy", "GB/s", "median ms", "quartiles ms"], rows), ""]


def _spread(times: dict[str, float]) -> str:
    return f"{times['low_ms']:.3f} .. {times['high_ms']:.3f}"


def _kernels(figures: dict[str, Any]) -> list[str]:
    rows = [row for row in figures["rows"] if "error" in row]
    lines = [[row["name"], row["data"], f"{row['ratio']:.2f}", _kernel_error(row), *_kernel_rates(row)] for row in rows]
    gbps = figures["device_copy"]["gbps"]
    copy = f"Sources of {figures['nbytes'] / MIB:.0f} MiB; a device copy beside them: {gbps:.0f} GB/s."
    header = ["codec", "data", "ratio", "error", "encode GB/s", "of copy", "decode GB/s", "of copy"]
    notes = [
        f"- {row['name']} {kind}: {cell(row[key])}"
        for row in figures["rows"]
        for key, kind in (("failed", "**failed**"), ("left_out", "is left out"))
        if key in row
    ]
    return [copy, "", *table(header, lines), *([""] if notes else []), *notes]


def _kernel_error(row: dict[str, Any]) -> str:
    if not row["correct"]:
        return "**WRONG**"
    return f"{100 * row['error']:.3f} %" if row["error"] else "0 (exact)"


def _kernel_rates(row: dict[str, Any]) -> list[str]:
    cells = []
    for verb in ("encode", "decode"):
        times = row.get(verb)
        cells += [f"{times['gbps']:.0f}", f"{100 * times['of_copy']:.0f} %"] if times else ["-", "-"]
    return cells


def _bench(figures: dict[str, Any]) -> list[str]:
    work = figures["workload"]
    size = (
        f"{work['model']}, {work['layers']} layers, width {work['width']}, heads {work['heads']}, "
        f"context {work['context']}, batch {work['batch']}, {work['dtype']}; {work['steps']} timed steps."
    )
    rows = [[row["name"], *_bench_cells(row)] for row in figures["rows"]]
    header = ["row", "step ms", "times plain", "saved MiB", "held MiB", "peak MiB", "loss", "gradient error"]
    notes = [f"- {row['name']} failed: {cell(row['failed'])}" for row in figures["rows"] if row["failed"]]
    notes += [f"- {out['name']} is left out: {out['reason']}" for out in figures["left_out"]]
    return [size, "", *table(header, rows), *([""] if notes else []), *notes]


def _bench_cells(row: dict[str, Any]) -> list[str]:
    def number(value: float | None, form: str, scale: float = 1.0) -> str:
        return "-" if value is None else format(value * scale, form)

    error = "0 (exact)" if row["bit_equal"] else number(row["grad_error"], ".3f", 100) + " %"
    return [
        number(row["step_ms"], ".1f"),
        number(row["ratio"], ".2f"),
        number(row["saved_bytes"], ".0f", 1 / MIB),
        number(row["held_bytes"], ".0f", 1 / MIB),
        number(row["peak_bytes"], ".0f", 1 / MIB),
        number(row["loss"], ".4f"),
        error if row["grad_error"] is not None else "-",
    ]


def _hotpath(figures: dict[str, Any]) -> list[str]:
    rows = [
        [name, f"{row['added_us']:.2f}", f"{row['chain']:.2f}", f"{row['direct']:.2f}"]
        for name, row in figures["rows"].items()
    ]
    unit = f"One unit, what identity hooks add to a saved tensor: {figures['unit_us']:.2f} us."
    return [unit, "", *table(["store", "added us", "chain, units", "direct, units"], rows)]


_TITLES = {
    "llama": "Llama blocks",
    "graphs": "Compiled Llama blocks",
    "duel": "Compiled Llama blocks within PyTorch's budgets",
    "context": "The largest context that fits",
    "llama32": "32 layers of the Llama, frozen but for adapters",
    **{f"context{limit}": f"The largest context of 32 layers within {limit} GiB" for limit in LIMITS_GIB},
    **{name: subject.title for name, subject in gpu_models.SUBJECTS.items()},
    "small": "A small GPT, where the host is the limit",
    "curves": "Loss curves",
    "transfer": "The transfer engine",
    "kernels": "Codecs",
    "exact": "Exactness in float32",
    "random": "Random models under exact policies",
    "lossy": "Random models under lossy policies",
    "hotpath": "Host time for a saved tensor of 4 KB",
    "tests": "Tests that need a GPU",
    "codecs": "Tests of the codecs on the GPU",
    "compiled": "Tests of compiled models, on the GPU",
    "sanitizer": "compute-sanitizer over the kernels",
}
_ROWS: dict[str, Collection[str]] = {
    "codecs": (CODECS,),
    "tests": TESTS,
    "compiled": COMPILED,
    "exact": exact.LOSSLESS,
    "small": exact.TIMED,
    "transfer": tuple(transfer.MEASUREMENTS),
    "llama": [row.name for row in llama_rows.ROWS],
    "graphs": [row.name for row in graphs.ROWS],
    "duel": [row.name for row in graphs.DUEL_ROWS],
    "context": context.NAMES,
    "llama32": [row.name for row in llama_rows.LORA_ROWS],
    **{f"context{limit}": context.LORA_NAMES for limit in LIMITS_GIB},
    **{name: [row.name for row in subject.rows] for name, subject in gpu_models.SUBJECTS.items()},
    "curves": curves.NAMES,
}
_PICTURES = {
    "llama.png": "Llama blocks: memory against time",
    "llama-timeline.png": "one step of the Llama blocks with raw @ host",
    "context.png": "the largest context that fits",
    "transfer.png": "one step of a chain whose compute is longer than its copies",
    "llama32.png": "32 layers of the Llama, frozen but for adapters: memory against time",
    **{f"context{limit}.png": f"the largest context of 32 layers within {limit} GiB" for limit in LIMITS_GIB},
    **{f"{name}.png": f"{subject.title}: memory against time" for name, subject in gpu_models.SUBJECTS.items()},
    "curves.png": "losses of 500 steps under lossy policies",
}
_PAGES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "llama": gpu_page_llama.lines,
    "graphs": gpu_page_llama.graphs,
    "duel": gpu_page_llama.graphs,
    "context": gpu_page_llama.context,
    "llama32": gpu_page_llama.lines,
    **{f"context{limit}": gpu_page_llama.context for limit in LIMITS_GIB},
    **dict.fromkeys(gpu_models.SUBJECTS, gpu_page_llama.lines),
    "curves": lambda figures: convergence.lines(curves.together(figures))[:-1],
    "transfer": lambda figures: [*_ceilings(figures.get("ceilings")), *gpu_page_transfer.lines(figures)],
    "kernels": _kernels,
    "tests": _tests,
    "codecs": _tests,
    "compiled": _tests,
    "exact": _bench,
    "small": _bench,
    "hotpath": _hotpath,
}
