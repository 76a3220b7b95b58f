"""Tables of pages, from the files in results/. A page names a table by the line before it: ``<!-- figures: gpt -->``.

Of a table of runs the page chooses rows and columns, and only its cells are written. Other tables are written whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from benchmarks.machine import RESULTS

Row = dict[str, Any]
Lines = list[list[str]]

EPYC = "amd-epyc-2-cores"
H100 = "nvidia-h100-80gb-hbm3"
WORKLOADS = ("gpt", "llama", "vit", "resnet", "lora", "unet")  # the LSTM cell has a column of its own
RUNS = {"gpt": f"{EPYC}/gpt", "gpt-batch-48": f"{EPYC}/gpt-batch-48"}
MODELS = {
    "gpt": "`gpt`, 6 layers, batch 8",
    "llama": "`llama`, 6 layers, batch 6",
    "vit": "`vit`, 6 layers, batch 32",
    "resnet": "`resnet`, 3 blocks a stage, batch 32",
}
NAMES = {  # names of rows in pages, and in files
    "plain PyTorch": "plain",
    "torch checkpoint of every block": "torch checkpoint",
    "blocks.0 : recompute; * : derive": "blocks.0 : recompute, * : derive",
    "@attention : keep; @blocks : recompute": "attention kept",
    "save_on_cpu, pinned": "save_on_cpu",
}


@cache
def file(name: str) -> Any:
    """Return the content of a JSON file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@cache
def runs(name: str) -> dict[str, Row]:
    """Return the rows of a table of runs by name."""
    if name in RUNS:
        return {row["name"]: row for row in file(RUNS[name])["rows"]}
    part = file(H100)["parts"][name.removeprefix("h100 ")]["figures"]
    rows = [*part["rows"], *([part["plain"]] if "plain" in part else [])]
    return {row["name"]: row for row in rows if "left_out" not in row}


def mib(nbytes: float) -> str:
    """Return MiB: without digits from 100 on."""
    value = nbytes / 2**20
    return f"{value:,.0f} MiB" if value >= 100 else f"{value:.1f} MiB"


def gib(nbytes: float) -> str:
    """Return GiB."""
    return f"{nbytes / 2**30:.1f} GiB"


def error(row: Row) -> str:
    """Return a relative error of gradients; 0 where they are equal bit for bit."""
    if row.get("bit_equal") or row.get("equal"):
        return "0"
    return "rounding" if row["grad_error"] < 1e-6 else f"{100 * row['grad_error']:.2g} %"


COLUMNS: dict[str, Callable[[Row], str]] = {  # of tables of runs, by header
    "step time, plain = 1": lambda row: f"{row['ratio']:.2f}",
    "step, ms": lambda row: f"{row['step_ms']:.0f}",
    "saved": lambda row: mib(row["saved_bytes"]),
    "held": lambda row: mib(row["held_bytes"]),
    "held / saved": lambda row: f"{100 * row['held_bytes'] / runs('gpt')['plain']['saved_bytes']:.1f} %",
    "peak of the process": lambda row: mib(row["peak_bytes"]),
    "peak of tensors": lambda row: mib(row["allocated_peak_bytes"]),
    "peak": lambda row: gib(row["peak_bytes"]),
    "gradient error": error,
}


def name_of(label: str) -> str:
    """Return the name in files of a row of a page."""
    text = re.sub(r"[`\"]|\*\*", "", label).strip()
    auto = re.fullmatch(r"auto, (?:budget )?(\d+) %", text)
    return f"auto {auto[1]} %" if auto else NAMES.get(text, text)


def _multiple(value: float) -> str:
    """Return a multiple of a copy's speed with two digits."""
    text = f"{value:.2g}"
    return f"{text}.0" if text.isdigit() and value < 10 else text


def _speeds(rows: Iterable[Row]) -> list[str]:
    cells = []
    for row in rows:
        cells += [_multiple(row["encode"]["of_copy"]), _multiple(row["decode"]["of_copy"])]
    return cells


def costs() -> tuple[list[str], Lines]:
    """What each policy holds and costs: models on the EPYC, a Llama on the H100."""
    models = {name: {row["name"]: row for row in file(f"{EPYC}/{name}")["rows"]} for name in (*WORKLOADS, "lstm")}
    lines = []
    for policy in (
        "derive", "recompute", "expack", "raw @ host", "raw @ disk", "int8", "int4", "int8 @ host", "recompute(int8)",
    ):  # fmt: skip
        on_cpu = "@ host" not in policy  # host memory is a CPU's own: nothing is saved there
        gpt, gpu = models["gpt"][policy], runs("h100 llama").get(policy)
        times = [models[name][policy]["ratio"] for name in WORKLOADS] if on_cpu else []
        lines.append([
            f"`{policy}`",
            f"{100 * gpt['held_bytes'] / gpt['saved_bytes']:.0f} %" if on_cpu else "",
            f"{min(times):.2f} to {max(times):.2f}" if on_cpu else "",
            f"{models['lstm'][policy]['ratio']:.2f}" if on_cpu else "",
            error(gpt) if on_cpu else "",
            f"{gpu['ratio']:.2f}" if gpu else "",
            gib(gpu["peak_bytes"]) if gpu else "",
        ])  # fmt: skip
    plain = runs("h100 llama")["plain"]
    lines.insert(0, ["`keep`", "100 %", "1", "1", "0", "1", gib(plain["peak_bytes"])])
    header = [
        "held, GPT",
        "step time, six models",
        "an LSTM cell",
        "gradient error, GPT",
        "step time, Llama",
        "peak, Llama",
    ]
    return ["policy", *header], lines


def today() -> tuple[list[str], Lines]:
    """What people use today, and what a policy has in its place: the GPT on the EPYC, the Llama on the H100."""
    gpt, gpu = runs("gpt"), runs("h100 llama")

    def on_cpu(name: str) -> str:
        row = gpt[name]
        return f"{row['ratio']:.2f}, {mib(row['held_bytes'])}" + ("" if row["bit_equal"] else f", error {error(row)}")

    def on_gpu(name: str) -> str:
        return f"{gpu[name]['ratio']:.2f}, {gib(gpu[name]['peak_bytes'])}"

    recompute = f"`recompute` alone is better: {on_gpu('recompute')}"
    peaks = [f"{gpt[name]['peak_bytes'] / 2**20:,.0f}" for name in ("auto 50 %", "compile, budget 0.5")]
    budget = gpt["compile, budget 0.5"]
    lines = [
        [
            f"`torch.utils.checkpoint` of each block: {on_cpu('torch checkpoint')}",
            f"`recompute`: {on_cpu('recompute')}",
            f"no edits of the model. On the H100 attention can stay: {on_gpu('attention kept')}, in place of "
            f"{on_gpu('torch checkpoint')}",
        ],
        [
            f"selective checkpoint: {on_cpu('selective checkpoint')}",
            f"`derive`: {on_cpu('derive')}",
            "no edits of the model; neither time nor memory",
        ],
        [
            f"`torch.compile`, memory budget 0.5: {budget['ratio']:.2f}, {mib(budget['held_bytes'])}",
            f"`auto`, 50 %: {on_cpu('auto 50 %')}",
            f"a budget in bytes, and gradients bit for bit; the process needs more: {peaks[0]} MiB, not {peaks[1]}",
        ],
        [
            f"bitsandbytes' 8-bit blocks: {on_cpu('bitsandbytes 8-bit')}",
            f"`int8`: {on_cpu('int8')}",
            "time, and a smaller error",
        ],
        [
            f"`save_on_cpu`, pinned, on the H100: {on_gpu('save_on_cpu')}",
            f"`raw @ host`: {on_gpu('raw @ host')}",
            f"copies overlap with compute; {recompute}",
        ],
        [
            "offload of Transformers or TRL: not measured",
            f"`recompute(raw @ host)` on the H100: {on_gpu('recompute(raw @ host)')}",
            f"any model; at eight blocks {recompute}",
        ],
    ]
    return ["what you use today: step time, held", "with actstore", "what you gain, or do not"], lines


def lossy_codecs() -> tuple[list[str], Lines]:
    """Errors and speeds of lossy codecs on the EPYC."""
    found = {(row["codec"], row["dtype"]): row for row in file(f"{EPYC}/codecs")["rows"]}
    data = {
        "gaussian": "Gaussian",
        "student_t3": "heavy tails",
        "hidden": "outlier channels",
        "gelu": "GELU",
        "relu": "ReLU",
    }
    order = (
        "int8", "int8(affine)", "int8(axis=token)", "fp8", "e5m6", "int6", "int5", "int4", "hadamard128(int4)", "nf4",
        "int3", "int2", "zmask(int8)", "topk(fraction=0.25, int8)", "nm(n=2, m=4, int8)", "bnb8 (bitsandbytes)",
    )  # fmt: skip
    lines = []
    for codec in order:
        row = found[codec, "bfloat16"]
        errors = [f"{100 * row['error'][name]:.2g} %" for name in data]
        label = "bitsandbytes, 8 bits" if codec.startswith("bnb8") else f"`{codec}`"
        lines.append([label, *errors, *_speeds(found[codec, dtype] for dtype in ("float32", "bfloat16"))])
    return ["codec", *data.values(), "float32: encode", "decode", "bfloat16: encode", "decode"], lines


def exact_codecs() -> tuple[list[str], Lines]:
    """Speeds of exact codecs on the EPYC."""
    found = {(row["codec"], row["dtype"]): row for row in file(f"{EPYC}/codecs")["rows"]}
    lines = []
    for codec in ("zmask(expack)", "zmask", "expack", "bit1", "intpack", "zstd", "lz4"):
        own = {"bit1": ["bool"], "intpack": ["int64"]}.get(codec)
        speeds = _speeds(found[codec, dtype] for dtype in own or ("float32", "bfloat16"))
        lines.append([f"`{codec}`", *([f"{speeds[0]} ({own[0]})", speeds[1], "", ""] if own else speeds)])
    return ["exact codec", "float32: encode", "decode", "bfloat16: encode", "decode"], lines


def plans() -> tuple[list[str], Lines]:
    """Plans under budgets, beside policies written by hand."""
    lines = []
    for row in sorted(file(f"{EPYC}/planned")["rows"], key=lambda row: (row["case"], row["share"])):
        budget = "the least" if row["refused"] else f"{row['share']:.0%} of plain"
        best = f"`{row['best']}`: {row['best_ratio']:.2f} of the plan's time" if row["best"] else "none"
        lines.append([
            row["case"], f"{row['budget'] / 2**20:.1f} MiB, {budget}", f"{row['peak'] / row['budget']:.1%}",
            f"{row['measured'] / row['plain_measured']:.2f}", f"{row['predicted'] / row['measured'] - 1:+.1%}", best,
        ])  # fmt: skip
    return ["model", "budget", "peak", "step time, plain = 1", "predicted", "fastest by hand that fits"], lines


def exceptions() -> tuple[list[str], Lines]:
    """Step time of plans with exceptions over that of plans without."""
    lines: dict[str, list[str]] = {}
    for row in file(f"{EPYC}/exceptions")["rows"]:
        predicted = row["predicted"] / row["predicted_without"]
        said = "the same plan" if row["ratio"] is None else f"{row['ratio']:.3f} (predicted {predicted:.3f})"
        lines.setdefault(row["model"], [row["model"]]).append(said)
    return ["model", "25 %", "40 %", "60 %"], list(lines.values())


def long_contexts() -> tuple[list[str], Lines]:
    """Peaks and times of steps with a long context and a large vocabulary."""
    lines = []
    for run in file(f"{EPYC}/long")["runs"]:
        for row in run["rows"]:
            ratios = [f"{row[name]:.2f}" if name in row else "" for name in ("peak", "time")]
            lines.append(
                [f"`{run['workload']['model']}`", row["name"], f"{row['peak_bytes'] / 2**20:,.0f} MiB", *ratios]
            )
    return ["model", "row", "peak", "peak, recompute = 1", "time, recompute = 1"], lines


def encoded() -> tuple[list[str], Lines]:
    """Compiled models with int8 in their graphs, over plain compilation."""
    found = {(row["model"], row["dtype"]): row for row in file(f"{EPYC}/encoded")["rows"] if row["policy"] == "int8"}
    lines = []
    for model in MODELS:
        cells = [f"`{model}`"]
        for row in (found[model, "float32"], found[model, "bfloat16"]):
            cells += [f"{row['held'] / row['plain_held']:.2f}", f"{row['peak'] / row['plain_peak']:.2f}"]
            cells.append(f"{row['times']:.2f}")
        row = found[model, "float32"]
        lines.append([*cells, f"{100 * row['error']:.2f} % ({100 * row['eager_error']:.2f} %)"])
    header = ["held, float32", "peak", "step", "held, bfloat16", "peak", "step", "error, float32 (eager)"]
    return ["model", *header], lines


def _compiled(kind: Callable[[Row], bool]) -> Iterable[tuple[str, Row]]:
    """Yield rows of compiled models under budgets, the label of a model before its first."""
    rows = [row for row in file(f"{EPYC}/compiled")["rows"] if kind(row)]
    for model, label in MODELS.items():
        own = sorted((row for row in rows if row["model"] == model), key=lambda row: -row["share"])
        for number, row in enumerate(own):
            yield ("" if number else label), row


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f}" if nbytes else "0"


def _budget(row: Row) -> str:
    return f"{_size(row['budget'])} ({'least' if row['refused'] else format(row['share'], '.0%')})"


def _plain(row: Row) -> bool:
    return "rival" not in row and "disk" not in row and "max_noise" not in row


def compiled() -> tuple[list[str], Lines]:
    """Compiled models under budgets."""
    lines = []
    for label, row in _compiled(_plain):
        plain = _size(row["plain_peak"]) if label else ""
        times = f"{row['times']:.2f}", f"{row['predicted_times']:.2f}"
        lines.append([label, plain, _budget(row), _size(row["peak"]), _size(row["predicted_peak"]), *times])
    return ["model", "plain", "budget", "peak", "counted", "step time, plain = 1", "predicted"], lines


def compiled_rival() -> tuple[list[str], Lines]:
    """Plans beside PyTorch's own with the same peak."""
    lines = [
        [f"`{row['model']}`", _size(row["rival_peak"]), f"{row['rival_times']:.2f}", _size(row["peak"]),
         f"{row['times']:.2f}"]
        for _, row in _compiled(lambda row: "rival" in row)
    ]  # fmt: skip
    return ["model", "peak, 0.5", "step time, plain = 1", "peak of the plan", "step time, plain = 1"], lines


def _without(row: Row) -> str:
    """The step time of the same budget without a disk or int8, and the budget that it then needs."""
    found = [other for _, other in _compiled(_plain) if all(other[key] == row[key] for key in ("model", "share"))]
    return "".join(
        f"{other['times']:.2f}" + (f", within {_size(other['budget'])}" if other["refused"] else "") for other in found
    )


def compiled_disk() -> tuple[list[str], Lines]:
    """Compiled models under budgets, with a disk."""
    lines = []
    for label, row in _compiled(lambda row: "disk" in row):
        said = _without(row)
        window = str(row["window"] // 2**20) if row["window"] else ""
        lines.append([
            label.partition(",")[0], _budget(row), _size(row["peak"]), _size(row["away"]), window,
            f"{row['times']:.2f}", f"{row['predicted_times']:.2f}", said,
        ])  # fmt: skip
    header = ["budget", "peak", "in the file", "window", "step time, plain = 1", "predicted", "without a disk"]
    return ["model", *header], lines


def compiled_noise() -> tuple[list[str], Lines]:
    """Compiled models under budgets, with int8."""
    lines = []
    for label, row in _compiled(lambda row: "max_noise" in row):
        said = _without(row)
        lines.append([
            label.partition(",")[0], _budget(row), _size(row["peak"]), _size(row["encoded"]), f"{row['times']:.2f}",
            said, f"{100 * row['error']:.2g} %" if row["encoded"] else "0",
        ])  # fmt: skip
    header = ["budget", "peak", "payloads", "step time, plain = 1", "without a loss", "gradient error"]
    return ["model", *header], lines


def _overlap(machine: str) -> tuple[list[str], Lines]:
    lines = []
    for row in file(f"{machine}/overlap")["rows"]:
        moved = row["raw @ disk"]
        lines.append([
            f"{row['plain_ms'] / moved['copies_ms']:.1f}", f"{moved['ratio']:.2f}", f"{row['disk alone']['ratio']:.2f}",
            f"{moved['held_bytes'] / row['saved_bytes']:.2f}",
        ])  # fmt: skip
    header = ["compute time / copy time", "step time, plain = 1", "the disk alone", "held / saved"]
    return header, lines


def hot_paths() -> tuple[list[str], Lines]:
    """Microseconds of one saved tensor of 4 KB by path."""
    lines = []
    for name, row in file(f"{EPYC}/hotpath")["paths"].items():
        label = f"`{name}`" if re.match(r"raw|int", name) else name
        both = "both_us" in row
        lines.append([label, *(["", "", f"{row['both_us']:.0f}"] if both else [
            f"{row['pack_us']:.1f}", f"{row['unpack_us']:.1f}", f"{row['pack_us'] + row['unpack_us']:.1f}"
        ])])  # fmt: skip
    return ["a tensor of 4 KB, or a block", "pack, us", "unpack, us", "both, us"], lines


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %"


NETWORKS = {"ResNet of the benchmark": "the benchmark's ResNet"}


def signs() -> tuple[list[str], Lines]:
    """Gradient errors of networks under lossy codecs, with signs rounded and kept."""
    lines: dict[str, list[str]] = {}
    for row in file(f"{EPYC}/decisions")["errors"]:
        if row["codec"] in ("int8", "int4"):
            cells = lines.setdefault(row["network"], [NETWORKS.get(row["network"], row["network"])])
            cells.append(f"{_percent(row['rounded'])}, {_percent(row['kept'])}")
    return ["activation", "`int8`", "`int4`"], list(lines.values())


def recomputed() -> tuple[list[str], Lines]:
    """Gradient errors of networks whose blocks run again from lossy inputs, deciding anew and repeating decisions."""
    lines: dict[str, list[str]] = {}
    for row in file(f"{EPYC}/decisions")["recomputed"]:
        cells = lines.setdefault(row["network"], [NETWORKS.get(row["network"], row["network"])])
        cells += [_percent(row["anew"]), _percent(row["repeated"]), f"{100 * row['bytes'] - 100:+.0f} %"]
    header = ["`recompute(int8)`: anew", "repeated", "bytes", "`recompute(int4)`: anew", "repeated", "bytes"]
    return ["activation", *header], list(lines.values())


def _routed(run: Row) -> str:
    if run["error"] is None:
        return "an exception: shapes differ"
    moved = f", {run['rerouted']} of {run['tokens']:,} tokens rerouted" if "rerouted" in run else ""
    return _percent(run["error"]) + moved


def experts() -> tuple[list[str], Lines]:
    """Gradient errors of a mixture of experts, and the tokens that a second run sends to other experts."""
    rows = file(f"{EPYC}/decisions")["routed"]
    kinds = ("once", "anew", "repeated")
    lines = [
        [row["each expert computes"], f"`{row['codec']}`", *(_routed(row[kind]) for kind in kinds)] for row in rows
    ]
    return ["each expert computes", "codec", "not recomputed", "recomputed, anew", "recomputed, repeated"], lines


TABLES: dict[str, Callable[[], tuple[list[str], Lines]]] = {
    "costs": costs,
    "today": today,
    "codecs": lossy_codecs,
    "exact codecs": exact_codecs,
    "plans": plans,
    "exceptions": exceptions,
    "encoded": encoded,
    "long": long_contexts,
    "compiled": compiled,
    "compiled beside PyTorch": compiled_rival,
    "compiled with a disk": compiled_disk,
    "compiled with a loss": compiled_noise,
    "overlap, EPYC": lambda: _overlap(EPYC),
    "overlap, Xeon": lambda: _overlap("intel-xeon-2-cores"),
    "hot paths": hot_paths,
    "signs": signs,
    "recomputed": recomputed,
    "experts": experts,
}
